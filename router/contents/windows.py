"""Where a hit of a hybrid model may end: only where the layers with windows still have what the next token attends to.

The rule is that of the workers' pools (``core.kv.single_type``), over block positions. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """The tokens that a layer attends to: the last ``num_tokens``, the next one among them, or those since a multiple of it."""

    num_tokens: int
    is_chunked: bool = False

    def first_block(self, num_blocks: int, block_size: int) -> int:
        """Return the first block that the token after so many blocks attends to."""
        end = num_blocks * block_size
        first = end - end % self.num_tokens if self.is_chunked else max(0, end - self.num_tokens + 1)
        return first // block_size


def longest_hit(num_blocks: int, block_size: int, windows: Sequence[tuple[Window, Callable[[int], bool]]]) -> int:
    """Return the length, in blocks, of the longest hit of at most ``num_blocks``.

    Each window comes with what says whether its layers have the block at a position.
    """
    agreed = 0
    while num_blocks and agreed < len(windows):
        for window, holds in windows:
            shorter = _longest_within(num_blocks, block_size, window, holds)
            agreed = agreed + 1 if shorter == num_blocks else 1
            num_blocks = shorter
            if agreed == len(windows):
                break
    return num_blocks


def _longest_within(end: int, block_size: int, window: Window, holds: Callable[[int], bool]) -> int:
    """Scan from the right; a hit that needs a missing block ends before it."""
    index, first = end, window.first_block(end, block_size)
    while index > first:
        index -= 1
        if not holds(index):
            end = index
            first = window.first_block(end, block_size)
    return end
