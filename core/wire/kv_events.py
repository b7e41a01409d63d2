"""Messages about a worker's prefix cache, byte for byte as vLLM 0.32 encodes its own (``vllm/distributed/kv_events.py``).

Three frames: the topic ``kv@<engine id>@<model>``, a sequence number of 8 bytes (big-endian, from 0 at the start of the worker,
one per batch), and a MessagePack array ``[ts, events, data_parallel_rank]`` of maps tagged by ``type``. Knows nothing of
sockets: ``core.engine.kv_events`` publishes them.

``block_hashes`` are the 16-byte chain values of ``core.kv.hashing``, the same in every worker with the same weights.
"""

from __future__ import annotations

import msgspec

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MEDIUM_GPU = "GPU"  # vLLM's name of the engine's own pool, on a CPU too

EventKey = str | int | tuple[str, int]  # LoRA name or salt; (identifier of a media item in hex, offset in the block)


class BlockStoredMessage(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """Consecutive blocks became hits. ``token_ids`` are theirs; ``extra_keys`` has an entry for each block.

    Fields and their order are vLLM's; those that it adds for offloading and sessions are left out.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[EventKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemovedMessage(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """These blocks are no longer hits."""

    block_hashes: tuple[bytes, ...]
    medium: str | None
    group_idx: int | None = None


class AllBlocksClearedMessage(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The prefix cache is empty."""


KVEventMessage = BlockStoredMessage | BlockRemovedMessage | AllBlocksClearedMessage


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one step, in order. ``ts`` is in Unix seconds."""

    ts: float
    events: tuple[KVEventMessage, ...]
    data_parallel_rank: int | None = None
