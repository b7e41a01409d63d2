"""What vLLM shows of the handoffs in its ``/metrics`` and in its log.

Ranks and scheduler side count; vLLM adds their counts up after each step, and passes the sum to its API server as a dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connectors.vllm.counts import RankCounts, SchedulerCounts

_PREFIX = "vllm:kvferry_"
_COUNTERS = {  # by the key in the dict
    "loads": "Loads whose blocks were all verified.",
    "verified_blocks": "Blocks that were read from a peer and verified.",
    "bytes": "Bytes that complete loads have read.",
    "transfer_seconds": "Time that complete loads took to read.",
    "verify_seconds": "Time that complete loads took to verify.",
}
_BY_REASON = {
    "failures": "Loads after which tokens were computed again, or their request failed.",
    "refusals": "Handoffs that were refused before any read.",
}
_HELD_BLOCKS = "held_blocks"


class HandoffStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one step, or the sum of several. Held blocks are the last known number, None if there is nothing new."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not data:
            self.reset()

    def reset(self) -> None:
        """Forget all counts."""
        self.data = dict.fromkeys(_COUNTERS, 0) | {name: {} for name in _BY_REASON} | {_HELD_BLOCKS: None}

    def aggregate(self, other: KVConnectorStats) -> HandoffStats:
        """Add other counts to these."""
        for name in _COUNTERS:
            self.data[name] += other.data[name]
        for name in _BY_REASON:
            self.data[name] = dict(Counter(self.data[name]) + Counter(other.data[name]))
        if other.data[_HELD_BLOCKS] is not None:
            self.data[_HELD_BLOCKS] = other.data[_HELD_BLOCKS]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts as numbers, for the line that vLLM logs from time to time."""
        numbers = {name: round(self.data[name], 3) for name in _COUNTERS}
        by_reason = {f"{name} ({reason})": count for name in _BY_REASON for reason, count in self.data[name].items()}
        held_blocks = self.data[_HELD_BLOCKS]
        return numbers | by_reason | ({} if held_blocks is None else {_HELD_BLOCKS: held_blocks})

    def is_empty(self) -> bool:
        """Return True if nothing has happened."""
        return self.data[_HELD_BLOCKS] is None and not any(self.data[name] for name in (*_COUNTERS, *_BY_REASON))


def stats_of_rank(counts: RankCounts) -> HandoffStats:
    """Return what a rank has counted since the last step."""
    stats = HandoffStats()
    stats.data |= {
        "loads": counts.loads,
        "verified_blocks": counts.verified_blocks,
        "bytes": counts.bytes,
        "transfer_seconds": counts.transfer_ms / 1000,
        "verify_seconds": counts.verify_ms / 1000,
        "failures": dict(counts.failures),
    }
    return stats


def stats_of_scheduler(counts: SchedulerCounts) -> HandoffStats:
    """Return what the scheduler side has counted since the last step."""
    stats = HandoffStats()
    stats.data |= {"refusals": dict(counts.refusals), _HELD_BLOCKS: counts.held_blocks}
    return stats


class HandoffMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts as Prometheus metrics, for each engine behind an API server."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._counters = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in _COUNTERS.items()
        }
        self._by_reason = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in _BY_REASON.items()
        }
        self._held_blocks = self._gauge_cls(
            name=_PREFIX + _HELD_BLOCKS,
            documentation="Blocks kept for readers, or because a late read may still write them.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        for labels in per_engine_labelvalues.values():  # so that they are there before anything has happened
            for metric in (*self._counters.values(), self._held_blocks):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of a step."""
        labels = self._labels[engine_idx]
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data[name])
        for name, counter in self._by_reason.items():
            for reason, count in transfer_stats_data[name].items():
                counter.labels(*labels, reason).inc(count)
        if transfer_stats_data[_HELD_BLOCKS] is not None:
            self._held_blocks.labels(*labels).set(transfer_stats_data[_HELD_BLOCKS])
