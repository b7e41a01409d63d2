"""What a vLLM server's ``/metrics`` tells: its load, and what our plug-in has counted. Knows the names, and no connections."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

PLUGIN = "vllm:kvferry_"

_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED = re.compile(r"^process_start_time_seconds ([0-9.eE+-]+)$", re.MULTILINE)
_STEPS = "vllm:iteration_tokens_total_count"
_LOADS, _IN_PROGRESS = "vllm:num_requests_kv_fetch_by_stage", 'stage="in_progress"'
_FAILURES = (f"{PLUGIN}failures_total", f"{PLUGIN}refusals_total")


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """What the plug-in has counted since the server's start. Bytes are those of complete loads.

    ``failures`` are handoffs that were not read, or not wholly, by reason.
    """

    num_loads: int
    num_bytes: int
    num_verified_blocks: int
    failures: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The server's load. ``num_steps`` counts the steps of its engines that brought a token.

    The blocks of ``num_loading`` of the waiting requests are on their way. ``kv_cache_usage`` is that of the fullest engine,
    0 to 1, and ``total_usage`` the sum over all. ``started_at`` is when its process began, seconds since the epoch; 0 if it
    does not say, as with several API processes. ``handoffs`` is None without the plug-in. Without ``has_stats``, as with
    ``--disable-log-stats``, the server tells nothing of this but its start, nor whether it has the plug-in.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    kv_cache_usage: float = 0.0
    total_usage: float = 0.0
    num_held_blocks: int = 0
    num_steps: int = 0
    started_at: float = 0.0
    has_stats: bool = False
    handoffs: HandoffCounts | None = None


def read_load(text: str) -> ServerLoad:
    """Return the load of all engines of a server."""
    sums: defaultdict[str, float] = defaultdict(float)
    most: dict[str, float] = {}
    failures: Counter[str] = Counter()
    num_loading = 0.0
    for name, labels, value in _SAMPLE.findall(text):
        if name == _LOADS and _IN_PROGRESS in labels:
            num_loading += float(value)
        elif name in _FAILURES:
            failures[dict(_LABEL.findall(labels)).get("reason", "rejected")] += int(float(value))
        sums[name] += float(value)
        most[name] = max(most.get(name, 0.0), float(value))
    handoffs = HandoffCounts(
        num_loads=int(sums[f"{PLUGIN}loads_total"]),
        num_bytes=int(sums[f"{PLUGIN}bytes_total"]),
        num_verified_blocks=int(sums[f"{PLUGIN}verified_blocks_total"]),
        failures=failures,
    )
    return ServerLoad(
        num_running=int(sums["vllm:num_requests_running"]),
        num_waiting=int(sums["vllm:num_requests_waiting"]),
        num_loading=int(num_loading),
        kv_cache_usage=min(1.0, most.get("vllm:kv_cache_usage_perc", 0.0)),
        total_usage=sums["vllm:kv_cache_usage_perc"],
        num_held_blocks=int(sums[f"{PLUGIN}held_blocks"]),
        num_steps=int(sums[_STEPS]),
        started_at=read_start(text),
        has_stats=has_stats(text),
        handoffs=handoffs if has_plugin(text) else None,
    )


def read_start(text: str) -> float:
    """Return ``ServerLoad.started_at``. Counters may go back while a process lives: vLLM's route to scale resets them."""
    found = _STARTED.search(text)
    return float(found[1]) if found is not None else 0.0


def has_stats(text: str) -> bool:
    """Return whether the server tells its load and its steps."""
    return f"\n{_STEPS}" in text


def has_plugin(text: str) -> bool:
    """Return whether the server hands its KV over by our plug-in."""
    return f"\n{PLUGIN}" in text


def labels_of(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample of a metric, {} if there is none."""
    for found, labels, _ in _SAMPLE.findall(text):
        if found == name:
            return dict(_LABEL.findall(labels))
    return {}
