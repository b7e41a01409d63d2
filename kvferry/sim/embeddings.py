"""The p2p EC connector under virtual time: its real parts around a simulated agent, for a pool of embeddings.

Takes the place of ``connectors.ec.p2p``: scheduler side, worker side, offers and memory are the real ones. A watch sees every
chunk that a transfer writes: it must be one that is being filled, or in quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from connectors.ec import p2p_adapter as handoff
from connectors.ec.chunks import ChunkLayout
from connectors.ec.jobs import FetchingMetadata, PeerSource
from connectors.ec.memory import ChunkMemory
from connectors.ec.produced_embeddings import OfferTerms, ProducedEmbeddings, pass_report
from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.worker import FetchingWorker
from connectors.p2p.actions import LeaseGrant, Report
from connectors.p2p.producer.handshake import WorkerIdentity
from core.config_workers import ConnectorSection
from core.ids import IdSource
from core.testing.hash_encoder import HASH_EMBEDDINGS
from core.wire.media import ECSource, MMFeature
from kvferry.sim.driver import SimDriver
from kvferry.sim.ec import SimWakeupTimer, check_layout, leftovers_of_reader, to_bytes, to_rows, why_not_written
from kvferry.sim.host import Host
from kvferry.sim.image_plan import ImagePlan

_RENEWALS_PER_LEASE = 4


class SimEmbeddings(SimDriver):
    """Producer on encode workers, consumer on all others. ``config`` is the KV connector's, for the common settings."""

    def __init__(
        self, host: Host, identity: WorkerIdentity, plan: ImagePlan, config: ConnectorSection, ids: IdSource, address: str
    ) -> None:
        layout = ChunkLayout(HASH_EMBEDDINGS, identity.model_fingerprint)
        is_encoder = bool(address)
        num_chunks = plan.num_encoder_chunks if is_encoder else plan.num_reader_chunks
        own_identity = WorkerIdentity(
            engine_id=identity.engine_id,
            incarnation=identity.incarnation,
            model_fingerprint=identity.model_fingerprint,
            layout=layout.as_blocks,
            host_id=identity.host_id,
        )
        super().__init__(host, own_identity, _section(plan, config), ids, address)
        self.scheduler = FetchingScheduler(
            handoff.NAME, host.process.clock, plan.deadline_s, self._locate, is_consumer=not is_encoder
        )
        self.worker = FetchingWorker(to_bytes, to_rows, check_layout)
        self._layout = layout
        self._memory = ChunkMemory(layout, num_chunks * layout.chunk_bytes, identity.incarnation)
        self._memory.close()  # only the files; simulated transports copy the memory itself
        self.scheduler.bind(layout, num_chunks)
        self._offers: ProducedEmbeddings | None = None
        if is_encoder:
            terms = OfferTerms(
                engine_id=identity.engine_id, incarnation=identity.incarnation, lease_ms=int(1000 * plan.lease_s)
            )
            self._offers = ProducedEmbeddings(self._memory, terms, ids, self._lease)
            self._offers.control_address = address
        self.worker.bind(self._memory.rows, self._submit, self._offers)
        self._alarm = SimWakeupTimer(host.process, self.worker.wake)
        self._num_to_flip = 0
        self._num_flipped = 0

    def start(self, complain: Callable[[str], None], max_rows_per_read: int) -> None:
        """Answer readers and start to read."""
        self._start(self._memory.region, _ChunkWatch(self.scheduler, self._identity.engine_id, complain), max_rows_per_read)

    def corrupt(self) -> None:
        """Change a bit of the embeddings that are promised to a reader next, before it has read them."""
        self._num_to_flip += 1

    def release_sources(self, sources: Sequence[ECSource]) -> None:
        """Release embeddings that will not be read."""
        self.release([handoff.decode_held(source.payload).transfer_id for source in sources])

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""
        left = {f"{what} of embeddings": count for what, count in super().leftovers().items()}
        left["leases of embeddings"] = len(self._offers._leases) if self._offers is not None else 0
        return left | leftovers_of_reader(self.scheduler, self.worker)

    def count_what_happened(self) -> Counter[str]:
        """Count events that not every run has."""
        happened = Counter({f"fetch_{name}": count for name, count in self.scheduler.counts.items()})
        if self._offers is not None:
            happened["refused_offers"] = self._offers.num_refused
            happened["evicted_offers"] = self._offers.num_evicted
            happened["flipped_embeddings"] = self._num_flipped
        return happened

    # ---- events ------------------------------------------------------------------------------------------------------

    def _lease(self, grant: LeaseGrant) -> None:
        """Start a lease; if a change is due, change a bit of the item after its sealing. Each time it is another bit."""
        if self._num_to_flip:
            assert self._offers is not None, "a producer of leases has offers"
            self._num_to_flip -= 1
            first_chunk = self._offers._leases[grant.transfer_id].first_chunk
            self._memory.rows(first_chunk, 1)[0] ^= 1 << self._num_flipped % 8
            self._num_flipped += 1
        self._grant(grant)

    def _locate(self, feature: MMFeature, announced: ECSource | None) -> PeerSource | None:
        return handoff.locate(self._layout, feature, announced)

    def _submit(self, metadata: FetchingMetadata) -> None:
        if metadata.has_orders:
            self._host.from_engine.put(lambda: self._consumer.handle(handoff.as_p2p(metadata)))
        if metadata.wake_at is not None:
            self._alarm.set(metadata.wake_at)

    def _report(self, report: Report) -> None:
        pass_report(report, self.worker, self._offers)


class _ChunkWatch:
    """Sees the writes of transfers into the chunks of a reader."""

    def __init__(self, scheduler: FetchingScheduler, name: str, complain: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._name = name
        self.complain = complain

    def on_post(self, handle: int, region: int, local_rows: Sequence[int]) -> None:
        """Any read may be posted."""

    def on_end(self, handle: int) -> None:
        """Nothing is recorded for a read."""

    def on_conversion(self, block_id: int) -> None:
        """Never called: chunks have one size in the whole cluster."""
        self.complain(f"{self._name}: chunk {block_id} was filled from the staging area")

    def on_landing(self, handle: int, region: int, local_row: int) -> None:
        """Check that the chunk is being filled, or is free."""
        if region or local_row in self._scheduler._chunk_cache._quarantined:
            return
        problem = why_not_written(self._scheduler, local_row)
        if problem:
            self.complain(f"{self._name}: {problem}")


def _section(plan: ImagePlan, config: ConnectorSection) -> ConnectorSection:
    return ConnectorSection(
        transports=config.transports,
        kv_verify="digest",
        transfer_deadline_s=plan.deadline_s,
        handshake_timeout_s=config.handshake_timeout_s,
        lease_s=plan.lease_s,
        lease_renew_interval_s=plan.lease_s / _RENEWALS_PER_LEASE,
        lease_max_s=4 * plan.lease_s,
    )
