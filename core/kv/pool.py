"""All KV cache blocks of one worker: which are free, which are cached, and which is reused next.

Owns reference counts, generations, the free queue, the prefix map (block hash, group) -> blocks, and when a seal is broken:
wherever a generation grows or content is no longer trusted. Does not know requests, block tables or tensors. A
connector that keeps blocks beyond their request (a lease, a pin, a transfer in flight) calls ``touch`` to hold a reference of
its own and ``free_blocks`` to drop it.

Names and eviction order are those of vLLM V1's block pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from core.kv.block import NULL_BLOCK_ID, KVCacheBlock
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from core.kv.hashing import ExtraKey, block_extra_keys
from core.kv.seals import ExpectedSeal, SealTable

_SENTINEL_ID = -1
_block_id = attrgetter("block_id")


class FreeKVCacheBlockQueue:
    """Doubly linked list through the blocks themselves, in eviction order: the first is reused first.

    Two sentinels remove every edge case; a block is in the queue exactly if its links are set. Starts in order of block id.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(_SENTINEL_ID)
        self._tail = KVCacheBlock(_SENTINEL_ID)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Blocks in eviction order. The queue must not change meanwhile."""
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Take the first ``count`` blocks.

        Raises: ValueError if there are fewer.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"cannot take {count} blocks, {self.num_free_blocks} are free")
        taken: list[KVCacheBlock] = []
        block = self._head.next_free_block
        for _ in range(count):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= count
        return taken

    def popleft(self) -> KVCacheBlock:
        """Take the first block.

        Raises: ValueError if there is none.
        """
        return self.popleft_n(1)[0]

    def remove(self, block: KVCacheBlock) -> None:
        """Remove this block from any position, in constant time.

        Raises: RuntimeError if it is not in the queue.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"{block!r} is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put the block at the end: reused last."""
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put the blocks at the end, in the given order."""
        last = self._tail.prev_free_block
        assert last is not None
        self._link(last, blocks, self._tail)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put the blocks at the front, so that the first one given is the first one reused."""
        first = self._head.next_free_block
        assert first is not None
        self._link(self._head, blocks, first)

    def _link(self, before: KVCacheBlock, blocks: Iterable[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            assert block.next_free_block is None, f"{block!r} is in the free queue already"
            before.next_free_block = block
            block.prev_free_block = before
            before = block
            self.num_free_blocks += 1
        before.next_free_block = after
        after.prev_free_block = before


class _PrefixMap:
    """Map from (block hash, group) to the blocks that hold it.

    Block tables are append-only, so two requests that compute the same prefix at the same time keep two copies. One copy is
    the common case and is stored without a container.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> Iterator[tuple[bytes, list[KVCacheBlock]]]:
        """Every key with all its copies."""
        for key, entry in self._blocks.items():
            yield key, list(entry.values()) if isinstance(entry, dict) else [entry]

    def get(self, key: bytes) -> KVCacheBlock | None:
        """One copy, the oldest."""
        entry = self._blocks.get(key)
        if isinstance(entry, dict):
            return next(iter(entry.values()))
        return entry

    def add(self, key: bytes, block: KVCacheBlock) -> None:
        """Add a copy of the block."""
        entry = self._blocks.setdefault(key, block)
        if entry is block:
            return
        if isinstance(entry, dict):
            entry[block.block_id] = block
        else:
            self._blocks[key] = {entry.block_id: entry, block.block_id: block}

    def remove(self, key: bytes, block: KVCacheBlock) -> bool:
        """Drop this copy; True if it was the last one."""
        entry = self._blocks[key]
        if isinstance(entry, dict):
            del entry[block.block_id]
            if entry:
                return False
        else:
            assert entry is block
        del self._blocks[key]
        return True


def cache_key(block_hash: bytes, group_id: int) -> bytes:
    """Key of the prefix map: the hash and the group id, as 4 bytes big-endian."""
    return block_hash + group_id.to_bytes(4, "big")


class BlockPool:
    """The blocks 0..num_blocks-1 of one worker. Block 0 is the null block and never allocated.

    With ``enable_caching`` a freed block keeps its hash, and so its content, until it is reused. ``seals`` is the table in
    which peers read what a block holds, None on an engine that has none.
    Raises: ValueError if there is no usable block, or the table has rows for another number of blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        seals: SealTable | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), not {num_blocks}")
        if seals is not None and seals.num_blocks != num_blocks:
            raise ValueError(f"a seal table for {seals.num_blocks} blocks does not fit a pool of {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.seals = seals
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()
        assert self.null_block.block_id == NULL_BLOCK_ID
        self.null_block.is_null = True
        self.cached_blocks = _PrefixMap()
        self._enable_kv_cache_events = enable_kv_cache_events
        self._events: list[KVCacheEvent] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones without a reference included."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks with a reference, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Allocate blocks with one reference each; their old content is lost and their generation grows.

        Those of one call come in the order of their ids, whatever the order in which they were freed: neighbours in a prompt
        are neighbours in memory as often as may be, and a transport reads such runs at once.

        Raises: ValueError if fewer are free; then nothing has changed.
        """
        blocks = self.free_block_queue.popleft_n(count)
        for block in blocks:
            assert block.ref_cnt == 0
            if block.block_hash is not None:
                self._drop_hash(block)
            block.generation += 1
            block.ref_cnt = 1
        self.break_seals(blocks)
        blocks.sort(key=_block_id)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block, taking it out of the free queue if it had none."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference of each block. Of those left without one, the first given is reused first.

        Those without a hash are reused before all blocks that are free by now; hashed ones queue up last, as evictable cache.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"{block!r} is freed more often than referenced"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        if unhashed:
            self.free_block_queue.prepend_n(unhashed)
        if hashed:
            self.free_block_queue.append_n(hashed)

    def get_cached_block(self, block_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """Return a block of this group that holds this content, or None."""
        return self.cached_blocks.get(cache_key(block_hash, group_id))

    def cache_full_blocks(  # noqa: PLR0913  the signature is vLLM's
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[bytes],
        num_cached: int,
        block_size: int,
        group_id: int,
        token_ids: Sequence[int] = (),
        *,
        extra_keys: Sequence[ExtraKey] = (),
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Make the full blocks ``blocks[num_cached:]`` of a block table hits, null blocks and those masked out excepted.

        ``block_hashes`` is the request's chain, one value per ``hash_block_size`` tokens. The hash of block i is the value at
        its end:

            chain   | 0 1 2 3 | 4 5 6 7 |      hash_block_size 16
            blocks  |    0    |    1    |      block_size 64, k = 4: block i <- chain[(i + 1) * k - 1]

        ``token_ids``, from the first one on, and ``extra_keys`` are the request's, for the event. ``block_mask`` has an entry
        for each of these blocks.
        """
        k = block_size // self.hash_block_size
        stored: list[int] = []
        for index in range(num_cached, len(blocks)):
            block = blocks[index]
            if block.is_null or (block_mask is not None and not block_mask[index - num_cached]):
                continue
            block_hash = block_hashes[(index + 1) * k - 1]
            stored.append(index)
            if block.block_hash is not None:
                # Shared, and hashed again after another request rolled back: the content must be the same.
                assert (block.block_hash, block.group_id) == (block_hash, group_id), block
                continue
            self.cached_blocks.add(cache_key(block_hash, group_id), block)
            block.block_hash = block_hash
            block.group_id = group_id
        if self._enable_kv_cache_events:
            self._note_stored(stored, block_hashes, block_size, group_id, token_ids, extra_keys)

    def _note_stored(
        self,
        indices: Sequence[int],
        block_hashes: Sequence[bytes],
        block_size: int,
        group_id: int,
        token_ids: Sequence[int],
        extra_keys: Sequence[ExtraKey],
    ) -> None:
        """Add one event for each run of blocks that follow one another: an event names one parent."""
        k = block_size // self.hash_block_size
        for _, run in groupby(enumerate(indices), key=lambda entry: entry[1] - entry[0]):
            run_indices = [index for _, index in run]
            start, end = run_indices[0], run_indices[-1] + 1
            hashes = tuple(block_hashes[(index + 1) * k - 1] for index in run_indices)
            parent = block_hashes[start * k - 1] if start else None
            tokens = tuple(token_ids[start * block_size : end * block_size])
            extra = tuple(block_extra_keys(extra_keys, index * block_size, (index + 1) * block_size) for index in run_indices)
            self._events.append(BlockStored(hashes, parent, block_size, group_id, tokens, extra if any(extra) else ()))

    def seal_full_blocks(
        self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[bytes], num_sealed: int, block_size: int, group_id: int
    ) -> None:
        """Seal the full blocks ``blocks[num_sealed:]`` of a block table, whose KV is complete; hashes as they are cached."""
        if self.seals is None:
            return
        k = block_size // self.hash_block_size
        self.seals.seal_all(
            [
                (block.block_id, ExpectedSeal(block.generation, group_id, block_hashes[(index + 1) * k - 1], block_size))
                for index, block in enumerate(blocks[num_sealed:], num_sealed)
                if not block.is_null
            ]
        )

    def seal_block(self, block: KVCacheBlock, group_id: int, block_hash: bytes, num_tokens: int) -> None:
        """Seal one block that holds ``num_tokens`` tokens whose KV is complete."""
        if self.seals is not None and not block.is_null:
            self.seals.seal(block.block_id, ExpectedSeal(block.generation, group_id, block_hash, num_tokens))

    def break_seals(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take the seals off blocks that are going to be written, or are no longer trusted."""
        if self.seals is not None:
            self.seals.break_seals([block.block_id for block in blocks])

    def rewrite_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take the seals off blocks in which slots will be written again, and give them a new generation.

        Hashes stay: the same tokens are computed again, though not to the bit. A reader with the old generation accepts
        neither.
        """
        rewritten = [block for block in blocks if not block.is_null]
        for block in rewritten:
            block.generation += 1
        self.break_seals(rewritten)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes and seals of these blocks, so that they are neither hit nor read again; references stay.

        Raises: ValueError for an id outside the pool; then nothing has changed.
        """
        ids = list(block_ids)
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id {block_id} is outside the pool of {self.num_blocks} blocks")
        for block_id in ids:
            if self.blocks[block_id].block_hash is not None:
                self._drop_hash(self.blocks[block_id])
        self.break_seals(self.blocks[block_id] for block_id in ids)

    def invalidate_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Unhash blocks that will be rewritten in place and give them a new generation, so that old names go stale."""
        rewritten = [block for block in blocks if not block.is_null]
        for block in rewritten:
            if block.block_hash is not None:
                self._drop_hash(block)
        self.rewrite_blocks(rewritten)

    def reset_prefix_cache(self) -> bool:
        """Drop all hashes and seals; False, with nothing changed, while any block is referenced.

        A worker never calls it: its weights do not change. Tests and benchmarks do, to compute or load the same prompt again.
        """
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self.cached_blocks = _PrefixMap()
        for block in self.blocks:
            block.block_hash = None
        self.break_seals(self.blocks)
        if self._enable_kv_cache_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _drop_hash(self, block: KVCacheBlock) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        block.block_hash = None
        was_last = self.cached_blocks.remove(cache_key(block_hash, block.group_id), block)
        if was_last and self._enable_kv_cache_events:
            self._events.append(BlockRemoved((block_hash,), block.group_id))
