"""Whether what was read is what was asked for: seals, and digests where they are demanded.

Pure. ``connectors.p2p.pull`` calls it once the seal read of a load is terminal, which was posted after its last byte had
arrived: a seal that is right now was right all the while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connectors.p2p.actions import PullRequest
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
        stale = corrupt = None
        for remote_row, expected in zip(unit.remote_rows, unit.expected, strict=True):
            seal = next(seal_of)
            mismatch = find_mismatch(seal, expected, check.incarnation, check.layout_version)
            if mismatch is not None:
                stale = stale or StaleBlock(f"the owner's block {remote_row}: {mismatch}")
            elif check.wants_digests:
                corrupt = corrupt or _find_corruption(remote_row, seal, digests[remote_row])
        if stale is not None:
            verdict.stale[index] = ErrorInfo.of(stale)
        elif corrupt is not None:
            verdict.corrupt[index] = ErrorInfo.of(corrupt)
        else:
            verdict.good.append(index)
    return verdict


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
