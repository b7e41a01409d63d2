"""Block tables of one KV cache group: what one attention type holds for each request.

Owns request id -> blocks and how many leading blocks of each are hashed, and sealed. Does not know other groups, budgets or why
blocks are asked for. Called only by ``core.kv.coordinator``, which checks that enough blocks are free before it lets anyone
allocate.

A new attention type overrides ``find_longest_cache_hit``. One that forgets tokens overrides ``remove_skipped_blocks`` too and
says so by ``max_admission_blocks``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

from core.kv.block import KVCacheBlock
from core.kv.pool import BlockPool
from core.kv.spec import FullAttentionSpec, KVCacheSpec, ceil_div


class SingleTypeKVCacheManager(ABC):
    """Block tables of the requests in one group.

    ``max_admission_blocks`` caps what one request really holds, for types that give blocks back while a request runs; None
    if the type never does. It counts only for admission: the table itself has an entry for every position.
    """

    def __init__(
        self, spec: KVCacheSpec, block_pool: BlockPool, group_id: int, max_admission_blocks: int | None = None
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.block_pool = block_pool
        self.group_id = group_id
        self.max_admission_blocks = max_admission_blocks
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        self.num_sealed_block: dict[str, int] = {}  # hits count: whoever filled them seals them

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int, alignment: int) -> list[KVCacheBlock]:
        """Return the cached blocks of the longest prefix of at most ``max_length`` tokens, a multiple of ``alignment``.

        ``block_hashes`` has one value per ``hash_block_size`` tokens. Takes no reference.
        """

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Give back blocks that no later token attends to. Nothing, for a type whose tokens attend to all before."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        apply_admission_cap: bool = False,
    ) -> int:
        """Return how many free blocks it takes to give the request slots for ``num_tokens`` tokens.

        Hits that nobody references lie in the free queue and leave it when they are adopted, so they count.
        """
        num_required = -(-num_tokens // self.block_size)
        if apply_admission_cap and self.max_admission_blocks is not None:
            num_required = min(num_required, self.max_admission_blocks)
        blocks = self.req_to_blocks.get(request_id)
        if blocks is not None:
            num_missing = num_required - len(blocks)
            return num_missing if num_missing > 0 else 0
        num_evictable = sum(block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks)
        return max(num_required - len(new_computed_blocks), 0) + num_evictable

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock]) -> None:
        """Start the table of a request with its hits and take a reference of each."""
        assert request_id not in self.req_to_blocks
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id] = list(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)
        self.num_sealed_block[request_id] = len(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Extend the table to slots for ``num_tokens`` tokens and return the blocks added."""
        blocks = self.req_to_blocks[request_id]
        count = ceil_div(num_tokens, self.block_size) - len(blocks)
        if count <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(count)
        blocks += new_blocks
        return new_blocks

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int, token_ids: Sequence[int] = ()
    ) -> None:
        """Make the full blocks of the first ``num_tokens`` tokens hits, as far as they are none yet."""
        num_full = num_tokens // self.block_size
        num_cached = self.num_cached_block[request_id]
        if num_full <= num_cached:
            return
        blocks = self.req_to_blocks[request_id][:num_full]
        assert len(blocks) == num_full, f"{request_id} has no blocks for {num_tokens} tokens"
        self.block_pool.cache_full_blocks(blocks, block_hashes, num_cached, self.block_size, self.group_id, token_ids)
        self.num_cached_block[request_id] = num_full

    def seal_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Seal the full blocks of the first ``num_tokens`` tokens, as far as this request has not done so."""
        num_full = num_tokens // self.block_size
        num_sealed = self.num_sealed_block[request_id]
        if num_full <= num_sealed:
            return
        blocks = self.req_to_blocks[request_id][:num_full]
        assert len(blocks) == num_full, f"{request_id} has no blocks for {num_tokens} tokens"
        self.block_pool.seal_full_blocks(blocks, block_hashes, num_sealed, self.block_size, self.group_id)
        self.num_sealed_block[request_id] = num_full

    def seal_partial_block(self, request_id: str, num_tokens: int, block_hash: bytes) -> None:
        """Seal the block in whose middle the first ``num_tokens`` tokens end, if there is one and it is not full already."""
        index, num_tail = divmod(num_tokens, self.block_size)
        if num_tail and index >= self.num_sealed_block[request_id]:
            self.block_pool.seal_block(self.req_to_blocks[request_id][index], self.group_id, block_hash, num_tail)

    def rewrite_sealed(self, request_id: str, num_tokens: int) -> None:
        """Unseal the blocks that hold slots from ``num_tokens`` on, for good: those slots are going to be written again."""
        num_kept, num_sealed = num_tokens // self.block_size, self.num_sealed_block[request_id]
        if num_kept < num_sealed:
            self.block_pool.rewrite_blocks(self.req_to_blocks[request_id][num_kept:num_sealed])
            self.num_sealed_block[request_id] = num_kept

    def truncate(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Consider only the first ``num_tokens`` tokens cached; return the blocks that are not wholly inside them."""
        num_kept = num_tokens // self.block_size
        self.num_cached_block[request_id] = min(self.num_cached_block[request_id], num_kept)
        self.num_sealed_block[request_id] = min(self.num_sealed_block[request_id], num_kept)
        return self.req_to_blocks[request_id][num_kept:]

    def drop_shared_tail(self, request_id: str, num_tokens: int, kept: Container[int]) -> list[KVCacheBlock]:
        """Take the blocks behind ``num_tokens`` out of the table, from the first one on that others reference too.

        A block in ``kept`` stays all the same. Returns them last first, the order in which they may be evicted.
        """
        blocks = self.req_to_blocks[request_id]
        behind = range(ceil_div(num_tokens, self.block_size), len(blocks))
        cut = next((i for i in behind if blocks[i].ref_cnt > 1 and blocks[i].block_id not in kept), len(blocks))
        dropped = blocks[cut:]
        del blocks[cut:]
        self.num_cached_block[request_id] = min(self.num_cached_block[request_id], cut)
        self.num_sealed_block[request_id] = min(self.num_sealed_block[request_id], cut)
        dropped.reverse()
        return dropped

    def get_boundary(self, request_id: str, num_tokens: int) -> int:
        """Return the most tokens, ``num_tokens`` at most, behind which the request can go on with the blocks it holds here.

        For a type whose tokens attend to all before them that is any number of tokens it holds.
        """
        return num_tokens

    def pop_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """End the request here; return its blocks last first, the order in which they may be evicted."""
        self.num_cached_block.pop(request_id, None)
        self.num_sealed_block.pop(request_id, None)
        blocks = self.req_to_blocks.pop(request_id, [])
        blocks.reverse()
        return blocks


class FullAttentionManager(SingleTypeKVCacheManager):
    """Blocks of layers whose tokens attend to every token before them."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int, alignment: int) -> list[KVCacheBlock]:
        """Scan from the left and stop at the first miss: a later block is worth nothing without those before."""
        k = self.block_size // self.block_pool.hash_block_size
        num_blocks = min(max_length // self.block_size, len(block_hashes) // k)
        get_cached_block, group_id = self.block_pool.get_cached_block, self.group_id
        hit: list[KVCacheBlock] = []
        for index in range(num_blocks):
            block = get_cached_block(block_hashes[(index + 1) * k - 1], group_id)
            if block is None:
                break
            hit.append(block)
        del hit[len(hit) - len(hit) % (alignment // self.block_size) :]
        return hit


def get_manager_for_kv_cache_spec(spec: KVCacheSpec, block_pool: BlockPool, group_id: int) -> SingleTypeKVCacheManager:
    """Return the manager for the attention type of ``spec``.

    Raises: ValueError for a type that has none.
    """
    if isinstance(spec, FullAttentionSpec):
        return FullAttentionManager(spec, block_pool, group_id)
    raise ValueError(f"no KV cache manager for {type(spec).__name__}")
