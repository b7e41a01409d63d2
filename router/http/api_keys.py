"""Reads the API key of a request from its ``Authorization`` header. ``router.http.app`` checks it."""

from __future__ import annotations

_SCHEME = b"bearer"


def bearer_key(authorization: bytes) -> bytes:
    """Return the key of ``Authorization: Bearer KEY``, or empty; the scheme is case-insensitive (RFC 9110)."""
    scheme, _, key = authorization.strip().partition(b" ")
    return key.strip() if scheme.lower() == _SCHEME else b""
