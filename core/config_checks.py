"""Rules for settings that any section may have: an order of numbers, settings that go together, addresses.

Owns the rules and their messages; ``core.config`` says which settings they hold for. Every refusal is a ``ConfigError`` that
names the setting.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs, unquote, urlsplit

from core.errors import ConfigError

# Host: name, IPv4, [IPv6] or *
_ADDRESS = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+(?:%[^\s\]/]+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
# As browsers send it, or a pattern of such ones: *.example. Schemes of their own may have no host, or one in upper case
_PLAIN_ORIGIN = r"(\*|[a-z*][a-z0-9+.*-]*://)(\[[0-9a-f:.]+\]|[a-z0-9_.*-]+)(:[0-9*]{1,5})?"
_OTHER_ORIGIN = r"[a-z][a-z0-9+.-]*://([A-Za-z0-9_.~%!$&'()*+,;=-]+(:[0-9*]{1,5})?)?"
ORIGIN = rf"^(\*|null|{_PLAIN_ORIGIN}|{_OTHER_ORIGIN})$"
# Of http and https browsers send a host in lower case, and leave out the scheme's own port
NO_ORIGIN = r"^(https?://(.*[^a-z0-9_.*:\[\]-].*)?|http://.*:80|https://.*:443)$"
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")  # as redis-py compares them
_IPC_ADDRESS = re.compile(r"ipc://[^\s*]{1,100}")  # a path, or with @ a name in the network namespace


def check_order(path: str, section: object, *rules: str) -> None:
    """Refuse settings of a section that break a rule such as ``lease_s <= lease_max_s``; both are named by their paths."""
    for low, relation, high in map(str.split, rules):
        low_value, high_value = getattr(section, low), getattr(section, high)
        if low_value < high_value or (relation == "<=" and low_value == high_value):
            continue
        raise ConfigError(
            f"{path}.{low} = {_in_full(low_value)} must be {'below' if relation == '<' else 'at most'} "
            f"{path}.{high} = {_in_full(high_value)}: lower the first or raise the second",
            param=f"{path}.{low}",
        )


def _in_full(value: float) -> str:
    """Return a number with all digits that it has, and a float without those that binary fractions add."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def check_both_or_neither(path: str, section: object, first: str, second: str) -> None:
    """Refuse one of two text settings without the other."""
    values = {first: getattr(section, first), second: getattr(section, second)}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == 1:
        given = second if missing == [first] else first
        raise ConfigError(
            f"{path}.{given} is set and {path}.{missing[0]} is not: set both, or neither", param=f"{path}.{missing[0]}"
        )


def check_address(path: str, address: str, lowest_port: int = 0) -> None:
    """Refuse what ZeroMQ could not bind. Port 0 is any free one."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not lowest_port <= int(found["port"]) <= 65535:
        raise ConfigError(f"{path} = {address!r}: expected tcp://host:port with port {lowest_port} to 65535", param=path)


def check_process_ports(path: str, port: int, num_processes: int) -> None:
    """Refuse a port of the first of several router processes that leaves none for the others. Port 0 is any free one."""
    if port and port + num_processes - 1 > 65535:
        raise ConfigError(
            f"{path}: port {port} with router.processes = {num_processes}: each process takes the next port, and 65535 is the "
            f"last; choose a port up to {65536 - num_processes}",
            param=path,
        )


def check_peer_address(path: str, address: str) -> None:
    """Refuse what ZeroMQ could not connect to."""
    check_address(path, address, lowest_port=1)
    if address.startswith("tcp://*:"):
        raise ConfigError(f"{path} = {address!r}: * is only for binding; name the host to connect to", param=path)


def http_problem(url: str) -> str:
    """Return why a URL is no address of an HTTP server; "" if it is one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if not url.lower().startswith(("http://", "https://")) or not parts.hostname:  # urlsplit skips blanks before a scheme
        return "it is no address of a server"
    return "port 0 is none to connect to" if port == 0 else ""


def check_http_address(path: str, url: str) -> None:
    """Refuse what is no address of an HTTP server."""
    problem = http_problem(url)
    if problem:
        raise ConfigError(f"{path} = {url!r}: {problem}; give http://HOST:PORT", param=path)


def check_header_key(source: str, key: str) -> str:
    """Return an API key, which a client can send only if it is printable ASCII.

    Raises:
        ConfigError: it has another character; names where the key is from, not the key.
    """
    for number, character in enumerate(key, start=1):
        if not (character.isascii() and character.isprintable()):
            raise ConfigError(
                f"{source}: character {number} of the key is not printable ASCII, which its header must be: use another key",
                param=source.partition(" ")[0],
            )
    return key


def check_redis_url(path: str, url: str) -> None:
    """Refuse what is no address of a Redis, and one with a password, which would be visible in every copy of the settings.

    The address is not quoted: any part of it may belong to a password.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme != "unix":
            unquote(parts.hostname or "").encode("idna")
        is_right = url.startswith(_REDIS_SCHEMES) and parts.port != 0
    except ValueError:  # of the port, brackets, or a name that none can be
        is_right = False
    if not is_right or parts.password is not None or "password" in parse_qs(parts.query):
        raise ConfigError(
            f"{path}: expected redis://[user@]host:port/db, and the password in $KVFERRY_REDIS_PASSWORD, as it is", param=path
        )


def check_origin(path: str, origin: str) -> None:
    """Refuse what no browser sends as the origin of a web page: it would be compared with every request, and never be equal."""
    if re.fullmatch(ORIGIN, origin) is None or re.fullmatch(NO_ORIGIN, origin) is not None:
        raise ConfigError(
            f"{path}: {origin!r} is no origin that a browser sends: expected * or scheme://host[:port] in lower case, "
            "without a path, and without a port that is the scheme's own",
            param=path,
        )


def check_local_addresses(path: str, section: object, *names: str) -> None:
    """Refuse addresses of this machine to which ZeroMQ could not connect: also ipc://; those that are empty are not used."""
    for name in names:
        address = getattr(section, name)
        if not _IPC_ADDRESS.fullmatch(address) and address:
            check_peer_address(f"{path}.{name}", address)
