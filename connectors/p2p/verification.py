"""Whether what was read is what was asked for: seals, and digests where they are demanded.

Pure. ``connectors.p2p.pull`` calls it once the seal read of a load is terminal, which was posted after its last byte had
arrived: a seal that is right now was right all the while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.p2p.actions import PullRequest, ReadEnded
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
    """Rows of a load by their indices. ``corrupt`` ones may be read once more; ``stale`` ones would not get better."""

    good: list[int] = field(default_factory=list)
    stale: dict[int, ErrorInfo] = field(default_factory=dict)
    corrupt: dict[int, ErrorInfo] = field(default_factory=dict)


def check_seals(check: SealCheck, request: PullRequest, rows: RowSlice, read: ReadEnded) -> Verdict:
    """Compare the seals that came with ``read`` to the expected ones and, if demanded, to the digests of the bytes."""
    assert len(read.seals) == len(rows.indices), "a seal read brings every seal that it was posted for"
    verdict = Verdict()
    for position, (index, seal) in enumerate(zip(rows.indices, read.seals, strict=True)):
        mismatch = find_mismatch(seal, request.expected[index], check.incarnation, check.layout_version)
        corruption = _find_corruption(seal, read.digests[position]) if mismatch is None and check.wants_digests else None
        if mismatch is not None:
            verdict.stale[index] = ErrorInfo.of(StaleBlock(f"the owner's block {rows.remote_rows[position]}: {mismatch}"))
        elif corruption is not None:
            verdict.corrupt[index] = ErrorInfo.of(CorruptBlock(f"the owner's block {rows.remote_rows[position]}: {corruption}"))
        else:
            verdict.good.append(index)
    return verdict


def _find_corruption(row: bytes, digest: int) -> str | None:
    seal = decode_seal(row)
    assert seal is not None, "it was found intact a moment ago"
    if seal.digest is None:
        return "its seal has no digest, and digests are demanded"
    if seal.digest != digest:
        return f"digest {digest:016x} of the bytes instead of {seal.digest:016x} in its seal"
    return None
