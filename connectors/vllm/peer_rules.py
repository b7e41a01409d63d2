"""Which peers a decode engine may connect to.

``kv_transfer_params`` can be written by any client of vLLM's API, so an address in them is no reason to connect.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from core.errors import ConfigError
from core.wire.sockets import split_tcp

ANY = "*"
LOOPBACK, LOCALHOST = "127.0.0.1", "localhost"
_HOST = re.compile(r"[\w.:-]+(%[\w.-]+)?", re.ASCII)  # a name, or an address with its zone; ZeroMQ reads more: "source;peer"


def names_host(host: str) -> bool:
    """Return True if this is a name or an address, and nothing that ZeroMQ would read as more."""
    return _HOST.fullmatch(host) is not None


class PeerRules:
    """Allowed names and networks. ``*`` allows every host, ``*.example.org`` every name in a domain.

    A name in an address is compared as text and never resolved, so that a client cannot choose what is looked up.
    Raises: ConfigError for an entry that is neither a name nor a network.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = tuple(allowed)
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: list[str] = []
        for entry in allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                if not entry or "/" in entry or "*" in entry.removeprefix("*"):
                    message = f"kvferry.peers: {entry!r} is neither a name nor a network such as 10.0.0.0/8"
                    raise ConfigError(message, param="kvferry.peers") from None
                self._names.append(entry.lower())
                if entry.lower() == LOCALHOST:  # an engine told to bind it gives its address to others
                    self._networks.append(ipaddress.ip_network(LOOPBACK))

    def refusal(self, control_address: str) -> str | None:
        """Return why this address must not be connected to, None if it may. It is ``tcp://host:port``."""
        try:
            host, port = split_tcp(control_address)
        except ConfigError:
            return f"{control_address!r:.80} is no address of a peer"
        if not names_host(host):
            return f"{control_address!r:.80} names no host"
        if not 0 < port < 65536:
            return f"{control_address!r:.80} names no port"
        if self._allows(host.lower()):
            return None
        return f"peer {host!r:.80} is not allowed by kvferry.peers {list(self._allowed)}"

    def _allows(self, host: str) -> bool:
        if ANY in self._names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in self._names)
        return any(address in network for network in self._networks)
