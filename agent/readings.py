"""The agent's metrics: the names and meanings are those of our own workers, the values the server's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry

from agent.engine import VllmEngine
from agent.server_metrics import HandoffCounts
from core.errors import FALLBACK_REASONS
from core.metrics import Metric, read_labelled_counter
from core.worker.state import WorkerState

TRANSPORT = "vllm"  # the label of loads: the plug-in does not tell by which one they were

_Samples = Iterable[tuple[Sequence[str], float]]

_DRAINING = Metric("draining", "gauge", "1 while the worker takes no new requests.")
_ROUTERS = Metric("registered_routers", "gauge", "Routers that have this worker in their membership.")
_STALLED = Metric("engine_stalled_seconds", "gauge", "Time since the engine's last progress while it has work; 0 without work.")
_RUNNING = Metric("num_requests_running", "gauge", "Requests in the server's running batch.")
_WAITING = Metric("num_requests_waiting", "gauge", "Requests that wait in the server for admission.")
_LOADING = Metric("num_requests_loading", "gauge", "Requests of the server whose KV cache is being loaded.")
_USAGE = Metric("kv_cache_usage_perc", "gauge", "Share of the server's KV blocks in use, 0 to 1.")
_LEASED = Metric("kv_leased_blocks", "gauge", "Blocks that the server holds for readers, or that late reads may still write.")
_QUARANTINED = Metric("kv_quarantined_blocks", "gauge", "Blocks that an abandoned read of the server may still write.")
_LEAKED = Metric(
    "kv_leaked_blocks",
    "gauge",
    "Blocks in use although no request and no reader is left; anything but 0 is a bug.",
)


def readings(
    engine: VllmEngine, num_blocks: int, state: Callable[[], WorkerState | None], role: str
) -> dict[Metric, Callable[[], float]]:
    """Return a function for each gauge. ``num_blocks`` are the server's; ``state`` returns None at the start.

    The server tells one number of the blocks it holds: of a decode server they wait for late reads, of others for readers.
    """

    def num_leaked() -> float:
        load = engine.load
        is_used = load.num_running + load.num_waiting + load.num_held_blocks + engine.num_requests
        return 0 if is_used else float(round(load.kv_cache_usage * num_blocks))

    return {
        _DRAINING: lambda: float((found := state()) is not None and found.is_draining),
        _ROUTERS: lambda: float(found.num_registered_routers if (found := state()) is not None else 0),
        _STALLED: lambda: engine.reading().stalled_s,
        _RUNNING: lambda: float(engine.load.num_running),
        _WAITING: lambda: float(engine.load.num_waiting - engine.load.num_loading),
        _LOADING: lambda: float(engine.load.num_loading),
        _USAGE: lambda: engine.load.kv_cache_usage,
        _LEASED: lambda: float(engine.load.num_held_blocks),
        _QUARANTINED: lambda: float(engine.load.num_held_blocks if role == "decode" else 0),
        _LEAKED: num_leaked,
    }


def count_handoffs(registry: CollectorRegistry, engine: VllmEngine) -> None:
    """Register the counters of the server's plug-in. They have no samples until the server has told them, or without it.

    Prometheus would take the first counts after a 0 for new events, although the server may be older than its agent.
    """

    def register(name: str, documentation: str, labels: tuple[str, ...], read: Callable[[HandoffCounts], _Samples]) -> None:
        def read_if_told() -> _Samples:
            counts = engine.load.handoffs
            return read(counts) if counts is not None else []

        read_labelled_counter(registry, name, documentation, labels, read_if_told)

    by_transport, no_failures = ("transport",), dict.fromkeys(FALLBACK_REASONS, 0)
    register("kv_transfers", "Loads that succeeded.", by_transport, lambda counts: [((TRANSPORT,), counts.num_loads)])
    register(
        "kv_transfer_bytes", "Bytes of loads that succeeded.", by_transport, lambda counts: [((TRANSPORT,), counts.num_bytes)]
    )
    register("kv_verified_blocks", "Blocks that were read and verified.", (), lambda counts: [((), counts.num_verified_blocks)])
    register(
        "kv_transfer_failures",
        "Handoffs of which nothing, or not everything, could be used, by reason.",
        ("reason",),
        lambda counts: [((reason,), number) for reason, number in (no_failures | dict(counts.failures)).items()],
    )
