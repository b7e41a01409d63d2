"""Loads that read from several ranks of P: each rank's share is a load of its own for the agent, and vLLM knows one load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from connectors.reports import ALL_BLOCKS, AllBlocks, LoadEnded
from core.wire.messages import TransferUsage


@dataclass(slots=True)
class _Whole:
    part_ids: tuple[str, ...]
    ended: list[LoadEnded] = field(default_factory=list)


class LoadParts:
    """The parts of loads by request id. A load that reads from one rank has one part, of its own name."""

    def __init__(self) -> None:
        self._wholes: dict[str, _Whole] = {}
        self._request_ids: dict[str, str] = {}  # by the name of a part

    def __len__(self) -> int:
        return len(self._wholes)

    def begin(self, request_id: str, num_parts: int) -> tuple[str, ...]:
        """Return the names of the parts of a new load."""
        names = (request_id,) if num_parts == 1 else tuple(f"{request_id}#{number}" for number in range(num_parts))
        self._wholes[request_id] = _Whole(names)
        self._request_ids |= dict.fromkeys(names, request_id)
        return names

    def names(self, request_id: str) -> Sequence[str]:
        """Return the names of the parts of a load; none if it has ended."""
        whole = self._wholes.get(request_id)
        return () if whole is None else whole.part_ids

    def end(self, part: LoadEnded) -> LoadEnded | None:
        """Note the end of a part; return the end of the load after its last part."""
        request_id = self._request_ids.pop(part.request_id)
        whole = self._wholes[request_id]
        whole.ended.append(part)
        if len(whole.ended) < len(whole.part_ids):
            return None
        del self._wholes[request_id]
        return replace(_joined(whole.ended), request_id=request_id)


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
    """Return the cost of parts that ran at the same time; None if all were aborted."""
    if not usages:
        return None
    return TransferUsage(
        transport=usages[0].transport,
        transferred_tokens=min(usage.transferred_tokens for usage in usages),
        transferred_bytes=sum(usage.transferred_bytes for usage in usages),
        transfer_ms=max(usage.transfer_ms for usage in usages),
        verify_ms=max(usage.verify_ms for usage in usages),
        verified_blocks=sum(usage.verified_blocks for usage in usages),
    )
