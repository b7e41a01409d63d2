"""Offsets of media that count how often they are compared: a measure of the work of hashing that no clock distorts."""

from __future__ import annotations

from typing import Any


class CountedOffset(int):
    """An offset. ``num_looks`` counts the comparisons of all of them."""

    num_looks = 0

    def __lt__(self, other: Any) -> bool:
        CountedOffset.num_looks += 1
        return int(self) < other

    def __gt__(self, other: Any) -> bool:
        CountedOffset.num_looks += 1
        return int(self) > other
