"""The hosts from which the router fetches images: the operator's list, and the addresses that its names may resolve to.

Owns the rule that keeps clients from reaching the operator's network through the router. Pure functions without I/O.

An entry is a name (``images.example.com``), all names below one (``*.example.com``), both optionally with a port, or an
address or a network (``10.1.0.0/16``), which allow all ports. Names are in ASCII. A name without a port allows the default
port of the scheme. An address that is not public is allowed only if an entry contains it, whether it is in the URL or a name
resolves to it.
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
_UNICAST = IPv6Network("2000::/3")  # RFC 4291: all assigned unicast addresses; translation and deprecated prefixes are outside
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


class HostRules:
    """The parsed list.

    Raises:
        ConfigError: an entry has none of these forms.
    """

    def __init__(self, entries: Sequence[str], setting: str) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[tuple[str, int | None]] = set()
        self._suffixes: set[tuple[str, int | None]] = set()
        for entry in entries:
            self._add(entry.strip().lower(), setting)

    def _add(self, entry: str, setting: str) -> None:
        network = _as_network(entry)
        if network is not None:
            self._networks.append(network)
            return
        if _as_network(entry.rpartition(":")[0]) is not None:
            raise ConfigError(
                f"{setting}: {entry!r} is an address with a port; an address allows all ports: leave the port out",
                param=setting,
            )
        found = _NAME.fullmatch(entry)
        if found is None or "/" in entry or int(found["port"] or 1) not in range(1, 65536):
            raise ConfigError(
                f"{setting}: {entry!r} is no host; expected a name, *.name, either with :port, an address or a network; "
                "names in ASCII, such as xn--bcher-kva.example",
                param=setting,
            )
        names = self._suffixes if found["any"] else self._names
        names.add((found["name"], int(found["port"]) if found["port"] else None))

    def __bool__(self) -> bool:
        return bool(self._networks or self._names or self._suffixes)

    def allows_host(self, scheme: str, host: str, port: int) -> bool:
        """Return True if a URL may name this host, in ASCII, and port. Its address must be checked as well."""
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
        """Return True if the router may connect to this address."""
        return self._is_listed(address) or is_public(address)

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _as_network(entry: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(entry.strip("[]"))
    except ValueError:
        return None


def as_address(host: str) -> Address | None:
    """Return the address that a URL's host is, with or without brackets; None if it is a name."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Return True if an address is public, also if it is an IPv4 address inside IPv6."""
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
