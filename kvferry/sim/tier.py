"""A tier connector under virtual time, and what makes it and p2p one connector.

Scheduler side, worker side, mover and the multi connector are the real ones; the mover's thread (``connectors.tier.thread``) is
a queue of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from connectors.multi.scheduler import MultiConnectorScheduler
from connectors.multi.worker import multi_connector_worker
from connectors.pool_access import HostPoolAccess
from connectors.tier.jobs import TierConnectorMetadata
from connectors.tier.mover import TierMover
from connectors.tier.scheduler import TierConnectorScheduler, TierSettings
from connectors.tier.worker import TierConnectorWorker
from core.connector import KVConnectorScheduler, KVConnectorWorker, KVPoolRegion
from core.testing.sim_loop import Queue
from core.wire.kv import KVLayoutInfo
from kvferry.sim.connector import SimConnector
from kvferry.sim.host import Host
from kvferry.sim.store import SimEmbeddedStore, SimStoreFront
from kvferry.sim.tier_plan import TierPlan
from kvstore.base import LookupTicket

POLL_S = 0.005  # of the thread while it waits; the real one looks more often


class TierWatch(Protocol):
    """Sees every access of a tier to the pool."""

    def on_conversion(self, block_id: int) -> None:
        """A block is going to be filled."""

    def on_saving(self, block_id: int) -> None:
        """A block is being read to be stored."""


class _WatchedPool(HostPoolAccess):
    """Tells which blocks are read and written, also by a store that reads them later."""

    def __init__(self, pool: KVPoolRegion, watch: TierWatch) -> None:
        assert pool.buffer is not None
        super().__init__(pool.buffer, pool.block_bytes)
        self._pool = pool
        self._watch = watch

    def write(self, block_id: int, fill: Callable[[memoryview], None]) -> None:
        """Fill the block itself, if it may be."""
        self._watch.on_conversion(block_id)
        super().write(block_id, fill)

    def on_copy(self, source: memoryview) -> None:
        """Tell of a copy out of the pool."""
        address = np.frombuffer(source, np.uint8).ctypes.data
        block_id, offset = divmod(address - self._pool.base_address, self._pool.block_bytes)
        assert offset == 0, "whole blocks are stored"
        self._watch.on_saving(block_id)


class SimTier:
    """The connector of one worker's tier."""

    def __init__(self, host: Host, plan: TierPlan, layout: KVLayoutInfo, store: SimStoreFront) -> None:
        settings = TierSettings(name=plan.name, is_lazy=plan.is_lazy)
        self.store = store
        self.scheduler = TierConnectorScheduler(settings, layout, host.process.clock, lambda: store, self._watch_ticket)
        self.worker = TierConnectorWorker(plan.name, self._submit)
        self.is_lazy = plan.is_lazy
        self._host = host
        self._watched: list[LookupTicket] = []
        self._to_thread = Queue(host.process, host.loop, host.thread_delay_s)
        self._is_turn_planned = False
        self._is_poll_planned = False

    def start(self, watch: TierWatch) -> None:
        """Be ready to save and to load."""
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        assert pool.seals is not None
        access = _WatchedPool(pool, watch)
        self.store.watch = access
        self.store.on_progress = self._plan_turn
        clock = self._host.process.clock
        self.mover = TierMover(self.scheduler._settings.name, self.store, access, pool.seals, pool.block_bytes, clock)

    @property
    def has_news_for_engine(self) -> bool:
        """True if an answer is there of which the engine has not heard yet."""
        return any(ticket.is_done for ticket in self._watched)

    def saving_block_ids(self) -> list[int]:
        """Return the blocks that are kept until they are copied."""
        planner = self.scheduler._planner
        return list(planner._pinned) if planner is not None else []

    def corrupt(self) -> bool:
        """Change a bit of a stored block; False if there is none."""
        return isinstance(self.store, SimEmbeddedStore) and self.store.corrupt()

    def leftovers(self) -> dict[str, int]:
        """Count what must be gone once every request has ended."""
        scheduler = self.scheduler
        return {
            "blocks being saved": scheduler.num_saving_blocks,
            "questions to the tier": len(scheduler._questions),
            "loads from the tier": len(scheduler._loading) + len(scheduler._loading_keys),
            "requests that the tier knows": len(scheduler._requests),
            "loads of the mover": len(self.mover._loads),
            "saves of the mover": len(self.mover._saves),
        } | self.store.leftovers()

    def count_what_happened(self) -> Counter[str]:
        """Count what need not happen in a run."""
        happened = Counter({f"tier_{name}": count for name, count in self.mover.counts.items()})
        happened.update({f"tier_rejected_{code}": count for code, count in self.store.client.rejected.items()})
        statistics = self.store.statistics()
        happened["tier_timeouts"] += statistics.timeouts
        happened["tier_refused_puts"] += statistics.refused_puts
        happened["tier_restarts_noticed"] += statistics.restarts_noticed
        return happened

    # ---- the mover's thread ------------------------------------------------------------------------------------------

    def _submit(self, metadata: TierConnectorMetadata) -> None:
        def take() -> None:
            self._host.log("moves", metadata)
            self.mover.submit(metadata)
            self._turn()

        self._to_thread.put(take)

    def _watch_ticket(self, ticket: LookupTicket) -> None:
        self._watched.append(ticket)
        self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._is_turn_planned:
            self._is_turn_planned = True
            self._to_thread.put(self._turn_as_planned)

    def _turn_as_planned(self) -> None:
        self._is_turn_planned = False
        self._turn()

    def _turn(self) -> None:
        has_progress = self.mover.step()
        for report in self.mover.take_reports():
            self._host.log("reports", report)
            self.worker.report(report)
        if self.has_news_for_engine:
            self._watched = [ticket for ticket in self._watched if not ticket.is_done]
            self.worker.wake()
        if has_progress:
            self._plan_turn()
        elif self.mover.is_waiting and not self._is_poll_planned:
            self._is_poll_planned = True
            self._host.process.call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        """Look again, as the thread does while something is open: retries and deadlines come by time alone."""
        self._is_poll_planned = False
        self._plan_turn()


def scheduler_side(p2p: SimConnector | None, tier: SimTier | None) -> KVConnectorScheduler | None:
    """Return the scheduler side of both, of one, or none."""
    sides: Sequence[KVConnectorScheduler] = [part.scheduler for part in (p2p, tier) if part is not None]
    return MultiConnectorScheduler(sides) if len(sides) > 1 else next(iter(sides), None)


def worker_side(p2p: SimConnector | None, tier: SimTier | None) -> KVConnectorWorker | None:
    """Return the worker side of both, of one, or none."""
    sides: Sequence[KVConnectorWorker] = [part.worker for part in (p2p, tier) if part is not None]
    return multi_connector_worker(sides) if len(sides) > 1 else next(iter(sides), None)
