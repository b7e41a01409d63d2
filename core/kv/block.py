"""One physical KV cache block and the states it passes through.

Owns the metadata of a block, never its bytes: those are in the pool tensor of the engine, at row ``block_id``.
Written only by ``core.kv.pool``; read by the KV cache managers and the connectors.

Life cycle. The state is derived from the fields, so that it can never disagree with them:

| state     | fields               | enters by                               | leaves by                                 |
|-----------|----------------------|-----------------------------------------|-------------------------------------------|
| NULL      | is_null              | pool construction (block 0)             | never; stands for "no block" in a table   |
| FREE      | ref_cnt = 0, no hash | construction, unhashed free, hash lost  | allocation                                |
| ALLOCATED | ref_cnt > 0, no hash | allocation (generation + 1), hash lost  | hashing, free                             |
| FULL      | ref_cnt > 0, hashed  | hashing, or a hit on an EVICTABLE block | free, hash lost                           |
| EVICTABLE | ref_cnt = 0, hashed  | free of a FULL block                    | a hit (same generation), reuse, hash lost |

A hit is not a reallocation: it adds a reference and keeps the generation. A lease, a pin or a transfer in flight is one more
reference that no request holds (``BlockPool.touch``, later ``BlockPool.free_blocks``). While it lasts the block
cannot be reused, even if its request ends. The states of a remote load are told apart by the holder of that
reference, not by the pool. A block that loses its hash while referenced is ALLOCATED again, and otherwise FREE, at its place in
the free queue; its generation grows when it is allocated, and whenever it will be rewritten in place, with or without its hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NULL_BLOCK_ID = 0


class BlockState(Enum):
    """The state of a block; see the table above."""

    NULL = "null"
    FREE = "free"
    ALLOCATED = "allocated"
    FULL = "full"
    EVICTABLE = "evictable"


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """Metadata of one physical block.

    ``ref_cnt`` counts references: block tables, leases, pins. ``block_hash`` is the 16-byte chain value at the block's end and
    ``group_id`` the KV cache group it was hashed for; both are meaningful only together. ``generation`` grows at every
    allocation and before anything in the block is computed again in place, so (block_id, generation) names one content to the
    bit. It grows without a loss of the hash in one case: when every token of a request was loaded, the last one is computed
    again, into a slot of a block that was sealed already; the value is the same to rounding.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    group_id: int = 0
    generation: int = 0
    is_null: bool = False
    prev_free_block: KVCacheBlock | None = None
    next_free_block: KVCacheBlock | None = None

    @property
    def state(self) -> BlockState:
        """State of the life cycle, derived from the fields."""
        if self.is_null:
            return BlockState.NULL
        if self.block_hash is None:
            return BlockState.ALLOCATED if self.ref_cnt else BlockState.FREE
        return BlockState.FULL if self.ref_cnt else BlockState.EVICTABLE

    def __repr__(self) -> str:
        block_hash = None if self.block_hash is None else self.block_hash.hex()[:8]
        return (
            f"KVCacheBlock(id={self.block_id}, {self.state.value}, refs={self.ref_cnt}, "
            f"hash={block_hash}, generation={self.generation})"
        )
