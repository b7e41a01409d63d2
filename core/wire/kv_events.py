"""Messages about a worker's prefix cache, in the format that other routers and caches read (vLLM's ``kv_events``).

Three frames: the topic ``kv@<engine id>@<model>``, a sequence number of 8 bytes (big-endian, from 0 at the start of the worker,
one per batch), and a MessagePack map ``{ts, events, data_parallel_rank}``. Knows nothing of sockets: ``core.engine.kv_events``
publishes them.

``block_hashes`` are the 16-byte chain values of ``core.kv.hashing``, the same in every worker with the same weights.
"""

from __future__ import annotations

import msgspec

SEQUENCE_BYTES = 8


class BlockStoredMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored"):
    """Consecutive blocks became hits. ``token_ids`` are theirs, ``medium`` None is the worker's own pool."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    group_idx: int = 0


class BlockRemovedMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved"):
    """These blocks are no longer hits."""

    block_hashes: tuple[bytes, ...]
    medium: str | None = None
    group_idx: int = 0


class AllBlocksClearedMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="AllBlocksCleared"):
    """The prefix cache is empty."""


KVEventMessage = BlockStoredMessage | BlockRemovedMessage | AllBlocksClearedMessage


class KVEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one step, in order. ``ts`` is in Unix seconds."""

    ts: float
    events: tuple[KVEventMessage, ...]
    data_parallel_rank: int | None = None
