"""From which hosts the router fetches images: the operator's list, and what a name on it may resolve to.

Owns the rule that keeps a client from reaching into the operator's network through the router. Pure, without I/O:
``router.images.fetch`` resolves names and asks here before every connection.

An entry is a name (``images.example.com``), all names below one (``*.example.com``), either with a port, or an address or a
network (``10.1.0.0/16``). A name without a port stands for its scheme's. Addresses that are not public are reached only if a
network on the list holds them, whether a URL spells them or a name resolves to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from core.errors import ConfigError

Address = IPv4Address | IPv6Address

DEFAULT_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(
    r"(?P<any>\*\.)?(?P<name>[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*)(:(?P<port>\d{1,5}))?"
)
_UNICAST = IPv6Network("2000::/3")  # RFC 4291: all that is given to anybody; what translates or is of old lies outside it
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


class HostRules:
    """The parsed list.

    Raises:
        ConfigError: an entry is none of the forms.
    """

    def __init__(self, entries: Sequence[str], setting: str) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[tuple[str, int | None]] = set()
        self._suffixes: set[tuple[str, int | None]] = set()
        for entry in entries:
            self._add(entry.strip().lower(), setting)

    def _add(self, entry: str, setting: str) -> None:
        try:
            self._networks.append(ip_network(entry.strip("[]")))
        except ValueError:
            found = _NAME.fullmatch(entry)
            if found is None or "/" in entry or int(found["port"] or 1) not in range(1, 65536):
                raise ConfigError(
                    f"{setting}: {entry!r} is no host; expected a name, *.name, either with :port, an address or a network",
                    param=setting,
                ) from None
            names = self._suffixes if found["any"] else self._names
            names.add((found["name"], int(found["port"]) if found["port"] else None))

    def __bool__(self) -> bool:
        return bool(self._networks or self._names or self._suffixes)

    def allows_host(self, scheme: str, host: str, port: int) -> bool:
        """Say whether a URL may name this host and port; what a name resolves to is another question."""
        address = as_address(host)
        if address is not None:
            return self._is_listed(address)
        name = host.lower().removesuffix(".")
        ports = (port, None) if port == DEFAULT_PORTS.get(scheme) else (port,)
        parents = [name[index + 1 :] for index, character in enumerate(name) if character == "."]
        return any((name, known) in self._names for known in ports) or any(
            (parent, known) in self._suffixes for parent in parents for known in ports
        )

    def allows_address(self, address: Address) -> bool:
        """Say whether a connection may be made to it."""
        return self._is_listed(address) or is_public(address)

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def as_address(host: str) -> Address | None:
    """Return what a URL's host spells if it is an address, with or without brackets."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Say whether an address is one of the internet, also where IPv6 wraps an IPv4 address."""
    inner = _wrapped(address) if isinstance(address, IPv6Address) else None
    if inner is not None:
        return is_public(inner)
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return False
    return address.is_global and not address.is_multicast


def _wrapped(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour
