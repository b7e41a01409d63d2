"""Prefix lookup in a tier: the keys of a request's blocks, and the longest prefix that they extend.

It owns the keys over all KV cache groups and the rule of a hit: at the end of a hit, every group must have the blocks that the
next token needs, in the pool or in the tier. ``core.kv.coordinator`` has the same rule for the pool. Pure; all sizes are those
of the engine.

    group, full     | here | T | T | T |           T = must come from the tier, for a hit that ends at ^
    group, sliding  | here |   |   | T |
                                       ^
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.kv.spec import KVCacheSizes, KVCacheSpec
from kvstore.key import StoreKey


class PrefixLookup:
    """Keys and hits over the groups of a KV cache.

    ``specs`` are those of the groups, in their order; ``layout`` is the result of ``kvstore.key.layout_key`` for the pool. Hits
    end at multiples of ``sizes.scheduler_block_size``.
    Raises: ValueError for block sizes that do not fit together.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], sizes: KVCacheSizes, layout: bytes) -> None:
        for spec in specs:
            if spec.block_size % sizes.hash_block_size or sizes.scheduler_block_size % spec.block_size:
                raise ValueError(
                    f"a block of {spec.block_size} tokens fits neither hash_block_size {sizes.hash_block_size} "
                    f"nor scheduler_block_size {sizes.scheduler_block_size}"
                )
        self.sizes = sizes
        self._specs = tuple(specs)
        self._layout = layout

    @property
    def num_blocks_in_flight(self) -> int:
        """Largest number of blocks, over all groups, that the steps in flight fill."""
        return sum(-(-self.sizes.max_in_flight_tokens // spec.block_size) for spec in self._specs)

    def max_tokens_of(self, num_keys: int) -> int:
        """Return the longest range of tokens whose blocks, over all groups, are at most ``num_keys``."""
        unit = self.sizes.scheduler_block_size
        return num_keys // sum(unit // spec.block_size for spec in self._specs) * unit

    def floor(self, num_tokens: int) -> int:
        """Round down to a length at which a hit may end."""
        return num_tokens - num_tokens % self.sizes.scheduler_block_size

    def block_size(self, group_id: int) -> int:
        """Return the number of tokens per block of a group."""
        return self._specs[group_id].block_size

    def key(self, block_hashes: Sequence[bytes], group_id: int, index: int) -> StoreKey:
        """Return the key of the block at ``index`` of a group's table. ``block_hashes`` is the request's chain."""
        end = (index + 1) * self._specs[group_id].block_size
        return StoreKey(block_hashes[end // self.sizes.hash_block_size - 1], self._layout, group_id)

    def key_of(self, block_hash: bytes, group_id: int) -> StoreKey:
        """Return the key of a block with this hash."""
        return StoreKey(block_hash, self._layout, group_id)

    def keys_between(self, block_hashes: Sequence[bytes], start: int, end: int) -> list[StoreKey]:
        """Return the keys of all blocks of the tokens [start, end), one group after another."""
        return [
            self.key(block_hashes, group_id, index)
            for group_id, spec in enumerate(self._specs)
            for index in range(start // spec.block_size, end // spec.block_size)
        ]

    def find_hit(self, hits: Sequence[bool], start: int, end: int) -> int:
        """Return the length of the longest prefix: the first ``start`` tokens are in the pool, the rest is in the tier.

        ``hits`` has, for each of ``keys_between(start, end)``, whether the tier has the block.
        """
        tables = list(self._split(hits, start, end))
        length = end
        while length > start:
            shorter = min(_last_usable(spec, table, start, length) for spec, table in zip(self._specs, tables, strict=True))
            shorter = max(start, self.floor(shorter))
            if shorter == length:
                break
            length = shorter
        return length

    def needed(self, start: int, end: int) -> Iterator[tuple[int, range]]:
        """Yield each group and the indices of the blocks that a load of the tokens [start, end) fills."""
        for group_id, spec in enumerate(self._specs):
            first = max(start, spec.num_skipped_tokens(end)) // spec.block_size
            yield group_id, range(first, end // spec.block_size)

    def _split(self, hits: Sequence[bool], start: int, end: int) -> Iterator[Sequence[bool]]:
        offset = 0
        for spec in self._specs:
            count = (end - start) // spec.block_size
            yield hits[offset : offset + count]
            offset += count


def _last_usable(spec: KVCacheSpec, hits: Sequence[bool], start: int, length: int) -> int:
    """Return the length to which a prefix of ``length`` must be cut at least for one group; ``length`` if it need not be.

    The last missing block of those that the next token needs ends it: nothing that needs this block can be a hit. A group that
    skips nothing is cut at its first missing block at once.
    """
    first, last = max(start, spec.num_skipped_tokens(length)), length // spec.block_size - 1
    first_index, origin = first // spec.block_size, start // spec.block_size
    indices = range(last, first_index - 1, -1) if spec.recycles else range(first_index, last + 1)
    return next((index * spec.block_size for index in indices if not hits[index - origin]), length)
