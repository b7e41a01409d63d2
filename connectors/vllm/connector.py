"""``KvferryConnector``: vLLM's hooks, passed to the scheduler side or to the worker side.

Decides nothing. vLLM makes one instance in the engine core and one in each worker; the class says in ``role`` which it is.
Facts of vLLM 0.32: all hooks of an instance are called on one thread; the scheduler frees the blocks of a finished request,
for which ``request_finished_all_groups`` has returned True, when every rank has reported its id in ``finished_sending``.
"""

from __future__ import annotations

import logging
from typing import Any

from connectors.vllm.vllm_version import MINOR  # before anything of vLLM's that may differ

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.p2p.host_id import host_id
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.settings import DriverSettings
from connectors.vllm.engine import (
    attention_names,
    attention_specs,
    can_name_blocks,
    check_role,
    check_supported,
    instruction_sets,
    model_identity,
    total_kv_heads,
    transfer_groups,
)
from connectors.vllm.handoff_params import Rank
from connectors.vllm.metrics import HandoffMetrics, HandoffStats, stats_of_rank, stats_of_scheduler
from connectors.vllm.orders import RankAddress, RankOrders, RankReports
from connectors.vllm.pool import block_layout, kv_written, pool_of
from connectors.vllm.producer import EngineIdentity
from connectors.vllm.scheduler_side import SchedulerSide
from connectors.vllm.settings import read_keys, read_settings
from connectors.vllm.worker_side import RankRole, StepReport, WorkerSide
from core.clock import SystemClock
from core.errors import ConfigError
from core.ids import RandomIds, new_incarnation
from core.log import event
from core.wire.pairing import verifies_digests
from core.wire.sockets import join_tcp

_log = logging.getLogger("vllm.kvferry")
UNSEALED_PATIENCE_S = 0.05  # the seals of a prompt are written soon after the step that completes it
_OURS = ("kvferry_vllm", "connectors", "core")  # first names of our loggers: in the wheel, and in the repository


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The verified handoff of kvferry as a KV connector of vLLM."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config)
        self._keys = read_keys(self._settings)
        self._is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._address: RankAddress | None = None
        self._block_pool: Any = None
        self._step_report = StepReport()
        self._ranks_have_counted = False  # in the last step
        self._kv_caches: dict[str, Any] = {}  # keeps the memory that peers read

    # ---- start, worker side ------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for the layout of the settings: by default that in which a block of all layers is one run of bytes."""
        return read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_cache_layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Check the settings; no graph is in the way of a load. vLLM asks before it loads a model that has full CUDA graphs."""
        read_settings(extra_config)
        return False

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start this rank's agent on the engine's memory.

        Raises:
            ConfigError: the memory has another layout, a setting is wrong, or MultiConnector's role does not fit ours.
            ConnectorUnavailable: no transport works here.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.utils.network_utils import get_ip

        config, caches, transfer = self._vllm_config, self._kv_cache_config, self._vllm_config.kv_transfer_config
        rank, ids, settings = get_tensor_model_parallel_rank(), RandomIds(), self._settings
        self._check_engine_config(rank)
        specs = attention_specs(caches)
        layout = block_layout(kv_caches, caches, str(config.cache_config.cache_dtype), instruction_sets(config, specs))
        model = model_identity(config, MINOR, settings.model, attention_names(config, specs))
        incarnation = new_incarnation(ids)
        has_digests = any(verifies_digests(settings.kv_verify, name) for name in settings.transports)
        pool = pool_of(kv_caches, caches.num_blocks, layout, incarnation, has_digests=has_digests)
        host = settings.bind_host(self._keys is not None, get_ip())
        self._kv_caches = kv_caches
        self._worker_side = WorkerSide(
            RankRole(
                rank=rank,
                num_ranks=int(config.parallel_config.tensor_parallel_size),
                num_kv_heads=total_kv_heads(config, specs),
                is_producer=bool(transfer.is_kv_producer),
                can_name_blocks=can_name_blocks(caches),
            ),
            WorkerIdentity(
                engine_id=str(transfer.engine_id),
                incarnation=incarnation,
                model_fingerprint=model.fingerprint,
                layout=layout,
                host_id=host_id(),
            ),
            DriverSettings(
                transfer=settings.transfer,
                control_address=join_tcp(host, settings.port_of(rank, config.parallel_config)),
                advertise_host=host,
                keys=self._keys,
                unsealed_patience_s=UNSEALED_PATIENCE_S,
                clock=SystemClock(),
                ids=ids,
            ),
            pool,
        )
        self._address = self._worker_side.start(model)

    def _check_engine_config(self, rank: int) -> None:
        """Check what vLLM's scheduler reads from the engine's own configuration: MultiConnector's, if ours is one of several.

        Raises:
            ConfigError: its role does not include ours.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        own, outer = self._vllm_config.kv_transfer_config, get_kv_transfer_group()._vllm_config.kv_transfer_config
        check_role(own, outer)
        if rank == 0 and own.is_kv_consumer and outer.kv_load_failure_policy != "recompute":
            hint = 'set "kv_load_failure_policy": "recompute", or a load that fails ends its request with an error'
            _log.warning(event("kv_load_failure_policy_is_fail", hint=hint))

    def get_handshake_metadata(self) -> Any:
        """Return where peers reach this rank, for the scheduler side."""
        return self._address

    def shutdown(self) -> None:
        """End the agent of this rank."""
        if self._worker_side is not None:
            self._worker_side.stop()

    # ---- start, scheduler side ---------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep the pool, for the quarantine."""
        self._block_pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Learn the addresses of all ranks.

        Raises:
            ConfigError: they are not those of ranks with the same KV.
        """
        transfer, caches = self._vllm_config.kv_transfer_config, self._kv_cache_config
        ranks = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(rank, RankAddress) for rank in ranks):
            raise ConfigError(
                "KvferryConnector is not the first connector of MultiConnector with handshake metadata: put it first"
            )
        first: RankAddress = ranks[0]
        if any((rank.model, rank.layout) != (first.model, first.layout) for rank in ranks):
            raise ConfigError("KvferryConnector: the ranks differ in model or layout of their KV caches")
        engine = EngineIdentity(
            engine_id=str(transfer.engine_id),
            model=first.model,
            layout=first.layout,
            ranks=tuple(Rank(rank.control_address, rank.incarnation) for rank in ranks),
            num_kv_heads=total_kv_heads(self._vllm_config, attention_specs(caches)),
            lease_ms=int(1000 * self._settings.lease_s),
        )
        self._scheduler_side = SchedulerSide(
            engine,
            self._settings.peer_rules(self._keys is not None),
            RandomIds(),
            transfer_groups(caches),
            is_producer=bool(transfer.is_kv_producer),
            is_consumer=bool(transfer.is_kv_consumer),
        )
        if self._block_pool is not None:
            self._scheduler_side.bind_block_pool(self._block_pool)
        _log.info(
            event("kvferry_ready", transports=",".join(first.transports), ranks=len(ranks), address=first.control_address)
        )

    # ---- scheduler side ----------------------------------------------------------------------------------------------

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler side, once the addresses of the ranks are known."""
        assert self._scheduler_side is not None, "vLLM sets the handshake metadata before any request"
        return self._scheduler_side

    def on_new_request(self, request: Any) -> None:
        """Note what a request wants."""
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer the rest of the request's handoff, to be loaded between steps."""
        count = self.scheduler_side.num_loadable_tokens(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups that take part: a load brings the request's own blocks."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load into the blocks that vLLM has allocated."""
        self.scheduler_side.start_load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the orders for the ranks."""
        table_of = scheduler_output.kv_connector_block_state.get_block_ids
        return self.scheduler_side.build_orders(scheduler_output.num_scheduled_tokens, table_of)

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the reports of all ranks, before vLLM frees blocks."""
        self._ranks_have_counted = connector_output.kv_connector_stats is not None
        reports = connector_output.kv_connector_worker_meta
        self.scheduler_side.on_step_ended(
            connector_output.finished_sending or set(),
            connector_output.finished_recving or set(),
            reports if isinstance(reports, RankReports) else None,
        )

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Publish the request's handoff, if another engine will load its prompt."""
        params = self.scheduler_side.request_finished(request, block_ids)
        return params is not None, params

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Likewise for one KV cache group: MultiConnector calls this if another of its connectors knows one group only."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """End all handoffs: vLLM resets its caches, because the weights have changed. Return False if it has failed to."""
        return self.scheduler_side.reset()

    def has_pending_push_work(self) -> bool:
        """True while a step is needed without any request."""
        return self._scheduler_side is not None and self._scheduler_side.needs_steps()

    # ---- statistics --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> HandoffStats | None:
        """Return what this side has counted since the last step; None if nothing has happened."""
        if self._is_scheduler:
            counts = self.scheduler_side.take_counts(ranks_have_counted=self._ranks_have_counted)
            self._ranks_have_counted, stats = False, stats_of_scheduler(counts)
        else:
            stats = stats_of_rank(self.worker_side.take_counts())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HandoffStats:
        """Return the counts that a dict holds."""
        return HandoffStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> HandoffMetrics:
        """Return the Prometheus metrics of the counts."""
        return HandoffMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker side, a step -----------------------------------------------------------------------------------------

    @property
    def worker_side(self) -> WorkerSide:
        """The worker side, once the KV caches are registered."""
        assert self._worker_side is not None, "vLLM registers the KV caches before any step"
        return self._worker_side

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step: cancelled handoffs lose their seals."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.begin_step(self._orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads in the background."""
        self.worker_side.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before their requests run."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: readers come for the blocks."""

    def wait_for_save(self) -> None:
        """Seal the prompts that this step has completed, after their KV is written."""
        orders = self._orders
        if orders.seals:
            self.worker_side.seal(orders, kv_written(next(iter(self._kv_caches.values())).device))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the request ids of ended transfers."""
        report = self._step_report = self.worker_side.end_step()
        return KVConnectorTransferResults(
            finished_sending=report.finished_sending,
            finished_recving=report.finished_recving,
            failed_recving=report.failed_recving,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that must be computed again."""
        return self._step_report.invalid_block_ids

    def build_connector_worker_meta(self) -> Any:
        """Return the news of the quarantine."""
        return self.worker_side.take_news()

    @property
    def _orders(self) -> RankOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, RankOrders)
        return orders


def _log_as_vllm_does() -> None:
    """Write our log lines where vLLM writes its own: it configures its own logger only."""
    theirs = logging.getLogger("vllm")
    for name in _OURS:
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.level)
