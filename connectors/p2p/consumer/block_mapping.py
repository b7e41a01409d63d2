"""The units of a load: which of the producer's blocks hold the tokens that our blocks of a request lack.

Pure. One group at a time; the producer's blocks may have another size than ours. Blocks that a sliding group has freed are
in no table: their entries are null on our side, and come before the first block on the producer's side.

    tokens  |  local hit  |      external     |
    local   |  7  |   3   |    9    |    2    |      two blocks are here already
    remote  | 14  |  15   |   16    |   17    |      units: 16 -> 9, 17 -> 2

    local          3      |         9         |      blocks of 64 here, of 16 there
    remote  .. 20  22  23 | 24   31   40   41 |      unit: 24, 31, 40, 41 -> 9, with four copies

"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from connectors.p2p.actions import ReadUnit, TokenCopy
from core.errors import StaleBlock
from core.kv.block import NULL_BLOCK_ID
from core.kv.seals import ExpectedSeal
from core.wire.kv import GroupBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExtent:
    """The tokens [``start``, ``end``) that are loaded for a group, and the sizes of blocks. ``start`` begins one of ours.

    No later token attends to the first ``num_skipped_tokens`` tokens in this group. ``is_converted``: the producer's blocks
    differ from ours, also if they hold as many tokens.
    """

    group_id: int
    start: int
    end: int
    local_block_size: int
    remote_block_size: int
    num_skipped_tokens: int = 0
    is_converted: bool = False


@dataclass(slots=True)
class GroupMapping:
    """The blocks to read for one group. ``is_partial``: the first block will lack its first tokens, which are not needed."""

    units: list[ReadUnit] = field(default_factory=list)
    is_partial: bool = False


def map_group(extent: TokenExtent, group: GroupBlocks, local_ids: Sequence[int], block_hashes: Sequence[bytes]) -> GroupMapping:
    """Return the units that fill our blocks of one group, with the expected seals of the producer's blocks.

    ``local_ids`` is our table, ``block_hashes`` our own chain at the ends of the producer's blocks; of the handoff's seals only
    the generations are used.

    Raises:
        StaleBlock: the producer does not hold a block that is needed here.
    """
    found = GroupMapping()
    remote = _RemoteBlocks(extent, group, block_hashes)
    size = extent.local_block_size
    for positions in _unit_positions(extent, local_ids):
        local = {position: local_ids[position] for position in positions}
        copies: list[TokenCopy] = []
        sources: dict[int, None] = {}  # positions of the producer's blocks, each once, in order
        for position, row in local.items():
            first, last = position * size, min((position + 1) * size, remote.end)
            held_from = remote.held_from(first, last)
            if held_from > max(first, extent.num_skipped_tokens):
                raise StaleBlock(f"the handoff does not hold a block that group {extent.group_id} needs")
            found.is_partial |= held_from > first
            copies += remote.copies(held_from, last, row, first)
            sources |= dict.fromkeys(range(held_from // remote.size, -(-last // remote.size)))
        if copies:  # else the window begins after all loaded tokens
            found.units.append(remote.unit(list(sources), tuple(local.values()), copies, positions))
    return found


def _unit_positions(extent: TokenExtent, local_ids: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of positions of our blocks that are loaded together: each run ends where a block of the producer ends."""
    size = extent.local_block_size
    per_unit = math.lcm(size, extent.remote_block_size) // size
    first, end = extent.start // size, -(-extent.end // size)
    for start in range(first - first % per_unit, end, per_unit):
        positions = [p for p in range(max(start, first), min(start + per_unit, end)) if local_ids[p] != NULL_BLOCK_ID]
        if positions:
            yield positions


@dataclass(frozen=True, slots=True)
class _RemoteBlocks:
    """The producer's blocks of one group by the positions of their tokens."""

    extent: TokenExtent
    group: GroupBlocks
    block_hashes: Sequence[bytes]

    @property
    def size(self) -> int:
        """Tokens of one of the producer's blocks."""
        return self.extent.remote_block_size

    @property
    def end(self) -> int:
        """Where the producer's last block ends; its slots after the last token are zero."""
        return len(self.block_hashes) * self.size

    def row(self, position: int) -> int:
        """Return the block at this position, the null block if the producer has none."""
        index = position - self.group.first_block
        return self.group.block_ids[index] if 0 <= index < len(self.group.block_ids) else NULL_BLOCK_ID

    def held_from(self, start: int, end: int) -> int:
        """Return the token from which on the producer holds all tokens up to ``end``, ``start`` or later."""
        size, position = self.size, -(-end // self.size)
        while position * size > start and self.row(position - 1) != NULL_BLOCK_ID:
            position -= 1
        return max(start, position * size)

    def copies(self, start: int, end: int, local_row: int, local_first: int) -> Iterator[TokenCopy]:
        """Yield the copies that fill one of our blocks, which begins at token ``local_first``."""
        while start < end:
            position, offset = divmod(start, self.size)
            num_tokens = min(end - start, self.size - offset)
            yield TokenCopy(self.row(position), offset, local_row, start - local_first, num_tokens)
            start += num_tokens

    def unit(
        self,
        positions: Sequence[int],
        local_rows: tuple[int, ...],
        copies: Sequence[TokenCopy],
        local_positions: Sequence[int],
    ) -> ReadUnit:
        """Return the unit of the producer's blocks at these positions; blocks of equal size are read without conversion.

        The expected seal follows from the position that the block fills here, not from the block that the producer names.
        """
        extent = self.extent
        local_size = extent.local_block_size
        is_alike = local_size == self.size and not extent.is_converted
        return ReadUnit(
            remote_rows=tuple(map(self.row, positions)),
            local_rows=local_rows,
            expected=tuple(map(self._expected, positions)),
            num_tokens=sum(min(local_size, extent.end - position * local_size) for position in local_positions),
            copies=() if is_alike else tuple(copies),
        )

    def _expected(self, position: int) -> ExpectedSeal:
        num_tokens = min(self.size, self.extent.end - position * self.size)
        generation = self.group.generations[position - self.group.first_block]
        return ExpectedSeal(generation, self.extent.group_id, self.block_hashes[position], num_tokens)
