"""Reads the API key of a request from its headers, and names its holder. ``router.http.app`` checks it."""

from __future__ import annotations

from hashlib import blake2b

from router.http.errors import is_anthropics

_SCHEME = b"bearer"


def key_of(path: str, authorization: bytes, x_api_key: bytes) -> bytes:
    """Return the key of a request by its path and two of its headers, or empty.

    Anthropic's clients send ``x-api-key``, which their endpoints read if there is no bearer token.
    """
    key = bearer_key(authorization)
    return key or (x_api_key.strip() if is_anthropics(path) else b"")


def bearer_key(authorization: bytes) -> bytes:
    """Return the key of ``Authorization: Bearer KEY``, or empty; the scheme is case-insensitive (RFC 9110)."""
    scheme, _, key = authorization.strip().partition(b" ")
    return key.strip() if scheme.lower() == _SCHEME else b""


def tenant_of(key: bytes) -> int:
    """Return the number that stands for a key between processes, the same at every router; 0 without a key."""
    return int.from_bytes(blake2b(key, digest_size=8, person=b"kvferry-tenant").digest(), "big") if key else 0
