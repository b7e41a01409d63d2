"""The description of blocks that readers may read: which blocks, their generations, and their hashes.

Owns how a ``KVHandoff`` is made from a worker's blocks; who grants it, and for how long, is its callers' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.kv.block import KVCacheBlock
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.pairing import KVHolder


class HandoffOwner(KVHolder, Protocol):
    """The identity of this worker in its handoffs (``ConnectorContext`` has it)."""

    @property
    def incarnation(self) -> int:
        """Number of this start of the worker."""
        ...


def describe_group(group_id: int, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes], start: int = 0) -> GroupBlocks:
    """Name a group's blocks after the last one that it has freed.

    ``blocks`` and ``hashes`` are those of the prompt from block ``start`` on; freed ones are null.
    """
    first = next((index + 1 for index in range(len(blocks) - 1, -1, -1) if blocks[index].is_null), 0)
    held = blocks[first:]
    return GroupBlocks(
        group_id=group_id,
        first_block=start + first,
        block_ids=tuple(block.block_id for block in held),
        generations=tuple(block.generation for block in held),
        block_hashes=tuple(hashes[first:]),
    )


def describe_blocks(
    owner: HandoffOwner,
    groups: Sequence[GroupBlocks],
    *,
    transfer_id: str,
    control_address: str,
    num_tokens: int,
    lease_ms: int,
) -> KVHandoff:
    """Describe to readers the owner's blocks of the first ``num_tokens`` tokens."""
    return KVHandoff(
        transfer_id=transfer_id,
        engine_id=owner.engine_id,
        incarnation=owner.incarnation,
        control_address=control_address,
        model_fingerprint=owner.model_fingerprint,
        layout=owner.layout,
        groups=tuple(groups),
        num_tokens=num_tokens,
        lease_ms=lease_ms,
    )
