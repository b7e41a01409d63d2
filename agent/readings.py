"""The agent's gauges: the names and meanings are those of our own workers, the values the server's."""

from __future__ import annotations

from collections.abc import Callable

from agent.engine import VllmEngine
from core.metrics import Metric
from core.worker.state import WorkerState

_DRAINING = Metric("draining", "gauge", "1 while the worker takes no new requests.")
_ROUTERS = Metric("registered_routers", "gauge", "Routers that have this worker in their membership.")
_STALLED = Metric("engine_stalled_seconds", "gauge", "Time since the engine's last progress while it has work; 0 without work.")
_RUNNING = Metric("num_requests_running", "gauge", "Requests in the server's running batch.")
_WAITING = Metric("num_requests_waiting", "gauge", "Requests that wait in the server for admission.")
_LOADING = Metric("num_requests_loading", "gauge", "Requests of the server whose KV cache is being loaded.")
_USAGE = Metric("kv_cache_usage_perc", "gauge", "Share of the server's KV blocks in use, 0 to 1.")
_LEASED = Metric("kv_leased_blocks", "gauge", "Blocks that the server holds for readers, or that late reads may still write.")
_LEAKED = Metric(
    "kv_leaked_blocks",
    "gauge",
    "Blocks in use although no request and no reader is left; anything but 0 is a bug.",
)


def readings(engine: VllmEngine, num_blocks: int, state: Callable[[], WorkerState | None]) -> dict[Metric, Callable[[], float]]:
    """Return a function for each gauge. ``num_blocks`` are the server's; ``state`` returns None at the start."""

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
        _LEAKED: num_leaked,
    }
