"""The API key of a request, out of its ``Authorization`` header.

Owns the reading of the header. Knows nothing of which keys are right (``router.http.app``).
"""

from __future__ import annotations

_SCHEME = b"bearer"


def bearer_key(authorization: bytes) -> bytes:
    """Return the key of ``Authorization: Bearer KEY``, empty where there is none; the scheme may be in any case (RFC 9110)."""
    scheme, _, key = authorization.strip().partition(b" ")
    return key.strip() if scheme.lower() == _SCHEME else b""
