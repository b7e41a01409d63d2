"""What the plug-in counts, for the operator's metrics. Knows nothing of vLLM."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from connectors.reports import LoadEnded
from core.errors import fallback_reason


@dataclass(slots=True)
class RankCounts:
    """What the loads of a rank have brought; ``failures`` by reason. Times and bytes are of loads that were complete."""

    loads: int = 0
    verified_blocks: int = 0
    bytes: int = 0
    transfer_ms: float = 0.0
    verify_ms: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, ended: LoadEnded) -> None:
        """Count the end of a load."""
        usage = ended.usage
        if ended.error is not None:
            self.failures[fallback_reason(ended.error.code)] += 1
        if usage is None:
            return
        self.verified_blocks += usage.verified_blocks
        if ended.error is None:
            self.loads += 1
            self.bytes += usage.transferred_bytes
            self.transfer_ms += usage.transfer_ms
            self.verify_ms += usage.verify_ms


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """What the scheduler side has seen since the last reading.

    ``refusals`` are handoffs that were not read, by reason; ``held_blocks`` is None if there is nothing new.
    """

    refusals: Counter[str]
    held_blocks: int | None
