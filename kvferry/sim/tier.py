"""A tier connector under virtual time, and the connector that combines it with p2p.

Scheduler side, worker side, mover and the multi connector are the real ones; the mover's thread is ``kvferry.sim.tier_thread``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from connectors.multi.scheduler import MultiConnectorScheduler
from connectors.multi.worker import multi_connector_worker
from connectors.pool_access import HostPoolAccess
from connectors.tier.messages import Report, TierConnectorMetadata
from connectors.tier.scheduler import ANSWER_LASTS_S, TierConnectorScheduler, TierSettings
from connectors.tier.transfer import TierTransfer
from connectors.tier.worker import TierConnectorWorker
from core.connector import KVConnectorScheduler, KVConnectorWorker
from core.kv.pool_region import KVPoolRegion
from core.wire.kv import KVLayoutInfo
from kvferry.sim.connector import SimConnector
from kvferry.sim.host import Host
from kvferry.sim.step_loads import StepLoads
from kvferry.sim.store import SimEmbeddedStore, SimStoreClientBase
from kvferry.sim.tier_plan import TierPlan
from kvferry.sim.tier_thread import SimTierThread


class TierWatch(Protocol):
    """Sees every access of a tier to the pool."""

    def on_conversion(self, block_id: int) -> None:
        """A block will be filled."""

    def on_saving(self, block_id: int) -> None:
        """A block is being read to be stored."""


class _WatchedPool(HostPoolAccess):
    """Reports the blocks that are read and written, also by a store that reads them later."""

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
        """Report a copy from the pool."""
        address = np.frombuffer(source, np.uint8).ctypes.data
        block_id, offset = divmod(address - self._pool.base_address, self._pool.block_bytes)
        assert offset == 0, "whole blocks are stored"
        self._watch.on_saving(block_id)


class SimTier:
    """The connector of one worker's tier."""

    def __init__(self, host: Host, plan: TierPlan, layout: KVLayoutInfo, store: SimStoreClientBase) -> None:
        settings = TierSettings(name=plan.name, is_lazy=plan.is_lazy)
        self.store = store
        self._thread: SimTierThread[TierConnectorMetadata, Report] = SimTierThread(host, self._wake)
        self.scheduler = TierConnectorScheduler(settings, layout, host.process.clock, lambda: store, self._thread.watch)
        self.worker = TierConnectorWorker(plan.name, self._thread.submit)
        self.is_lazy = plan.is_lazy
        self._host = host

    def start(self, watch: TierWatch) -> None:
        """Start to save and to load."""
        pool = self.worker.pool
        assert pool is not None, "register_kv_caches comes before start"
        assert pool.seals is not None
        access = _WatchedPool(pool, watch)
        self.store.watch = access
        self.store.on_progress = self._thread.plan_turn
        clock = self._host.process.clock
        self.mover = TierTransfer(self.scheduler._settings.name, self.store, access, pool.seals, pool.block_bytes, clock)
        self._thread.start(self.mover, self.worker.report)

    @property
    def has_unread_answer(self) -> bool:
        """True if an answer has arrived that the engine does not know yet."""
        return self._thread.has_news

    @property
    def has_old_answer(self) -> bool:
        """True if the next step asks again for a waiting request; while the answer is open, other requests may overtake it."""
        now = self._host.process.clock.now()
        used = (question.used_at for question in self.scheduler._questions.values())
        return any(used_at is not None and now - used_at > ANSWER_LASTS_S for used_at in used)

    def saving_block_ids(self) -> list[int]:
        """Return the blocks that are kept until they are copied."""
        planner = self.scheduler._planner
        return list(planner._pinned) if planner is not None else []

    def corrupt(self) -> bool:
        """Change a bit of a stored block; False if there is none."""
        return isinstance(self.store, SimEmbeddedStore) and self.store.corrupt()

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""
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
        """Count events that not every run has."""
        happened = Counter({f"tier_{name}": count for name, count in self.mover.counts.items()})
        statistics = self.store.statistics()
        happened.update({f"tier_rejected_{code}": count for code, count in statistics.rejected.items()})
        happened["tier_timeouts"] += statistics.timeouts
        happened["tier_refused_puts"] += statistics.refused_puts
        happened["tier_restarts_noticed"] += statistics.restarts_noticed
        return happened

    def _wake(self) -> None:
        self.worker.wake()


def scheduler_side(parts: Sequence[SimConnector | SimTier | StepLoads]) -> KVConnectorScheduler | None:
    """Return the scheduler side of all, of one, or none. They are asked in this order."""
    sides: Sequence[KVConnectorScheduler] = [part.scheduler for part in parts]
    return MultiConnectorScheduler(sides) if len(sides) > 1 else next(iter(sides), None)


def worker_side(parts: Sequence[SimConnector | SimTier | StepLoads]) -> KVConnectorWorker | None:
    """Return the worker side of all, of one, or none."""
    sides: Sequence[KVConnectorWorker] = [part.worker for part in parts]
    return multi_connector_worker(sides) if len(sides) > 1 else next(iter(sides), None)
