"""The worker side with a thread of its own, and what its author reads when a part is missing."""

from __future__ import annotations

import threading

import pytest

from connectors.handoff_scheduler import HandoffScheduler
from connectors.reports import LoadEnded, SendingEnded
from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.connector_pair import FINGERPRINT, LAYOUT, PROMPT
from connectors.testing.contexts import connector_context
from connectors.testing.memory_pool import MemoryPool
from connectors.thread_worker import StepOrders, ThreadWorker
from core.errors import EngineDead
from core.wire.messages import ErrorInfo, TransferUsage


class SilentScheduler(HandoffScheduler[StepOrders[str]]):
    """Orders saves only."""

    def start_save(self, request_id, handoff):
        self.step.orders.append(request_id)

    def start_load(self, request, offer, blocks, num_tokens):
        pass

    def refuse_load(self, request_id, error):
        pass

    def abort_load(self, request_id):
        pass


class SilentWorker(ThreadWorker[str, SendingEnded]):
    """Carries out nothing."""

    def carry_out(self, order):
        pass

    def poll(self):
        return 10.0


@pytest.fixture
async def engine():
    context = connector_context("prefill")
    scheduler = SilentScheduler(context, StepOrders, lease_ms=1000, ids=context.ids)
    engine = ConnectorEngine(scheduler, SilentWorker("silent"), FINGERPRINT, LAYOUT)
    yield engine
    await engine.worker.stop()
    engine.close()


@pytest.fixture
def pool():
    pool = MemoryPool(4, LAYOUT)
    yield pool
    pool.close()


async def test_orders_to_a_thread_that_was_never_started_end_the_engine(engine):
    engine.step()
    engine.prefill("a", PROMPT)
    with pytest.raises(EngineDead, match=r"connector silent was not started.*Connector\.start"):
        engine.step()


async def test_a_wait_in_vain_names_what_the_connector_has_not_reported(engine):
    engine.worker.start()
    engine.prefill("a", PROMPT)
    with pytest.raises(TimeoutError, match=r"blocks of 'a' are kept.*log"):
        await engine.until(lambda: not engine.parked, timeout_s=0.0)


def test_an_error_without_blocks_is_refused_and_the_message_names_all_blocks():
    error = ErrorInfo.of(EngineDead("as an example"))
    with pytest.raises(ValueError, match="ALL_BLOCKS"):
        LoadEnded("a", TransferUsage(transport="silent"), error)


class ListingWorker(SilentWorker):
    """Lists what it carries out."""

    def __init__(self):
        super().__init__("listing")
        self.done = []

    def carry_out(self, order):
        self.done.append((order, threading.current_thread() is not threading.main_thread()))


async def test_orders_of_the_event_loop_are_carried_out_on_the_thread_in_their_order(pool):
    worker = ListingWorker()
    worker.register_kv_caches(pool.region)
    worker.submit("before start")
    worker.start()
    worker.start_load_kv(StepOrders(["of a step", "of the same"]))
    worker.submit("of the loop")
    await worker.stop()
    worker.submit("too late")
    assert worker.done == [(order, True) for order in ("before start", "of a step", "of the same", "of the loop")]
