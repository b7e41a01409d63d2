"""Verifies the blocks that were read: by seals, and by digests where they are required.

Pure. A check is built while the bytes of a load are on the way, so that the expected seals are ready when the real ones
arrive. The verdict is made after the seal read is terminal. Seals are read after the last byte of their blocks: a seal that
is right then was right during the whole read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from connectors.p2p.actions import ReadUnit
from core.errors import CorruptBlock, StaleBlock
from core.kv.seals import SEAL_BYTES, ExpectedRows, decode_seal, find_mismatch
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True)
class Verdict:
    """Units of a load by their indices. ``corrupt`` ones may be read once more; ``stale`` ones would stay stale.

    ``unsealed`` ones have blocks without a seal: theirs was broken, or is about to be written.
    """

    good: list[int] = field(default_factory=list)
    unsealed: dict[int, ErrorInfo] = field(default_factory=dict)
    stale: dict[int, ErrorInfo] = field(default_factory=dict)
    corrupt: dict[int, ErrorInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SealTerms:
    """Demands on every seal of a peer, in addition to the block's own expected seal."""

    incarnation: int
    layout_version: int
    wants_digests: bool


class _Unsealed(StaleBlock):
    """A block has no seal."""


class SealCheck:
    """Compares the seals of ``units``, by their indices in the load, to the expected ones and, if required, to digests."""

    def __init__(self, terms: SealTerms, units: Mapping[int, ReadUnit]) -> None:
        self._terms = terms
        self._units = units
        self._remote_rows = [row for unit in units.values() for row in unit.remote_rows]
        seals = (seal for unit in units.values() for seal in unit.expected)
        self._expected = ExpectedRows(seals, terms.incarnation, terms.layout_version)

    def verdict(self, seals: bytes, digests: Mapping[int, int]) -> Verdict:
        """Decide about every unit: its worst block decides.

        ``seals`` are those of the producer's blocks, concatenated, ``digests`` by the producer's block.
        """
        assert len(seals) == SEAL_BYTES * len(self._remote_rows), "a seal read brings every seal that it was posted for"
        found = [digests[row] for row in self._remote_rows] if self._terms.wants_digests else None
        if self._expected.equal(seals, found):
            return Verdict(good=list(self._units))
        return self._verdict_on_each(seals, digests)

    def _verdict_on_each(self, seals: bytes, digests: Mapping[int, int]) -> Verdict:
        verdict, start = Verdict(), 0
        for index, unit in self._units.items():
            end = start + SEAL_BYTES * len(unit.remote_rows)
            problem = self._find_problem(unit, seals[start:end], digests)
            start = end
            match problem:
                case None:
                    verdict.good.append(index)
                case CorruptBlock():
                    verdict.corrupt[index] = ErrorInfo.of(problem)
                case _Unsealed():
                    verdict.unsealed[index] = ErrorInfo.of(problem)
                case _:
                    verdict.stale[index] = ErrorInfo.of(problem)
        return verdict

    def _find_problem(self, unit: ReadUnit, seals: bytes, digests: Mapping[int, int]) -> StaleBlock | CorruptBlock | None:
        """Return the problem of a unit; one that reading again does not mend takes precedence."""
        corrupt = None
        rows = [seals[start : start + SEAL_BYTES] for start in range(0, len(seals), SEAL_BYTES)]
        for remote_row, seal, expected in zip(unit.remote_rows, rows, unit.expected, strict=True):
            mismatch = find_mismatch(seal, expected, self._terms.incarnation, self._terms.layout_version)
            if mismatch is not None:
                kind = _Unsealed if decode_seal(seal) is None else StaleBlock
                return kind(f"the owner's block {remote_row}: {mismatch}")
            if self._terms.wants_digests and corrupt is None:
                corrupt = _find_corruption(remote_row, seal, digests[remote_row])
        return corrupt


def _find_corruption(remote_row: int, row: bytes, digest: int) -> CorruptBlock | None:
    seal = decode_seal(row)
    assert seal is not None, "it was found intact a moment ago"
    if seal.digest is None:
        return CorruptBlock(f"the owner's block {remote_row}: its seal has no digest, and digests are demanded")
    if seal.digest != digest:
        return CorruptBlock(
            f"the owner's block {remote_row}: digest {digest:016x} of the bytes instead of {seal.digest:016x} in its seal"
        )
    return None
