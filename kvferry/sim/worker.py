"""One incarnation of a simulated worker: real protocol, handler, engine, scheduler and connector around a ``HashModel``.

Owns the parts of such a worker; ``kvferry.sim.worker_protocol`` talks to its routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
from prometheus_client import CollectorRegistry

from connectors.p2p.producer.handshake import WorkerIdentity
from core.config import KVFerryConfig
from core.constants import HASH_BLOCK_SIZE
from core.digest import BlockDigester
from core.engine.core import EngineCore
from core.engine.kv_sizing import max_in_flight_tokens
from core.ids import SeededIds, new_incarnation
from core.kv.content_feed import ContentFeed, pool_parts
from core.kv.hashing import BlockHasher
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.sched.encoder_inputs import EncoderInputs
from core.sched.scheduler import Scheduler
from core.testing.hash_encoder import HashEncoder
from core.testing.hash_model import HashModel, hash_model_kv_config, hash_model_layout, hash_model_region
from core.wire.early import MeetProducer, PrefillProgress
from core.wire.kv import KVHandoff
from core.wire.messages import Generate, PrefillDone, Register, RouterMessage
from core.worker.actions import AdmissionLimits, EngineLoad, Send
from core.worker.registration import may_read_early
from core.worker.role import EngineFacts, RoleHandler
from core.worker.state import WorkerState
from core.worker.switchable import SwitchableHandler
from decode.role import DecodeHandler
from kvferry.sim.checks import WorkerChecks
from kvferry.sim.connector import SimConnector
from kvferry.sim.ec import Embeddings
from kvferry.sim.engine import SimEngine
from kvferry.sim.host import Host
from kvferry.sim.image_plan import ImagePlan
from kvferry.sim.images import SimImages, draw_decode_s
from kvferry.sim.late_hash_model import LateHashModel
from kvferry.sim.open_embeddings import open_embeddings
from kvferry.sim.plan import MODEL, ClusterPlan, WorkerPlan
from kvferry.sim.squeeze import SqueezedManager
from kvferry.sim.step_loads import StepLoads
from kvferry.sim.stores import SimStores
from kvferry.sim.tier import SimTier, scheduler_side, worker_side
from kvferry.sim.timing_checks import TimingChecks
from kvferry.sim.worker_protocol import FINGERPRINT, SimWorkerProtocol
from prefill.role import PrefillHandler

_SLOW_STEP_RATE = 0.1  # share of steps that take as long as they may


class SimWorker(SimWorkerProtocol):
    """A worker from its start to its end. ``checks`` sees everything that could break an invariant."""

    engine: SimEngine

    def __init__(
        self,
        host: Host,
        plan: ClusterPlan,
        spec: WorkerPlan,
        ids_seed: int,
        checks: WorkerChecks,
        stores: SimStores,
    ) -> None:
        super().__init__(host)
        self.spec = spec
        self.checks = checks
        self._complain = checks.complain
        self._random = Random(ids_seed)
        self._absent_files = plan.images.absent if plan.images is not None else frozenset()
        self._layout = hash_model_layout(spec.block_size, len(plan.attentions), spec.kv_dtype)
        ids = SeededIds(ids_seed)
        self.incarnation = new_incarnation(ids)
        config = plan.config
        has_connector = spec.role != "aggregated" or spec.can_switch_role or config.connector.peer_prefixes
        self.connector = self._make_connector(config, ids) if has_connector else None
        self.tier = stores.open_tier(host, self._layout, ids_seed)
        self.embeddings = self._make_embeddings(plan, ids_seed, stores)
        self._connectors = self._list_connectors(plan, ids_seed)
        self._connector_worker = worker_side(self._connectors)
        self.images = self._make_images(plan.images)
        self.model = self._make_model(plan)
        core = self._make_engine(plan)
        self.engine = SimEngine(host.process, core, self._put_outputs, self._draw_step_s, checks, host.log)
        self._times = TimingChecks(spec.engine_id, host.process.clock, checks.complain)
        checks.attach(core.scheduler, self.model, self._times, self.tier, self.connector)
        if self._connector_worker is not None:
            self._connector_worker.set_wakeup(self.engine.wake)
        if self.connector is not None:
            self.connector.start(checks, self._times, plan.max_rows_per_read)
        if self.tier is not None:
            self.tier.start(checks)
        if self.images is not None:
            self.images.start(self.engine.wake)
        if self.embeddings is not None:
            self.embeddings.worker.set_wakeup(self.engine.wake)
            self.embeddings.start(checks.complain, plan.max_rows_per_read)
        self.handler = self._make_handler()
        self.state = self._make_state(plan, core.scheduler.max_model_len)
        self._join(config.worker.router_addresses)

    def leftovers(self) -> list[str]:
        """Return the remains of requests that have all ended."""
        stats = self.engine.core.stats
        left = {
            "requests in the protocol": self.state.num_requests,
            "loading blocks on the gauge": stats.num_loading_blocks,
            "parked blocks on the gauge": stats.num_parked_blocks,
            "quarantined blocks on the gauge": stats.num_quarantined_blocks,
            "early blocks on the gauge": stats.num_early_blocks,
            "unexpected reports": stats.num_ignored_reports,
        }
        if self.connector is not None:
            left |= self.connector.leftovers()
        if self.tier is not None:
            left |= self.tier.leftovers()
        if self.embeddings is not None:
            left |= self.embeddings.leftovers()
        if self.images is not None:
            left["images to decode"] = self.images.num_images
        found = [f"{self.spec.engine_id}: {count} {what} left" for what, count in left.items() if count]
        return found + self.checks.leftovers()

    def count_what_happened(self) -> dict[str, int]:
        """Count events that not every run has."""
        stats = self.engine.core.stats
        happened = {
            "preemptions": stats.num_preemptions,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "early_loads": stats.num_early_rounds,
            "early_evictions": stats.num_early_given_way,
            "embedded_images": stats.num_encoder_computed,
            "known_images": stats.num_encoder_hits,
            "decoded_images": len(self.images.prepared) if self.images is not None else 0,
            "waiting_for_embeddings": stats.num_encoder_deferrals,
            "quarantined_blocks": self.checks.num_quarantined,
            "kept_steps": self.engine.num_kept_steps,
            "pinned_blocks": self.checks.num_pinned,
            "compared_times": self._times.num_compared,
        }
        for part in (*self._connectors, self.embeddings):
            happened |= part.count_what_happened() if part is not None else {}
        return happened

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _identity(self) -> WorkerIdentity:
        return WorkerIdentity(
            engine_id=self.spec.engine_id,
            incarnation=self.incarnation,
            model_fingerprint=FINGERPRINT,
            layout=self._layout,
            host_id=self.spec.host,
        )

    def _make_connector(self, config: KVFerryConfig, ids: SeededIds) -> SimConnector:
        is_read = self.spec.role == "prefill" or self.spec.can_switch_role or config.connector.peer_prefixes
        address = self.spec.control_address if is_read else ""
        return SimConnector(self.host, self._identity(), config.connector, ids, address)

    def _list_connectors(self, plan: ClusterPlan, seed: int) -> list[SimConnector | SimTier | StepLoads]:
        """Return the connectors of KV in the order in which they are asked."""
        found: list[SimConnector | SimTier | StepLoads] = [part for part in (self.connector, self.tier) if part is not None]
        if plan.step_loads is None:
            return found
        loads = StepLoads(self.host, plan.step_loads, plan.attentions, self.spec.block_size, seed)
        return [loads, *found] if plan.step_loads.is_first else [*found, loads]

    def _make_embeddings(self, plan: ClusterPlan, seed: int, stores: SimStores) -> Embeddings | None:
        if plan.images is None or not plan.images.connector:
            return None
        ids = SeededIds(Random(f"{seed}/embeddings").getrandbits(63))
        return open_embeddings(self.host, self._identity(), plan, self.spec, ids, stores)

    def _make_model(self, plan: ClusterPlan) -> HashModel:
        num_blocks, block_size = self.spec.num_blocks, self.spec.block_size
        digester = BlockDigester(self._layout.block_bytes) if plan.makes_digests else None
        digest, num_groups = digester.digest if digester is not None else None, len(plan.attentions)
        memory = hash_model_region(num_blocks, block_size, self.incarnation, digest, num_groups, self.spec.kv_dtype)
        take = self.images.take if self.images is not None else None
        encoder = HashEncoder(self.embeddings.worker if self.embeddings is not None else None, take)
        kind = LateHashModel if plan.async_scheduling else HashModel
        return kind(num_blocks, block_size, self._connector_worker, region=memory, attentions=plan.attentions, encoder=encoder)

    def _make_images(self, images: ImagePlan | None) -> SimImages | None:
        if images is None or not images.decode_s:
            return None
        return SimImages(self.host.process, images.decoded_embeds, draw_decode_s(images.decode_s, self.incarnation))

    def _make_engine(self, plan: ClusterPlan) -> EngineCore:
        config, images = plan.config, plan.images
        kv_config = hash_model_kv_config(self.spec.num_blocks, self.spec.block_size, self.model.attentions)
        self.contents = ContentFeed(self.spec.engine_id, self.incarnation, pool_parts(kv_config.groups))
        self.manager = SqueezedManager(
            kv_config,
            plan.max_model_len,
            scheduler_block_size=self.spec.block_size,
            hash_block_size=HASH_BLOCK_SIZE,
            max_in_flight_tokens=max_in_flight_tokens(config.scheduler),
            enable_caching=config.cache.enable_prefix_caching,
            enable_kv_cache_events=config.cache.enable_prefix_caching,
            watermark=config.cache.watermark,
            seals=self.model.seals,
        )
        connector = scheduler_side(self._connectors)
        encoder: EncoderInputs | None = None
        if images is not None:
            ec_connector = self.embeddings.scheduler if self.embeddings is not None else None
            encoder = EncoderInputs(images.cache_size, images.max_embeds_per_step, ec_connector, self.images)
        clock = self.host.process.clock
        scheduler = Scheduler(config.scheduler, self.manager, plan.max_model_len, connector, clock, encoder=encoder)
        hasher = BlockHasher(FINGERPRINT, HASH_BLOCK_SIZE)
        return EngineCore(scheduler, self.model, hasher, self.model.vocab_size, [self.contents])

    def _make_handler(self) -> RoleHandler:
        facts = EngineFacts(max_model_len=self.engine.core.scheduler.max_model_len, eos_token_ids=frozenset())
        if self.spec.can_switch_role:
            return SwitchableHandler(PrefillHandler(facts), DecodeHandler(facts))
        return PrefillHandler(facts) if self.spec.role == "prefill" else DecodeHandler(facts)

    def _make_state(self, plan: ClusterPlan, max_model_len: int) -> WorkerState:
        config, images = plan.config, plan.images
        reads_early = may_read_early(self.spec.role, config, can_switch_role=self.spec.can_switch_role)
        registration = Register(
            engine_id=self.spec.engine_id,
            incarnation=self.incarnation,
            role=self.spec.role,
            model=MODEL,
            model_fingerprint=FINGERPRINT,
            layout=self._layout,
            max_model_len=max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_blocks=self.spec.num_blocks,
            max_num_choices=config.scheduler.max_num_seqs + config.worker.max_waiting_requests,
            connector=config.connector.name if self.connector is not None else "",
            transports=self.connector.transports if self.connector is not None else (),
            ec_connector=images.connector if images is not None else "",
            host_id=self.spec.host,
            is_supervised=plan.is_supervised,
            kv_verify=config.connector.kv_verify,
            has_digests=self.model.seals.has_digests,
            has_fair_shares=True,
            content_parts=self.contents.parts,
            prefix_address=self.spec.control_address if self.connector is not None and config.connector.peer_prefixes else "",
            can_switch_role=self.spec.can_switch_role,
            home_role=self.spec.role,
            reads_early=reads_early and self.connector is not None,
            control_address=self.spec.control_address if self.connector is not None else "",
            meets_producers=self.connector is not None,
        )
        limits = AdmissionLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_waiting_requests=config.worker.max_waiting_requests,
            drain_timeout_s=config.worker.drain_timeout_s,
        )
        metrics = WorkerMetrics(CollectorRegistry(), {})
        return WorkerState(registration, self.handler, limits, self._load, metrics, self.contents)

    # ---- its outputs ------------------------------------------------------------------------------------------------

    def _put_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self._times.on_outputs(outputs)
        super()._put_outputs(outputs)

    def _send(self, action: Send) -> None:
        if isinstance(action.message, PrefillProgress):
            self.host.world.on_progress(self.spec.engine_id, action.message.request_id)
        loads_prefixes = self.connector is not None and self.connector.scheduler.pulls is not None
        if isinstance(action.message, PrefillDone) and self.tier is None and not loads_prefixes:
            self._times.on_prefill_done(action.message)
        super()._send(action)

    # ---- details -----------------------------------------------------------------------------------------------------

    def _load(self) -> EngineLoad:
        stats = self.engine.core.stats
        return EngineLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting + stats.num_loading,
            kv_cache_usage=stats.kv_cache_usage,
            num_leased_blocks=self.connector.num_leased_blocks() if self.connector is not None else 0,
            longest_lease_s=self.connector.longest_lease_s() if self.connector is not None else 0.0,
            progress=self.engine.reading(),
        )

    def _draw_step_s(self) -> float:
        self.host.troubles.note_step(self.spec.engine_id)
        longest = self.spec.step_s
        return longest if self._random.random() < _SLOW_STEP_RATE else self._random.uniform(0.1, 0.6) * longest

    def _expect(self, handoff: KVHandoff) -> None:
        if self.connector is not None:
            self.connector.expect(handoff)

    def _meet(self, producer: MeetProducer) -> None:
        if self.connector is not None:
            self.connector.meet(producer)

    def _release(self, transfer_ids: Sequence[str]) -> None:
        if self.connector is not None:
            self.connector.release(transfer_ids)

    def _as_received(self, message: RouterMessage) -> RouterMessage:
        """Return a prompt without the files that only encode workers get."""
        if not self._absent_files or not isinstance(message, Generate):
            return message
        files = tuple(b"" if content in self._absent_files else content for content in message.media)
        return msgspec.structs.replace(message, media=files)

    def _renew(self, transfer_ids: Sequence[str]) -> None:
        if self.connector is not None:
            self.connector.renew(transfer_ids)
