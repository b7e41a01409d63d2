"""Change of the cluster key without an outage: clients of the cluster's sockets accept servers that hold another of their keys.

Owns the keys that a process knows and how a client finds the one of its server. A CURVE server has exactly one key pair, and a
client must know its public half before the first byte, so the client tries. A DEALER with ``IMMEDIATE`` connects once per key:
only the successful handshake gets a pipe. A client that queues while connecting tries ``next_keys`` after a refusal. With
a single key, the usual case, nothing here adds a byte. The procedure: docs/deploy.md, "Changing the cluster key".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.errors import ConfigError
from core.wire.curve import ClusterKeys, derive_keys, use_client_keys
from core.wire.sockets import AnySocket

if TYPE_CHECKING:
    from core.config_router import SecuritySection


def keys_of(security: SecuritySection) -> ClusterKeys | None:
    """Return the cluster's keys: the pair to bind with, and in ``others`` those of further servers that clients accept.

    Raises:
        ConfigError: a key is short, or there are other keys without a cluster key.
    """
    others = tuple(key.strip() for key in security.other_cluster_keys.split(",") if key.strip())
    keys = derive_keys(security.cluster_key)
    if keys is None and others:
        raise ConfigError(
            "security.other_cluster_keys: set security.cluster_key too, or clear it; without a key sockets are open",
            param="security.other_cluster_keys",
        )
    return keys and keys.with_others(derive_keys(key, "security.other_cluster_keys") for key in others)


def next_keys(keys: ClusterKeys | None) -> ClusterKeys | None:
    """Return the keys to try after a server refused these; None if no key is left."""
    if keys is None or not keys.others:
        return None
    first, *rest = keys.others
    return first.with_others(rest)


def connect_with_each_key(dealer: AnySocket, address: str, keys: ClusterKeys | None) -> None:
    """Connect a DEALER made with ``keys`` and ``IMMEDIATE`` once per key; at most one of the connections succeeds.

    ZeroMQ makes a second connection of a DEALER only to an address with another spelling: the port gets leading zeros.

    Raises:
        zmq.ZMQError: the address cannot be used.
    """
    dealer.connect(address)
    host, _, port = address.rpartition(":")
    zeros = ""
    while (keys := next_keys(keys)) is not None:
        zeros += "0"
        use_client_keys(dealer, keys)
        dealer.connect(f"{host}:{zeros}{port}")
