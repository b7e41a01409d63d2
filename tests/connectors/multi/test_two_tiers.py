"""Two tiers at once with the real scheduler: both save the same blocks."""

import pytest

from connectors.multi.connector import MultiConnector
from connectors.multi.scheduler import MultiConnectorScheduler
from connectors.multi.worker import multi_connector_worker
from connectors.pool_access import open_pool
from connectors.tier.connector import TierConnector
from connectors.tier.scheduler import TierConnectorScheduler, TierSettings
from connectors.tier.transfer import TierTransfer
from connectors.tier.worker import TierConnectorWorker
from tests.connectors.tier.conftest import ScriptedStore, TierEngine


class TwoTierEngine(TierEngine):
    """A second tier behind the first, in the same store."""

    def worker_side(self):
        self.second_worker = TierConnectorWorker("second", self._submit_second)
        return multi_connector_worker([self.worker, self.second_worker])

    def scheduler_side(self):
        region = self.model.region
        self.second_mover = TierTransfer("second", self.store, open_pool(region), region.seals, region.block_bytes, self.clock)
        self.second = TierConnectorScheduler(
            TierSettings(name="second"), region.layout, self.clock, lambda: self.store, self.watched.append
        )
        return MultiConnectorScheduler([self.scheduler, self.second])

    def _submit_second(self, metadata):
        self.second_mover.submit(metadata)

    def move(self, count=1000):
        super().move(count)
        while self.second_mover.step():
            pass
        for report in self.second_mover.take_reports():
            self.second_worker.report(report)


class Part(TierConnector):
    """A connector around both sides of a tier."""

    def __init__(self, scheduler, worker):
        self.scheduler, self.worker = scheduler, worker


@pytest.fixture
def saving():
    """An engine in a small pool, of which both tiers still save what a finished request has left."""
    store = ScriptedStore(answers_at_once=False)
    engine = TwoTierEngine(store, num_blocks=14)
    engine.add("a", range(1000, 1060), max_tokens=1)
    while not engine.finished:
        store.answer() if not engine.core.scheduler.running else None
        engine.step()
    assert engine.scheduler.num_saving_blocks == engine.second.num_saving_blocks > 0
    return engine


def test_no_request_is_preempted_while_copies_of_both_are_about_to_end(saving):
    """While copies are the only holders of blocks, a running request waits for them instead of preempting another."""
    assert saving.core.scheduler.connector.has_pending_block_frees()
    saving.add("b", range(2000, 2150), max_tokens=60)
    saving.run()
    assert saving.core.stats.num_preemptions == 0
    saving.assert_is_right()
    saving.assert_is_empty()


def test_blocks_that_both_hold_are_no_leak(saving):
    multi = MultiConnector([Part(saving.scheduler, saving.worker), Part(saving.second, saving.second_worker)])
    pool = saving.manager.block_pool
    assert pool.num_usable_blocks - pool.num_free_blocks == multi.num_saving_blocks() > 0


def test_blocks_that_a_slow_tier_holds_too_are_not_waited_for(saving):
    saving.second._are_saves_slow = True
    assert not saving.core.scheduler.connector.has_pending_block_frees()
    saving.run()
    saving.assert_is_empty()
