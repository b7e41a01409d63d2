"""The definition of a KV cache, in plain containers, to compare random histories with.

One or more KV cache groups of full, sliding-window or chunked-local attention in one pool. Predicts each hit, block, reference,
generation and seal, and uses nothing of what it predicts: where ``core.kv`` has links and hashes, a prefix is the group, the
tenant's salt and a tuple of tokens, the free queue a list, a lookup a scan over all blocks. 0 stands for the null block. The
state machine in the tests of ``core.kv`` drives both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.request import Request

Prefix = tuple[int, str, tuple[int, ...]]
Tables = list[list[int]]  # block ids of each group


@dataclass(frozen=True)
class NaiveAttention:
    """How the layers of a group attend: at most one of ``window`` and ``chunk`` is set, in tokens."""

    block_size: int
    window: int = 0
    chunk: int = 0

    def first_block(self, position: int) -> int:
        """Return the first block that the token at ``position`` attends to."""
        if self.window:
            return max(0, position - self.window + 1) // self.block_size
        return position // self.chunk * self.chunk // self.block_size if self.chunk else 0

    def blocks_behind(self, position: int) -> range:
        """Return the blocks before ``position``, a multiple of the block size, that the token there attends to."""
        return range(self.first_block(position), position // self.block_size)


@dataclass(frozen=True)
class NaiveSizes:
    """``unit``: hits end at its multiples. ``watermark``: blocks that an admission leaves free while others run."""

    num_blocks: int
    unit: int
    watermark: int
    max_model_len: int
    max_in_flight: int


@dataclass(frozen=True)
class Wanted:
    """A request's demand: slots for ``num_slots`` tokens, of which ``num_computed`` have KV or get it from elsewhere."""

    request: Request
    is_admission: bool
    tables: Tables
    num_hits: list[int]
    num_computed: int
    num_slots: int


class NaivePool:
    """The definition of the pool: plain containers, one entry per block id."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.refs: Counter[int] = Counter()
        self.generation: Counter[int] = Counter()
        self.prefix: dict[int, Prefix] = {}  # of the tokens up to the end of the block, while it is a hit
        self.sealed: dict[int, Prefix] = {}  # of the tokens up to the last one in the block, while it has a seal

    def allocate(self, count: int) -> list[int]:
        """Take blocks from the head of the queue, in the order of their ids."""
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            assert self.refs[block_id] == 0
            self.rewrite(block_id)
            self.refs[block_id] = 1
        return sorted(taken)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add references."""
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop references in the given order."""
        unhashed: list[int] = []
        hashed: list[int] = []
        for block_id in filter(None, block_ids):
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                (hashed if block_id in self.prefix else unhashed).append(block_id)
        self.free = unhashed + self.free + hashed

    def rewrite(self, block_id: int) -> None:
        """Whoever knows what was in the block must not take what comes for it."""
        self.evict(block_id)
        self.generation[block_id] += 1

    def evict(self, block_id: int) -> None:
        """Forget what is in the block."""
        self.prefix.pop(block_id, None)
        self.sealed.pop(block_id, None)


def prefix_of(group_id: int, request: Request, num_tokens: int) -> Prefix:
    """Return what identifies the content of a block whose last token is the ``num_tokens``-th."""
    return group_id, request.cache_salt, tuple(request.all_token_ids[:num_tokens])


class NaiveKVCache:
    """The tables of the requests that have blocks, and what is cached and sealed of them, in number of blocks per group."""

    def __init__(self, groups: Sequence[NaiveAttention], sizes: NaiveSizes, *, is_caching: bool) -> None:
        self.groups = groups
        self.sizes = sizes
        self.is_caching = is_caching
        self.pool = NaivePool(sizes.num_blocks)
        self.tables: dict[str, Tables] = {}
        self.num_cached: dict[str, list[int]] = {}
        self.num_sealed: dict[str, list[int]] = {}

    def hits(self, request: Request) -> tuple[int, list[list[set[int] | None]]]:
        """Return the length of the longest prefix after which every group can continue, and its blocks by group and position.

        Of each set of copies a lookup takes one. A position that is not needed is None.
        """
        copies: dict[Prefix, set[int]] = {}
        for block_id, prefix in self.pool.prefix.items():
            copies.setdefault(prefix, set()).add(block_id)
        unit = self.sizes.unit
        for length in range((request.num_tokens - 1) // unit * unit, 0, -unit) if self.is_caching else ():
            needed = []
            for number, group in enumerate(self.groups):
                ends = ((index + 1) * group.block_size for index in group.blocks_behind(length))
                needed.append([copies.get(prefix_of(number, request, end)) for end in ends])
            if all(all(found) for found in needed):
                nobody = [[None] * group.first_block(length) for group in self.groups]
                return length, [[*skipped, *found] for skipped, found in zip(nobody, needed, strict=True)]
        return 0, [[] for _ in self.groups]

    # ---- slots -------------------------------------------------------------------------------------------------------

    def want(self, request: Request, num_new: int, num_given: int, hit_ids: Sequence[list[int]]) -> Wanted:
        """Give back what the request attends to no more, and return what it wants; ``num_given`` are hit or loaded."""
        limit = self.sizes.max_model_len
        num_computed = min(request.num_computed_tokens + num_given, limit)
        position = min(num_computed, request.num_tokens - 1)  # of the first query to come
        tables = self.tables.get(request.request_id)
        is_admission = tables is None
        if tables is None:
            firsts = [group.first_block(position) for group in self.groups]
            tables = [[0] * first + ids[first:] for first, ids in zip(firsts, hit_ids, strict=True)]
        else:
            self._give_back_skipped(tables, position)
        num_slots = min(num_computed + num_new, limit)
        return Wanted(request, is_admission, tables, [len(ids) for ids in hit_ids], num_computed, num_slots)

    def must_refuse(self, wanted: Wanted, *, is_alone: bool, num_reserved: int, must_fit_whole: bool) -> bool:
        """Say whether the free blocks do not suffice."""
        margin = self.sizes.watermark if wanted.is_admission and not is_alone else 0
        needed = sum(self._num_missing(number, wanted.tables, wanted.num_slots) for number in range(len(self.groups)))
        if wanted.is_admission:
            needed += sum(self._is_evictable(block_id) for table in wanted.tables for block_id in table)
        num_free = len(self.pool.free)
        is_too_long = must_fit_whole and self._most_blocks_taken(wanted) + margin > num_free
        return needed + margin > num_free - num_reserved or is_too_long

    def grant(self, wanted: Wanted) -> Tables:
        """Give the request its slots; return the new blocks: first those of the loaded tokens, then those of the new ones."""
        request_id = wanted.request.request_id
        if wanted.is_admission:
            self.num_cached[request_id] = list(wanted.num_hits)
            self.num_sealed[request_id] = list(wanted.num_hits)
            for table in wanted.tables:
                self.pool.touch(filter(None, table))
        self.tables[request_id] = wanted.tables
        added: Tables = [[] for _ in self.groups]
        for num_slots in (wanted.num_computed, wanted.num_slots):
            for number, table in enumerate(wanted.tables):
                new_ids = self.pool.allocate(self._num_missing(number, wanted.tables, num_slots))
                table.extend(new_ids)
                added[number] += new_ids
        return added

    def drop(self, request_id: str) -> list[int]:
        """Forget a request; return its blocks in the order of their release: the last tokens' first."""
        del self.num_cached[request_id], self.num_sealed[request_id]
        ends = [
            (-(index + 1) * group.block_size, number, block_id)
            for number, (group, table) in enumerate(zip(self.groups, self.tables.pop(request_id), strict=True))
            for index, block_id in enumerate(table)
            if block_id
        ]
        return [block_id for _, _, block_id in sorted(ends)]

    def _give_back_skipped(self, tables: Tables, position: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            end = min(group.first_block(position), len(table))
            skipped, table[:end] = table[:end][::-1], [0] * end
            self.pool.release(skipped)

    def _is_evictable(self, block_id: int) -> bool:
        return block_id != 0 and self.pool.refs[block_id] == 0

    def _num_missing(self, number: int, tables: Tables, num_tokens: int) -> int:
        num_tokens = min(num_tokens, self.sizes.max_model_len)
        return max(0, -(-num_tokens // self.groups[number].block_size) - len(tables[number]))

    def _most_blocks_taken(self, wanted: Wanted) -> int:
        """Over all groups: what the request takes at most at a time, until it has all slots."""
        taken = 0
        for number, (group, table) in enumerate(zip(self.groups, wanted.tables, strict=True)):
            num_missing = self._num_missing(number, wanted.tables, wanted.request.num_tokens)
            num_own = sum(self.pool.refs[block_id] == 1 for block_id in table if block_id)
            if wanted.is_admission:
                num_missing += sum(map(self._is_evictable, table))
                num_own = 0
            taken += max(0, min(num_missing, self._most_blocks(group) - num_own))
        return taken

    def _most_blocks(self, group: NaiveAttention) -> int:
        limit, in_flight = self.sizes.max_model_len, self.sizes.max_in_flight
        if group.window:
            return -(-min(group.window - 1 + in_flight, limit) // group.block_size) + 1
        return -(-(min(group.chunk + in_flight, limit) if group.chunk else limit) // group.block_size)

    # ---- what is in them ---------------------------------------------------------------------------------------------

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of these tokens hits."""
        if not self.is_caching:
            return
        num_cached = self.num_cached[request.request_id]
        for number, group in enumerate(self.groups):
            table = self.tables[request.request_id][number]
            for index in range(num_cached[number], num_tokens // group.block_size):
                if table[index] and self._can_be_a_hit(group, index):
                    prefix = prefix_of(number, request, (index + 1) * group.block_size)
                    assert self.pool.prefix.setdefault(table[index], prefix) == prefix
            num_cached[number] = max(num_cached[number], num_tokens // group.block_size)

    def seal(self, request: Request, num_tokens: int) -> None:
        """Seal the full blocks of these tokens."""
        num_sealed = self.num_sealed[request.request_id]
        for number, group in enumerate(self.groups):
            for index in range(num_sealed[number], num_tokens // group.block_size):
                self._note_seal(request, number, index, (index + 1) * group.block_size)
                num_sealed[number] = index + 1

    def seal_tail(self, request: Request, num_tokens: int) -> None:
        """Seal the last block of these tokens, if they do not fill it."""
        for number, group in enumerate(self.groups):
            index = num_tokens // group.block_size
            if num_tokens % group.block_size and index >= self.num_sealed[request.request_id][number]:
                self._note_seal(request, number, index, num_tokens)

    def unseal(self, request_id: str, num_kept: int) -> None:
        """The blocks beyond will be written again: the seals break, and the next ones are of another generation."""
        num_sealed = self.num_sealed[request_id]
        for number, group in enumerate(self.groups):
            kept = min(num_sealed[number], num_kept // group.block_size)
            for block_id in filter(None, self.tables[request_id][number][kept : num_sealed[number]]):
                self.pool.sealed.pop(block_id, None)
                self.pool.generation[block_id] += 1
            num_sealed[number] = kept

    def place_to_go_on(self, request_id: str, wanted: int) -> int:
        """Return the last place, ``wanted`` or before it, at which every group holds what the next token attends to."""
        if not any(group.window or group.chunk for group in self.groups):
            return wanted  # anywhere
        unit, tables = self.sizes.unit, self.tables[request_id]
        for place in range(wanted // unit * unit, 0, -unit):
            needs = zip(self.groups, tables, strict=True)
            if all(all(table[index] for index in group.blocks_behind(place)) for group, table in needs):
                return place
        return 0

    def truncate(self, request_id: str, kept: int) -> Tables:
        """Go back to ``kept`` tokens; return the blocks that are rewritten in place.

        After them, null blocks and blocks of other requests are released with all that follow.
        """
        tables = self.tables[request_id]
        dropped: list[int] = []
        for group, table in zip(self.groups, tables, strict=True):
            behind = range(-(-kept // group.block_size), len(table))
            cut = next((index for index in behind if not table[index] or self.pool.refs[table[index]] > 1), len(table))
            dropped += table[cut:][::-1]
            del table[cut:]
        self.pool.release(dropped)
        beyond = [table[kept // group.block_size :] for group, table in zip(self.groups, tables, strict=True)]
        for block_id in [block_id for ids in beyond for block_id in ids]:
            self.pool.rewrite(block_id)
        for counts in (self.num_sealed[request_id], self.num_cached[request_id]):
            for number, group in enumerate(self.groups):
                counts[number] = min(counts[number], kept // group.block_size)
        return beyond

    def _can_be_a_hit(self, group: NaiveAttention, index: int) -> bool:
        """Whether a request can ever continue at a possible end of a hit, and need this block there."""
        unit, start = self.sizes.unit, (index + 1) * group.block_size
        places = range(-(-start // unit) * unit, self.sizes.max_model_len + 2 * unit, unit)
        return any(index in group.blocks_behind(place) for place in places)

    def _note_seal(self, request: Request, number: int, index: int, num_tokens: int) -> None:
        block_id = self.tables[request.request_id][number][index]
        if block_id:
            self.pool.sealed[block_id] = prefix_of(number, request, num_tokens)
