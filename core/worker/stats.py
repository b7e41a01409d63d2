"""The statistics of a worker: the load that routers learn, and the engine and connector metrics of ``/metrics``.

Owns the source of each number. Knows no sockets and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from core.engine.thread import EngineThread
from core.errors import FALLBACK_REASONS
from core.metrics import Metric, read_labelled_counter
from core.sched.stats import ENGINE_METRICS
from core.worker.actions import EngineLoad
from core.worker.builder import Assembled
from core.worker.state import WorkerState

_DRAINING = Metric("draining", "gauge", "1 while the worker takes no new requests.")
_REGISTERED_ROUTERS = Metric("registered_routers", "gauge", "Routers that have this worker in their membership.")
_STALLED = Metric("engine_stalled_seconds", "gauge", "Time since the engine's last progress while it has work; 0 without work.")
_DECODED_BYTES = Metric("encoder_prepared_bytes", "gauge", "Pixels of images that are decoded and wait to be embedded.")
_LEAKED_BLOCKS = Metric(
    "kv_leaked_blocks",
    "gauge",
    "Blocks in use although no request, early pull, reader or transfer is left; anything but 0 is a bug.",
)
WORKER_METRICS = (_DRAINING, _REGISTERED_ROUTERS, _STALLED, _DECODED_BYTES, _LEAKED_BLOCKS)

# The series exist from the start: Prometheus sees no increase where one begins at 1.
_NO_FALLBACKS = {(reason, policy): 0 for reason in FALLBACK_REASONS for policy in ("recompute", "fail")}


class WorkerStats:
    """Reads engine and connectors. ``state`` is a function, since the state is made later. Event loop only."""

    def __init__(self, assembled: Assembled, engine: EngineThread, state: Callable[[], WorkerState | None]) -> None:
        self._connector = assembled.connector
        self._ec_connector = assembled.ec_connector
        self._num_blocks = assembled.built.num_blocks
        self._images = assembled.built.image_decode_thread
        self._engine = engine
        self._state = state

    def load(self) -> EngineLoad:
        """Return the load for a heartbeat. Leases of embeddings count like those of blocks: a drain waits for both."""
        stats = self._engine.stats()
        connectors = [connector for connector in (self._connector, self._ec_connector) if connector is not None]
        return EngineLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting + stats.num_loading,
            kv_cache_usage=stats.kv_cache_usage,
            num_leased_blocks=self._num_leased_blocks() + self._num_leased_chunks(),
            longest_lease_s=max((connector.longest_lease_s() for connector in connectors), default=0.0),
            progress=self._engine.reading(),
        )

    def readings(self) -> dict[Metric, Callable[[], float]]:
        """Return a function for each of ``WORKER_METRICS`` and ``ENGINE_METRICS``."""
        engine, state = self._engine, self._state
        readings: dict[Metric, Callable[[], float]] = {
            _DRAINING: lambda: (found := state()) is not None and found.is_draining,
            _REGISTERED_ROUTERS: lambda: found.num_registered_routers if (found := state()) is not None else 0,
            _STALLED: lambda: engine.reading().stalled_s,
            _DECODED_BYTES: lambda: self._images.num_bytes if self._images is not None else 0,
            _LEAKED_BLOCKS: self._num_leaked_blocks,
        }
        return readings | {metric: partial(self._read_engine, name) for name, metric in ENGINE_METRICS.items()}

    def count_fallbacks(self, registry: CollectorRegistry) -> None:
        """Register the counter of loads that failed."""
        read_labelled_counter(
            registry,
            "kv_load_fallbacks",
            "Requests whose KV could not be loaded, by reason and by what became of them: recompute or fail.",
            ("reason", "policy"),
            lambda: list((_NO_FALLBACKS | dict(self._engine.stats().num_load_fallbacks)).items()),
        )

    def _read_engine(self, field_name: str) -> float:
        return float(getattr(self._engine.stats(), field_name))

    def _num_leased_blocks(self) -> int:
        return self._connector.num_leased_blocks() if self._connector is not None else 0

    def _num_leased_chunks(self) -> int:
        return self._ec_connector.num_leased_chunks() if self._ec_connector is not None else 0

    def _num_leaked_blocks(self) -> int:
        """Return the blocks in use although no request, early pull, reader or transfer is left, as of the last step."""
        state = self._state()
        assert state is not None
        stats = self._engine.stats()
        num_requests = stats.num_running + stats.num_waiting + stats.num_loading + state.num_requests
        num_held_blocks = stats.num_parked_blocks + stats.num_early_blocks + self._num_leased_blocks()
        if num_requests or num_held_blocks:
            return 0
        num_used = round(stats.kv_cache_usage * (self._num_blocks - 1))  # without the null block
        num_saving = self._connector.num_saving_blocks() if self._connector is not None else 0
        return num_used - stats.num_quarantined_blocks - num_saving
