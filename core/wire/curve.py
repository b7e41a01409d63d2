"""Authentication and encryption of the cluster's own sockets: ZeroMQ CURVE, with keys that all members derive from one secret.

Owns the derivation and the socket options. Knows nothing of planes: the maker of a socket says whether it binds or connects.
A server accepts every client that knows its public key. A client needs that key before its first byte (ZMTP 3.1, CURVE: RFC 26
of ZeroMQ) and nothing on the wire contains it, so here "public" is a secret of the cluster as well and no list of clients is
needed. Sessions have keys of their own: an attacker that learns the cluster key later cannot decrypt recorded traffic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import zmq
from zmq.utils import z85

from core.errors import ConfigError
from core.ids import IdSource

MIN_KEY_CHARS = 32
FRAME_OVERHEAD_BYTES = 64  # the minimum that CURVE adds to a frame, which ZeroMQ counts against the largest one allowed


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Key pairs for sockets that bind and for sockets that connect, in ZeroMQ's printable form.

    ``others`` are keys of further servers that clients accept while the cluster key changes.
    """

    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)
    others: tuple[ClusterKeys, ...] = field(default=(), repr=False)

    def with_others(self, others: Iterable[ClusterKeys | None]) -> ClusterKeys:
        """Return these keys with other ``others``; each key is kept once."""
        unique = dict.fromkeys(keys for keys in others if keys is not None and keys.server_public != self.server_public)
        return replace(self, others=tuple(unique))


def new_cluster_key(ids: IdSource) -> str:
    """Return a new secret of 32 random bytes, as text."""
    return ids.bits(256).to_bytes(32, "little").hex()


def derive_keys(cluster_key: str, setting: str = "security.cluster_key") -> ClusterKeys | None:
    """Return the keys of a cluster; None for an empty secret, which means open sockets. ``setting`` is the secret's setting.

    Raises:
        ConfigError: the secret is short, or this ZeroMQ cannot encrypt.
    """
    if not cluster_key:
        return None
    if len(cluster_key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{setting}: a key of {len(cluster_key)} characters, at least {MIN_KEY_CHARS} are needed: `kvferry keygen`",
            param=setting,
        )
    if not zmq.has("curve"):
        raise ConfigError(f"{setting}: this build of ZeroMQ has no CURVE", param=setting)
    server, client = _secret(cluster_key, b"kvferry-server"), _secret(cluster_key, b"kvferry-client")
    return ClusterKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def secure_server(bound: zmq.Socket[Any], keys: ClusterKeys | None) -> None:
    """Make a binding socket refuse clients without the cluster's keys; does nothing without keys. Set its limits before."""
    if keys is not None:
        bound.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        bound.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public)
        bound.setsockopt(zmq.CURVE_SERVER, 1)
        _make_room(bound)


def secure_client(connecting: zmq.Socket[Any], keys: ClusterKeys | None) -> None:
    """Make a connecting socket talk to holders of the keys only; does nothing without keys. Set its limits before."""
    if keys is not None:
        use_client_keys(connecting, keys)
        _make_room(connecting)


def use_client_keys(connecting: zmq.Socket[Any], keys: ClusterKeys) -> None:
    """Use these keys for the connections that a socket makes from now on."""
    connecting.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    connecting.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    connecting.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


def _make_room(limited: zmq.Socket[Any]) -> None:
    limit = limited.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(limit, int)
    if limit >= 0:
        limited.setsockopt(zmq.MAXMSGSIZE, limit + FRAME_OVERHEAD_BYTES)


def _secret(cluster_key: str, purpose: bytes) -> bytes:
    return z85.encode(hashlib.blake2b(cluster_key.encode(), digest_size=32, person=purpose).digest())
