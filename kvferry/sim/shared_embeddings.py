"""The EC connector "shared" under virtual time: its real parts, around a client of a simulated store.

Takes the place of ``connectors.ec.store_connector``: scheduler side, worker side, offers, memory and mover are the real ones;
the mover's thread is ``kvferry.sim.tier_thread``. A watch sees every chunk that is filled from the store: it must be one that
is being fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from connectors.ec.chunks import ChunkLayout
from connectors.ec.jobs import FetchingMetadata, StoreSource
from connectors.ec.memory import ChunkMemory
from connectors.ec.mover import NAME, EmbeddingHolder, EmbeddingTransfer, Forgotten, Order, StoreReport
from connectors.ec.scheduler import FetchingScheduler
from connectors.ec.store_offers import StoreOffers, pass_on
from connectors.ec.worker import FetchingWorker
from connectors.p2p.producer.handshake import WorkerIdentity
from core.ids import SeededIds
from core.testing.hash_encoder import HASH_EMBEDDINGS
from core.wire.media import ECSource
from kvferry.sim.ec import SimWakeupTimer, check_layout, leftovers_of_reader, to_bytes, to_rows, why_not_written
from kvferry.sim.host import Host
from kvferry.sim.image_plan import ImagePlan
from kvferry.sim.stores import SharedStore
from kvferry.sim.tier_thread import SimTierThread


class SimSharedEmbeddings:
    """One worker's connector: on encode workers it only puts, on all others it also gets."""

    def __init__(
        self, host: Host, identity: WorkerIdentity, plan: ImagePlan, store: SharedStore, ids: SeededIds, *, is_encoder: bool
    ) -> None:
        layout = ChunkLayout(HASH_EMBEDDINGS, identity.model_fingerprint)
        num_chunks = plan.num_encoder_chunks if is_encoder else plan.num_reader_chunks
        clock = host.process.clock
        self.scheduler = FetchingScheduler(
            NAME, clock, plan.deadline_s, lambda feature, announced: StoreSource(), is_consumer=not is_encoder
        )
        self.worker = FetchingWorker(to_bytes, to_rows, check_layout)
        self._name = identity.engine_id
        self._memory = _WatchedMemory(layout, num_chunks * layout.chunk_bytes, identity.incarnation)
        self._memory.close()  # only the files
        self.scheduler.bind(layout, num_chunks)
        self._store = store.connect(host, layout.chunk_bytes, ids, "-ec")
        self._thread: SimTierThread[Order, StoreReport] = SimTierThread(host, self._wake)
        self._offers = StoreOffers(layout, num_chunks * layout.chunk_bytes, self._thread.submit)
        self.worker.bind(self._memory.rows, self._submit, self._offers)
        holder = EmbeddingHolder(engine_id=identity.engine_id, incarnation=identity.incarnation)
        self._mover = EmbeddingTransfer(self._store, layout, self._memory, holder, clock)
        self._alarm = SimWakeupTimer(host.process, self._wake)
        self._num_forgotten = 0

    def start(self, complain: Callable[[str], None], max_rows_per_read: int) -> None:
        """Start to put and to get."""

        def check(chunk: int) -> None:
            fetched = [identifier for identifier, ours in self._mover._fetches.items() if chunk in ours.fetch.chunks]
            problem = why_not_written(self.scheduler, chunk, *fetched)
            if problem:
                complain(f"{self._name}: {problem}")

        self._memory.on_write = check
        self._store.watch = self
        self._store.on_progress = self._thread.plan_turn
        self._thread.start(self._mover, self._report)

    def on_copy(self, source: memoryview) -> None:
        """Ignored: the store gets a copy of its own."""

    def corrupt(self) -> None:
        """Return without effect: nothing is promised to readers, only the store's bits change."""

    def release_sources(self, sources: Sequence[ECSource]) -> None:
        """Ignored: nothing is held for readers."""

    def num_leased_blocks(self) -> int:
        """Nothing is held for readers."""
        return 0

    def longest_lease_s(self) -> float:
        """Nothing is held for readers."""
        return 0.0

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""
        mover = self._mover
        left = {f"{what} to the store of embeddings": count for what, count in self._store.leftovers().items()}
        return (
            left
            | {
                "bytes of embeddings being saved": self._offers.num_saving_bytes,
                "fetches of the mover": len(mover._fetches),
                "saves of the mover": len(mover._saves),
                "checks of the mover": len(mover._checks),
            }
            | leftovers_of_reader(self.scheduler, self.worker)
        )

    def count_what_happened(self) -> Counter[str]:
        """Count events that not every run has."""
        happened = Counter({f"fetch_{name}": count for name, count in self.scheduler.counts.items()})
        happened.update({f"embeddings_{name}": count for name, count in self._mover.counts.items()})
        statistics = self._store.statistics()
        happened["embeddings_forgotten"] = self._num_forgotten
        happened["embeddings_timeouts"] = statistics.timeouts
        happened["embeddings_restarts_noticed"] = statistics.restarts_noticed
        happened.update({f"embeddings_rejected_{code}": count for code, count in statistics.rejected.items()})
        return happened

    # ---- events ------------------------------------------------------------------------------------------------------

    def _submit(self, metadata: FetchingMetadata) -> None:
        if metadata.has_orders:
            self._thread.submit(metadata)
        if metadata.wake_at is not None:
            self._alarm.set(metadata.wake_at)

    def _report(self, report: StoreReport) -> None:
        self._num_forgotten += isinstance(report, Forgotten)
        pass_on(report, self._offers, self.worker)

    def _wake(self) -> None:
        self.worker.wake()


class _WatchedMemory(ChunkMemory):
    """Reports the chunks that are filled from the store."""

    on_write: Callable[[int], None]

    def chunk(self, index: int) -> memoryview:
        """Return the writable bytes of a chunk."""
        self.on_write(index)
        return super().chunk(index)
