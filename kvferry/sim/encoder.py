"""One incarnation of a simulated encode worker: real protocol, handler, engine and EC connector, with a fake encoder.

Owns the parts of such a worker and its engine thread, as events; ``kvferry.sim.worker_protocol`` talks to its routers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from prometheus_client import CollectorRegistry

from connectors.p2p.producer.handshake import WorkerIdentity
from core.engine.media.image_decode_thread import ImageDecodeThread
from core.engine.step_watch import StepSize
from core.errors import Full
from core.ids import SeededIds, new_incarnation
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.testing.hash_encoder import HashImageEncoder
from core.testing.hash_model import hash_model_layout
from core.wire.media import ECSource
from core.wire.messages import RegisterEncoder
from core.worker.actions import AdmissionLimits, EngineLoad
from core.worker.state import WorkerState
from encode.engine import EncodeEngine
from encode.metrics import EncodeMetrics
from encode.role import EncodeHandler
from kvferry.sim.engine import TURN_S, EngineTurns
from kvferry.sim.host import Host
from kvferry.sim.image_plan import ImagePlan
from kvferry.sim.images import SimPixels, draw_decode_s
from kvferry.sim.loop import Process
from kvferry.sim.open_embeddings import open_embeddings
from kvferry.sim.plan import MODEL, ClusterPlan, WorkerPlan
from kvferry.sim.stores import SimStores
from kvferry.sim.worker_protocol import FINGERPRINT, SimWorkerProtocol

_MAX_BATCH_IMAGES = 2


class _EngineThread(EngineTurns):
    """The loop of ``core.engine.thread`` as events. ``step_s`` draws a step's duration; its result is applied at its end."""

    def __init__(
        self,
        process: Process,
        engine: EncodeEngine,
        on_outputs: Callable[[list[EngineCoreOutput]], None],
        step_s: Callable[[], float],
        on_sleep: Callable[[], None],
    ) -> None:
        super().__init__(process)
        self.core = engine
        self._on_sleep = on_sleep
        self._on_outputs = on_outputs
        self._step_s = step_s

    def _turn(self) -> None:
        outputs = self._take_inbox(self.core)
        if outputs:
            self._on_outputs(outputs)
        self._step_watch.begin_step(self._now())
        has_images = bool(self.core._queue)
        self._call_later(self._step_s() if has_images else TURN_S, self._step)

    def _step(self) -> None:
        outputs = self.core.step() if self.core.has_work() else []
        self._step_watch.end_step(self._now())
        if outputs:
            self._on_outputs(outputs)
        self._is_awake = self.core.has_work() or bool(self._inbox)
        if self._is_awake:
            self._call_later(0.0, self._turn)
        else:
            self._step_watch.rest()
            self._on_sleep()

    def _step_size(self) -> StepSize:
        return self.core.step_size


class SimEncoder(SimWorkerProtocol):
    """An encode worker from its start to its end."""

    engine: _EngineThread

    def __init__(
        self,
        host: Host,
        plan: ClusterPlan,
        spec: WorkerPlan,
        ids_seed: int,
        complain: Callable[[str], None],
        stores: SimStores,
    ) -> None:
        super().__init__(host)
        assert plan.images is not None, "there are images to embed"
        self.spec = spec
        self._random = Random(ids_seed)
        ids = SeededIds(ids_seed)
        identity = WorkerIdentity(
            engine_id=spec.engine_id,
            incarnation=new_incarnation(ids),
            model_fingerprint=FINGERPRINT,
            layout=hash_model_layout(spec.block_size),
            host_id=spec.host,
        )
        self.embeddings = open_embeddings(host, identity, plan, spec, ids, stores)
        encoder = HashImageEncoder(plan.images.all_images)
        self.images = self._make_images(plan.images, identity.incarnation, encoder)
        core = EncodeEngine(
            encoder,
            self.embeddings.worker,
            self.images if self.images is not None else ImageDecodeThread(encoder),
            EncodeMetrics(CollectorRegistry()),
            host.process.clock,
            max_batch_images=_MAX_BATCH_IMAGES,
        )
        self._complain = complain
        self._num_without_room = 0
        self.engine = _EngineThread(host.process, core, self._count_and_put_outputs, self._draw_step_s, self._check_sleep)
        if self.images is not None:
            self.images.start(self.engine.wake)
        self.embeddings.worker.set_wakeup(self.engine.wake)
        self.embeddings.start(complain, plan.max_rows_per_read)
        worker = plan.config.worker
        registration = RegisterEncoder(
            engine_id=spec.engine_id,
            incarnation=identity.incarnation,
            model=MODEL,
            model_fingerprint=FINGERPRINT,
            ec_connector=plan.images.connector,
            max_num_images=_MAX_BATCH_IMAGES + worker.max_waiting_requests,
            host_id=spec.host,
        )
        limits = AdmissionLimits(
            max_num_seqs=_MAX_BATCH_IMAGES,
            max_waiting_requests=worker.max_waiting_requests,
            drain_timeout_s=worker.drain_timeout_s,
        )
        self.state = WorkerState(registration, EncodeHandler(), limits, self._load, WorkerMetrics(CollectorRegistry(), {}))
        self._join(worker.router_addresses)

    def leftovers(self) -> list[str]:
        """Return the remains of requests that have all ended."""
        left = self.embeddings.leftovers() | {
            "requests in the protocol": self.state.num_requests,
            "images to embed": len(self.engine.core._images),
            "images to decode": self.images.num_images if self.images is not None else 0,
        }
        return [f"{self.spec.engine_id}: {count} {what} left" for what, count in left.items() if count]

    def count_what_happened(self) -> dict[str, int]:
        """Count events that not every run has."""
        num_decoded = len(self.images.prepared) if self.images is not None else 0
        happened = {
            "encode_steps": self.engine.core.stats.num_steps,
            "images_decoded_to_share": num_decoded,
            "images_without_room": self._num_without_room,
        }
        return happened | self.embeddings.count_what_happened()

    def _count_and_put_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self._num_without_room += sum(output.error is not None and output.error.code == Full.code for output in outputs)
        self._put_outputs(outputs)

    def _make_images(self, plan: ImagePlan, incarnation: int, encoder: HashImageEncoder) -> SimPixels | None:
        if not plan.decode_s:
            return None
        return SimPixels(self.host.process, plan.decoded_embeds, draw_decode_s(plan.decode_s, incarnation), encoder)

    def _check_sleep(self) -> None:
        """While the engine sleeps, something must be about to wake it for the queued images."""
        if self.engine.core._queue and (self.images is None or self.images.is_idle):
            self._complain(f"{self.spec.engine_id} sleeps with images that are not being decoded")

    def _release_embeddings(self, sources: Sequence[ECSource]) -> None:
        self.embeddings.release_sources(sources)

    def _load(self) -> EngineLoad:
        stats = self.engine.core.stats
        return EngineLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_leased_blocks=self.embeddings.num_leased_blocks(),
            longest_lease_s=self.embeddings.longest_lease_s(),
            progress=self.engine.reading(),
        )

    def _draw_step_s(self) -> float:
        return self._random.uniform(0.1, 1.0) * self.spec.step_s
