"""Counts clients' connections by address, and knows which of them are idle.

Owns the counts and the order in which idle connections are closed; ``router.http.connections`` closes them. IPv6 addresses
count by their /64 network, because one client usually has a whole one. Load balancers are exempt from the limit per address,
because many clients share their addresses.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Generic, TypeVar

from core.errors import ConfigError

Connection = TypeVar("Connection")
_IPV6_PREFIX_BITS = 64


class ClientTable(Generic[Connection]):
    """Connections by address. ``max_per_address`` 0 = no limit; ``proxies`` are exempt addresses and networks.

    Raises:
        ConfigError: one of ``proxies`` is neither an address nor a network.
    """

    def __init__(self, max_connections: int, max_per_address: int = 0, proxies: Sequence[str] = ()) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._proxies = networks_of(proxies)
        self._group_of: dict[Connection, str] = {}
        self._num_of_group: Counter[str] = Counter()
        self._idle: OrderedDict[Connection, None] = OrderedDict()  # longest idle first

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def num_idle(self) -> int:
        """The number of connections that wait for a request."""
        return len(self._idle)

    @property
    def is_overfull(self) -> bool:
        """True if one connection must be closed."""
        return len(self._group_of) > self._max_connections

    def add(self, connection: Connection, address: str) -> bool:
        """Add a new, idle connection; return False if its address now has too many."""
        group = self._group(address)
        self._group_of[connection] = group
        self._idle[connection] = None
        if not group:
            return True
        self._num_of_group[group] += 1
        return not self._max_per_address or self._num_of_group[group] <= self._max_per_address

    def remove(self, connection: Connection) -> None:
        """Forget a connection. Idempotent."""
        group = self._group_of.pop(connection, None)
        self._idle.pop(connection, None)
        if group:
            self._num_of_group[group] -= 1
            if not self._num_of_group[group]:
                del self._num_of_group[group]

    def mark_busy(self, connection: Connection) -> None:
        """Record that a whole request head was received."""
        self._idle.pop(connection, None)

    def mark_idle(self, connection: Connection) -> None:
        """Record that the connection waits for its next request."""
        if connection in self._group_of:
            self._idle[connection] = None
            self._idle.move_to_end(connection)

    def longest_idle(self) -> Connection:
        """Return the connection that has been idle longest; there is always one, because new connections are idle."""
        return next(iter(self._idle))

    def _group(self, address: str) -> str:
        """Return the key under which an address is counted; empty if it has no limit."""
        try:
            known = ip_address(address.partition("%")[0])
        except ValueError:
            return ""  # a Unix socket has no address
        known = _unmapped(known)
        if any(known.version == network.version and known in network for network in self._proxies):
            return ""
        if isinstance(known, IPv6Address):
            return str(IPv6Network((known, _IPV6_PREFIX_BITS), strict=False))
        return str(known)


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that a dual-stack socket reports as IPv6."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def networks_of(proxies: Sequence[str]) -> list[IPv4Network | IPv6Network]:
    """Return the networks of ``router.proxy_addresses``.

    Raises:
        ConfigError: one is neither an address nor a network.
    """
    return [_network(text) for text in proxies]


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        path = "router.proxy_addresses"
        raise ConfigError(f"{path}: {text!r} is neither an address nor a network such as 10.0.0.0/8", param=path) from None
