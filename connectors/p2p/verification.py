"""Whether what was read is what was asked for: seals, and digests where they are demanded.

Pure. ``connectors.p2p.pull`` calls it once the seal read of a load is terminal, which was begun after its last byte had
arrived: a seal that is right now was right all the while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from connectors.p2p.actions import PullRequest, ReadUnit
from connectors.p2p.load import RowSlice
from core.errors import CorruptBlock, StaleBlock
from core.kv.seals import decode_seal, find_mismatch
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True)
class SealCheck:
    """What is demanded of every seal besides what is expected of each."""

    incarnation: int
    layout_version: int
    wants_digests: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Units of a load by their indices. ``corrupt`` ones may be read once more; ``stale`` ones would not get better."""

    good: list[int] = field(default_factory=list)
    stale: dict[int, ErrorInfo] = field(default_factory=dict)
    corrupt: dict[int, ErrorInfo] = field(default_factory=dict)


def check_seals(
    check: SealCheck, request: PullRequest, rows: RowSlice, seals: Sequence[bytes], digests: Mapping[int, int]
) -> Verdict:
    """Compare the seals of the owner's blocks to the expected ones and, if demanded, to the digests of what was read of them.

    A unit is as good as the worst of its blocks. ``digests`` are by the owner's block.
    """
    assert len(seals) == len(rows.remote_rows), "a seal read brings every seal that it was posted for"
    verdict = Verdict()
    seal_of = iter(seals)
    for index in rows.indices:
        unit = request.units[index]
        problem = _find_problem(check, unit, list(islice(seal_of, len(unit.remote_rows))), digests)
        if problem is None:
            verdict.good.append(index)
        else:
            found = verdict.corrupt if isinstance(problem, CorruptBlock) else verdict.stale
            found[index] = ErrorInfo.of(problem)
    return verdict


def _find_problem(
    check: SealCheck, unit: ReadUnit, seals: Sequence[bytes], digests: Mapping[int, int]
) -> StaleBlock | CorruptBlock | None:
    """Return what is wrong with a unit: what reading again does not mend comes first."""
    corrupt = None
    for remote_row, seal, expected in zip(unit.remote_rows, seals, unit.expected, strict=True):
        mismatch = find_mismatch(seal, expected, check.incarnation, check.layout_version)
        if mismatch is not None:
            return StaleBlock(f"the owner's block {remote_row}: {mismatch}")
        if check.wants_digests and corrupt is None:
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
