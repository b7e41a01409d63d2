"""The statistics of a worker: the load that routers learn, and the engine and connector metrics of ``/metrics``.

Owns the source of each number. Knows no sockets and no requests.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from core.engine.thread import EngineThread
from core.errors import FALLBACK_REASONS
from core.metrics import read_labelled_counter
from core.worker.actions import EngineLoad
from core.worker.builder import Assembled
from core.worker.state import WorkerState

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
        gauges = self._engine.gauges()
        connectors = [connector for connector in (self._connector, self._ec_connector) if connector is not None]
        return EngineLoad(
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting + gauges.num_loading,
            kv_cache_usage=gauges.kv_cache_usage,
            num_leased_blocks=self._num_leased_blocks() + self._num_leased_chunks(),
            longest_lease_s=max(
                (connector.longest_lease_s() for connector in connectors if connector is not None), default=0.0
            ),
            progress=self._engine.reading(),
        )

    def readings(self) -> dict[str, Callable[[], float]]:
        """Return a function by name for each of the worker's gauges and counters (``core.metrics``)."""
        engine, state = self._engine, self._state
        return {
            "num_requests_running": lambda: engine.gauges().num_running,
            "num_requests_waiting": lambda: engine.gauges().num_waiting,
            "num_requests_loading": lambda: engine.gauges().num_loading,
            "kv_cache_usage_perc": lambda: engine.gauges().kv_cache_usage,
            "kv_parked_blocks": lambda: engine.gauges().num_parked_blocks,
            "kv_quarantined_blocks": lambda: engine.gauges().num_quarantined_blocks,
            "kv_leaked_blocks": self._num_leaked_blocks,
            "draining": lambda: (found := state()) is not None and found.is_draining,
            "registered_routers": lambda: found.num_registered_routers if (found := state()) is not None else 0,
            "engine_stalled_seconds": lambda: engine.reading().stalled_s,
            "engine_steps": lambda: engine.gauges().num_steps,
            "num_preemptions": lambda: engine.gauges().num_preemptions,
            "prefix_cache_queries": lambda: engine.gauges().num_prefix_queried_tokens,
            "prefix_cache_hits": lambda: engine.gauges().num_prefix_hit_tokens,
            "external_prefix_cache_queries": lambda: engine.gauges().num_external_queried_tokens,
            "external_prefix_cache_hits": lambda: engine.gauges().num_external_hit_tokens,
            "encoder_cache_usage_perc": lambda: engine.gauges().encoder_cache_usage,
            "encoder_prepared_bytes": lambda: self._images.num_bytes if self._images is not None else 0,
            "encoder_inputs_computed": lambda: engine.gauges().num_encoder_computed,
            "encoder_inputs_loaded": lambda: engine.gauges().num_encoder_loaded,
            "encoder_inputs_cached": lambda: engine.gauges().num_encoder_hits,
            "encoder_deferrals": lambda: engine.gauges().num_encoder_deferrals,
            "ignored_transfer_reports": lambda: engine.gauges().num_ignored_reports,
        }

    def count_fallbacks(self, registry: CollectorRegistry) -> None:
        """Register the counter of loads that failed."""
        read_labelled_counter(
            registry,
            "kv_load_fallbacks",
            "Requests whose KV could not be loaded, by reason and by what became of them: recompute or fail.",
            ("reason", "policy"),
            lambda: list((_NO_FALLBACKS | dict(self._engine.gauges().num_load_fallbacks)).items()),
        )

    def _num_leased_blocks(self) -> int:
        return self._connector.num_leased_blocks() if self._connector is not None else 0

    def _num_leased_chunks(self) -> int:
        return self._ec_connector.num_leased_chunks() if self._ec_connector is not None else 0

    def _num_leaked_blocks(self) -> int:
        """Return the blocks in use although no request, reader or transfer is left, as of the engine's last step."""
        state = self._state()
        assert state is not None
        gauges = self._engine.gauges()
        is_used = gauges.num_running + gauges.num_waiting + gauges.num_loading + gauges.num_parked_blocks
        if is_used or self._num_leased_blocks() or state.num_requests:
            return 0
        num_used = round(gauges.kv_cache_usage * (self._num_blocks - 1))  # without the null block
        num_saving = self._connector.num_saving_blocks() if self._connector is not None else 0
        return num_used - gauges.num_quarantined_blocks - num_saving
