"""Block tables of one KV cache group: the blocks that one attention type keeps for each request.

Owns request id -> blocks and how many leading blocks of each are hashed, and sealed. Does not know other groups, budgets or why
blocks are requested. ``core.kv.coordinator`` checks that enough blocks are free before it allocates.

A table has an entry for every block of the sequence. Blocks that no later token attends to are null, always a prefix:

    table   | null | null | 17 | 4 | 29 |
    tokens  |-- skipped --|-- window -- p       p = first token that is not processed yet

A new attention type names its skipped tokens in its spec, and overrides ``find_longest_cache_hit`` here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

from core.kv.block import KVCacheBlock
from core.kv.hashing import ExtraKey
from core.kv.pool import BlockPool
from core.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSizes,
    KVCacheSpec,
    SlidingWindowSpec,
    ceil_div,
)


class SingleTypeKVCacheManager(ABC):
    """Block tables of the requests in one group.

    ``max_admission_blocks`` caps the blocks of one request, for types that free blocks while a request runs; None
    if the type never does. It counts only for admission: the table itself has an entry for every position.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        block_pool: BlockPool,
        group_id: int,
        scheduler_block_size: int,
        max_admission_blocks: int | None = None,
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.block_pool = block_pool
        self.group_id = group_id
        self.scheduler_block_size = scheduler_block_size
        self.max_admission_blocks = max_admission_blocks
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        self.num_sealed_block: dict[str, int] = {}  # hits count as sealed: the request that filled them seals them

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> list[KVCacheBlock]:
        """Return the table of the longest prefix of at most ``max_length`` tokens after which a request can continue.

        Its length is a multiple of ``scheduler_block_size``; blocks that no later token attends to are null.
        ``block_hashes`` has one value per ``hash_block_size`` tokens. Takes no reference.
        """

    def num_skipped_blocks(self, num_processed_tokens: int) -> int:
        """Return how many leading blocks no token after the first ``num_processed_tokens`` attends to."""
        return self.spec.num_skipped_tokens(num_processed_tokens) // self.block_size

    def num_null_blocks(self, request_id: str) -> int:
        """Return how many leading blocks of the request's table are null."""
        return 0

    def num_lacking_blocks(self, request_id: str) -> int:
        """Return how many leading blocks of the request's table lack some or all of their tokens."""
        return self.num_null_blocks(request_id)

    def withhold_first_block(self, request_id: str) -> None:
        """Never hash or seal the first block that is not null: its first tokens are missing, and no later token needs them."""
        raise AssertionError(f"{request_id}: every token of a table without null blocks is needed")

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Free blocks that no later token attends to. Does nothing for a type whose tokens attend to all before."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_processed_tokens: int = 0,
        apply_admission_cap: bool = False,
    ) -> int:
        """Return how many free blocks it takes to give the request slots for ``num_tokens`` tokens.

        Hits without a reference are in the free queue and leave it when they are adopted, so they count. Without the cap the
        result is exactly the size of an allocation now. With it, it is the most that the request takes at any time until it
        has these slots, while skipped blocks are freed: for the decision whether it may begin at all.
        """
        num_required = -(-num_tokens // self.block_size)
        blocks = self.req_to_blocks.get(request_id)
        if blocks is not None:
            num_missing = num_required - len(blocks)
            if num_missing > 0 and apply_admission_cap and self.max_admission_blocks is not None:
                num_missing = min(num_missing, self.max_admission_blocks - sum(block.ref_cnt == 1 for block in blocks))
            return num_missing if num_missing > 0 else 0
        num_skipped = self.num_skipped_blocks(num_processed_tokens)
        num_evictable = sum(block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks[num_skipped:])
        num_missing = max(num_required - max(num_skipped, len(new_computed_blocks)), 0) + num_evictable
        if apply_admission_cap and self.max_admission_blocks is not None:
            num_missing = min(num_missing, self.max_admission_blocks)
        return num_missing

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_processed_tokens: int
    ) -> None:
        """Start the table of a request with its hits and take a reference of each that it needs.

        Skipped blocks are null; there may be more of them than hits, if later tokens are loaded.
        """
        assert request_id not in self.req_to_blocks
        num_skipped = self.num_skipped_blocks(num_processed_tokens)
        kept = new_computed_blocks[num_skipped:]
        self.block_pool.touch(kept)
        self.req_to_blocks[request_id] = [*[self.block_pool.null_block] * num_skipped, *kept]
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
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        num_tokens: int,
        token_ids: Sequence[int] = (),
        extra_keys: Sequence[ExtraKey] = (),
    ) -> None:
        """Make the full blocks of the first ``num_tokens`` tokens hits, unless they are hits already."""
        num_full = num_tokens // self.block_size
        num_cached = self.num_cached_block[request_id]
        if num_full <= num_cached:
            return
        blocks = self.req_to_blocks[request_id][:num_full]
        assert len(blocks) == num_full, f"{request_id} has no blocks for {num_tokens} tokens"
        first = min(max(num_cached, self.num_lacking_blocks(request_id)), num_full)
        mask = self.reachable_block_mask(first, num_full)
        self.block_pool.cache_full_blocks(
            blocks,
            block_hashes,
            first,
            self.block_size,
            self.group_id,
            token_ids,
            extra_keys=extra_keys,
            block_mask=mask,
        )
        self.num_cached_block[request_id] = num_full

    def reachable_block_mask(self, start: int, end: int) -> list[bool] | None:
        """Return for each block [start, end) of a table whether a hit can ever use it; None if all can be used.

        The others are never hashed: they would only evict useful blocks from the cache.
        """
        return None

    def seal_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Seal the full blocks of the first ``num_tokens`` tokens, unless this request has sealed them already."""
        num_full = num_tokens // self.block_size
        num_sealed = self.num_sealed_block[request_id]
        if num_full <= num_sealed:
            return
        blocks = self.req_to_blocks[request_id][:num_full]
        assert len(blocks) == num_full, f"{request_id} has no blocks for {num_tokens} tokens"
        first = max(num_sealed, self.num_lacking_blocks(request_id))
        self.block_pool.seal_full_blocks(blocks, block_hashes, first, self.block_size, self.group_id)
        self.num_sealed_block[request_id] = num_full

    def seal_partial_block(self, request_id: str, num_tokens: int, block_hash: bytes) -> None:
        """Seal the block in whose middle the first ``num_tokens`` tokens end, if there is one and it is not full already."""
        index, num_tail = divmod(num_tokens, self.block_size)
        if num_tail and index >= max(self.num_sealed_block[request_id], self.num_lacking_blocks(request_id)):
            self.block_pool.seal_block(self.req_to_blocks[request_id][index], self.group_id, block_hash, num_tail)

    def rewrite_sealed(self, request_id: str, num_tokens: int) -> None:
        """Unseal the blocks with slots from ``num_tokens`` on, for good: those slots will be written again."""
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
        """Remove the blocks after ``num_tokens`` from the table, from the first shared one on.

        A block in ``kept`` counts as not shared. A null block never stays: nothing can be written there. Returns the blocks
        last first, the order in which they may be evicted.
        """
        blocks = self.req_to_blocks[request_id]
        behind = range(ceil_div(num_tokens, self.block_size), len(blocks))
        cut = next((i for i in behind if _cannot_be_rewritten(blocks[i], kept)), len(blocks))
        dropped = blocks[cut:]
        del blocks[cut:]
        self.num_cached_block[request_id] = min(self.num_cached_block[request_id], cut)
        self.num_sealed_block[request_id] = min(self.num_sealed_block[request_id], cut)
        dropped.reverse()
        return dropped

    def get_boundary(self, request_id: str, num_tokens: int) -> int:
        """Return the most tokens, ``num_tokens`` at most, after which the request can continue with the blocks it holds here.

        Fewer tokens need earlier blocks: if the blocks that ``num_tokens`` need are gone, the result is the last earlier
        position that needs no block: the start, or the start of a chunk.
        """
        if self.num_skipped_blocks(num_tokens) >= self.num_lacking_blocks(request_id):
            return num_tokens
        start = self.spec.num_skipped_tokens(num_tokens)
        return start if self.spec.num_skipped_tokens(start) == start else 0

    def pop_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """End the request here; return its blocks last first, the order in which they may be evicted, null ones left out."""
        self.num_cached_block.pop(request_id, None)
        self.num_sealed_block.pop(request_id, None)
        blocks = self.req_to_blocks.pop(request_id, [])
        blocks.reverse()
        return blocks


def _cannot_be_rewritten(block: KVCacheBlock, kept: Container[int]) -> bool:
    return block.is_null or (block.ref_cnt > 1 and block.block_id not in kept)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Blocks of layers whose tokens attend to every token before them."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> list[KVCacheBlock]:
        """Scan from the left and stop at the first miss: later blocks are useless without the earlier ones."""
        k = self.block_size // self.block_pool.hash_block_size
        num_blocks = min(max_length // self.block_size, len(block_hashes) // k)
        get_cached_block, group_id = self.block_pool.get_cached_block, self.group_id
        hit: list[KVCacheBlock] = []
        for index in range(num_blocks):
            block = get_cached_block(block_hashes[(index + 1) * k - 1], group_id)
            if block is None:
                break
            hit.append(block)
        del hit[len(hit) - len(hit) % (self.scheduler_block_size // self.block_size) :]
        return hit


class RecyclingManager(SingleTypeKVCacheManager):
    """Blocks of layers whose tokens attend to a part of the earlier tokens: the others are freed while a request runs."""

    def __init__(
        self,
        spec: KVCacheSpec,
        block_pool: BlockPool,
        group_id: int,
        scheduler_block_size: int,
        max_admission_blocks: int | None = None,
    ) -> None:
        super().__init__(spec, block_pool, group_id, scheduler_block_size, max_admission_blocks)
        self._num_null_blocks: dict[str, int] = {}
        self._withheld: set[str] = set()  # requests whose first block lacks tokens

    def num_null_blocks(self, request_id: str) -> int:
        """See the base class."""
        return self._num_null_blocks.get(request_id, 0)

    def num_lacking_blocks(self, request_id: str) -> int:
        """See the base class."""
        return self.num_null_blocks(request_id) + (request_id in self._withheld)

    def withhold_first_block(self, request_id: str) -> None:
        """See the base class."""
        self._withheld.add(request_id)

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_processed_tokens: int
    ) -> None:
        """See the base class."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, num_processed_tokens)
        self._num_null_blocks[request_id] = self.num_skipped_blocks(num_processed_tokens)

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Replace the blocks that no later token attends to by null, and free them, last block first.

        Only processed tokens count: a step in flight may still read the blocks that its tokens attend to.
        """
        blocks = self.req_to_blocks.get(request_id)
        if blocks is None:
            return
        start = self._num_null_blocks[request_id]
        end = min(self.num_skipped_blocks(num_processed_tokens), len(blocks))
        if end <= start:
            return
        self._withheld.discard(request_id)
        removed = blocks[start:end]
        blocks[start:end] = [self.block_pool.null_block] * (end - start)
        self._num_null_blocks[request_id] = end
        removed.reverse()
        self.block_pool.free_blocks(removed)

    def reachable_block_mask(self, start: int, end: int) -> list[bool]:
        """See the base class: a hit uses a block if it is needed from the first position after it where a hit may end.

        From any later position, more blocks are skipped. With blocks of 16, a window of 16 and hits that end at
        multiples of 64, only the last of four blocks is ever used:

            blocks  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
            hits end                |               |
            used                  x               x
        """
        size, alignment = self.block_size, self.scheduler_block_size
        return [self.num_skipped_blocks(ceil_div(i + 1, alignment // size) * alignment) <= i for i in range(start, end)]

    def drop_shared_tail(self, request_id: str, num_tokens: int, kept: Container[int]) -> list[KVCacheBlock]:
        """See the base class."""
        dropped = super().drop_shared_tail(request_id, num_tokens, kept)
        num_left = len(self.req_to_blocks[request_id])
        if num_left < self.num_lacking_blocks(request_id):
            self._withheld.discard(request_id)
        self._num_null_blocks[request_id] = min(self._num_null_blocks[request_id], num_left)
        return dropped

    def pop_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """See the base class."""
        self._withheld.discard(request_id)
        blocks = super().pop_blocks(request_id)
        del blocks[len(blocks) - self._num_null_blocks.pop(request_id, 0) :]
        return blocks


class SlidingWindowManager(RecyclingManager):
    """Blocks of layers whose tokens attend to the last ``sliding_window`` tokens."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> list[KVCacheBlock]:
        """Scan from the right for a run of blocks that ends where a hit may end and covers all the next token attends to.

        A run that begins with block 0 covers everything, however short it is.
        """
        k = self.block_size // self.block_pool.hash_block_size
        blocks_per_unit = self.scheduler_block_size // self.block_size
        end = min(max_length // self.block_size, len(block_hashes) // k)
        end -= end % blocks_per_unit
        run: list[KVCacheBlock] = []  # last block first
        first = self.num_skipped_blocks(end * self.block_size)  # of the run that ends at ``end``
        index = end - 1
        while index >= first:
            block = self.block_pool.get_cached_block(block_hashes[(index + 1) * k - 1], self.group_id)
            if block is not None:
                run.append(block)
            else:  # a hit that needs this block is impossible
                run.clear()
                end = index - index % blocks_per_unit
                first = self.num_skipped_blocks(end * self.block_size)
                index = end
            index -= 1
        return [*[self.block_pool.null_block] * (end - len(run)), *reversed(run)]


class ChunkedLocalAttentionManager(RecyclingManager):
    """Blocks of layers whose tokens attend to those before them in their own chunk."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> list[KVCacheBlock]:
        """Scan the chunk of the next token from the left; nothing before it is needed.

        If the cached part of the chunk ends before a possible end of a hit, the previous possible end, in an earlier chunk, is
        tried.
        """
        k = self.block_size // self.block_pool.hash_block_size
        blocks_per_unit = self.scheduler_block_size // self.block_size
        length = min(max_length // self.block_size, len(block_hashes) // k)
        while True:
            length -= length % blocks_per_unit
            start = self.num_skipped_blocks(length * self.block_size)
            hit: list[KVCacheBlock] = []
            for index in range(start, length):
                block = self.block_pool.get_cached_block(block_hashes[(index + 1) * k - 1], self.group_id)
                if block is None:
                    break
                hit.append(block)
            length = start + len(hit)
            excess = length % blocks_per_unit
            if excess <= len(hit):
                del hit[len(hit) - excess :]
                return [*[self.block_pool.null_block] * start, *hit]


_MANAGERS: tuple[tuple[type[KVCacheSpec], type[SingleTypeKVCacheManager]], ...] = (
    (FullAttentionSpec, FullAttentionManager),
    (SlidingWindowSpec, SlidingWindowManager),
    (ChunkedLocalAttentionSpec, ChunkedLocalAttentionManager),
)


def get_manager_for_kv_cache_spec(
    spec: KVCacheSpec, block_pool: BlockPool, group_id: int, sizes: KVCacheSizes
) -> SingleTypeKVCacheManager:
    """Return the manager for the attention type of ``spec``, with the spec's cap.

    Raises: ValueError for a type without a manager.
    """
    for spec_type, manager_type in _MANAGERS:
        if isinstance(spec, spec_type):
            bound = spec.max_admission_blocks_per_request(sizes.max_in_flight_tokens, sizes.max_model_len)
            return manager_type(spec, block_pool, group_id, sizes.scheduler_block_size, bound if spec.recycles else None)
    raise ValueError(f"no KV cache manager for {type(spec).__name__}")
