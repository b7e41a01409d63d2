"""Loads that read from several ranks of P. The agent reads one rank after another, vLLM knows one load.

One after another, because the parts fill the same blocks, and the seals of a block have one place to land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from connectors.p2p.actions import PullRequest
from connectors.reports import ALL_BLOCKS, AllBlocks, LoadEnded
from core.errors import TransferError
from core.wire.messages import ErrorInfo, TransferUsage

_ABORTED = ErrorInfo.of(TransferError("the load was aborted"))


@dataclass(slots=True)
class _Whole:
    request_id: str
    present: str  # name of the part that is being read
    waiting: deque[PullRequest]
    ended: list[LoadEnded] = field(default_factory=list)
    is_cut: bool = False  # aborted, before all its parts had begun


class LoadParts:
    """Loads by the name of the part that is being read. A load from one rank has one part, of the request's name."""

    def __init__(self) -> None:
        self._wholes: dict[str, _Whole] = {}  # by request id
        self._by_part: dict[str, _Whole] = {}

    def __len__(self) -> int:
        return len(self._wholes)

    def begin(self, request_id: str, pulls: Sequence[PullRequest]) -> PullRequest:
        """Return the first part to read."""
        if len(pulls) > 1:
            pulls = [replace(pull, request_id=f"{request_id}#{number}") for number, pull in enumerate(pulls)]
        whole = self._wholes[request_id] = _Whole(request_id, "", deque(pulls))
        return self._next(whole)

    def abort(self, request_id: str) -> str | None:
        """Begin no further part of a load; return the name of the one that is being read, None if the load has ended."""
        whole = self._wholes.get(request_id)
        if whole is None:
            return None
        whole.is_cut = bool(whole.waiting)
        whole.waiting.clear()
        return whole.present

    def end(self, part: LoadEnded) -> PullRequest | LoadEnded:
        """Note the end of a part; return the next one, or after the last one the end of the load.

        After a part without a good block, or with blocks that late reads may write, the others cannot save the load.
        """
        whole = self._by_part.pop(part.request_id)
        whole.ended.append(part)
        if whole.waiting and part.invalid_block_ids is not ALL_BLOCKS and not part.quarantined_block_ids:
            return self._next(whole)
        del self._wholes[whole.request_id]
        found = replace(_joined(whole.ended), request_id=whole.request_id)
        if whole.is_cut:
            found = replace(found, error=found.error or _ABORTED, invalid_block_ids=ALL_BLOCKS)
        return found

    def _next(self, whole: _Whole) -> PullRequest:
        pull = whole.waiting.popleft()
        whole.present = pull.request_id
        self._by_part[pull.request_id] = whole
        return pull


def _joined(parts: Sequence[LoadEnded]) -> LoadEnded:
    """Return one report for parts that fill the same blocks: a block is valid if it is valid in every part."""
    if len(parts) == 1:
        return parts[0]
    invalid: set[int] = set()
    is_all_invalid = False
    for part in parts:
        if isinstance(part.invalid_block_ids, AllBlocks):
            is_all_invalid = True
        else:
            invalid.update(part.invalid_block_ids)
    failed = next((part for part in parts if part.error is not None), None)
    return LoadEnded(
        request_id="",
        usage=_summed([part.usage for part in parts if part.usage is not None]),
        error=None if failed is None else failed.error,
        invalid_block_ids=ALL_BLOCKS if is_all_invalid else tuple(sorted(invalid)),
        quarantined_block_ids=tuple(dict.fromkeys(block_id for part in parts for block_id in part.quarantined_block_ids)),
        peer=(failed or parts[0]).peer,
    )


def _summed(usages: Sequence[TransferUsage]) -> TransferUsage | None:
    """Return the cost of parts that ran one after another; None if all were aborted."""
    if not usages:
        return None
    return TransferUsage(
        transport=usages[0].transport,
        transferred_tokens=min(usage.transferred_tokens for usage in usages),
        transferred_bytes=sum(usage.transferred_bytes for usage in usages),
        transfer_ms=sum(usage.transfer_ms for usage in usages),
        verify_ms=sum(usage.verify_ms for usage in usages),
        verified_blocks=sum(usage.verified_blocks for usage in usages),
    )
