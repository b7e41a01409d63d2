"""Numbers and names on which all processes of a cluster must agree, and which are not settings."""

from __future__ import annotations

HASH_BLOCK_SIZE = 16  # tokens per hash of the chain in ``core.kv.hashing``
DIGEST_TRANSPORTS = frozenset({"tcp"})  # where connector.kv_verify = "auto" checks the bytes as well
