"""The worker side: step messages out, reports in, and neither blocks."""

import threading

import pytest

from connectors.p2p.actions import HandoffRef, QuarantineEnded
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.transport.interface import PeerId
from connectors.p2p.worker import P2PConnectorWorker
from connectors.reports import ALL_BLOCKS, LoadEnded, SendingEnded
from core.errors import EngineDead
from core.request import KVConnectorOutput
from core.wire.messages import ErrorInfo, TransferUsage

ERROR = ErrorInfo(code="peer_lost", message="gone", http_status=502)
STALE = ErrorInfo(code="stale", message="reused", http_status=502)
FAILED = TransferUsage(transport="tcp")
USAGE = TransferUsage(transport="tcp", transferred_tokens=32)


@pytest.fixture
def submitted() -> list[P2PConnectorMetadata]:
    return []


@pytest.fixture
def worker(submitted) -> P2PConnectorWorker:
    return P2PConnectorWorker(submitted.append)


def test_step_message_is_passed_on(worker, submitted):
    metadata = P2PConnectorMetadata(releases=[HandoffRef("t", PeerId("tcp://p:1", 1))])
    worker.start_load_kv(metadata)
    assert submitted == [metadata]


def test_empty_step_message_wakes_no_thread(worker, submitted):
    worker.start_load_kv(P2PConnectorMetadata())
    assert submitted == []


@pytest.mark.parametrize("field", ["holds", "pulls", "refused", "aborts", "releases"])
def test_message_with_anything_in_it_is_not_empty(field):
    metadata = P2PConnectorMetadata()
    assert metadata.is_empty()
    news = getattr(metadata, field)
    news.update(r="error") if isinstance(news, dict) else news.append("something")
    assert not metadata.is_empty()


def test_reports_are_made_once(worker):
    worker.report(LoadEnded("good", USAGE))
    worker.report(LoadEnded("bad", FAILED, ERROR, ALL_BLOCKS))
    worker.report(LoadEnded("partly", USAGE, STALE, invalid_block_ids=(4, 5)))
    worker.report(LoadEnded("aborted", None))
    for request_id in "ab":
        worker.report(SendingEnded(request_id))
    assert worker.get_transfer_results(set()) == KVConnectorOutput(
        finished_sending={"a", "b"},
        finished_recving={"good", "bad", "partly", "aborted"},
        failed_recving={"bad": ERROR},
        invalid_block_ids={4, 5},
        load_errors={"partly": STALE},
        transfer_usage={"good": USAGE, "bad": FAILED, "partly": USAGE},
    )
    assert worker.get_transfer_results(set()).is_empty()


def test_quarantine_is_told_with_the_end_of_its_load_and_ends_later(worker):
    worker.report(LoadEnded("r", None, quarantined_block_ids=(3, 4, 5)))
    first = worker.get_transfer_results(set())
    assert (first.finished_recving, first.quarantined_block_ids) == ({"r"}, {3, 4, 5})
    worker.report(QuarantineEnded((4, 5)))
    second = worker.get_transfer_results(set())
    assert (second.quarantined_block_ids, second.unquarantined_block_ids) == (set(), {4, 5})


def test_quarantine_that_ended_before_it_was_told_never_was(worker):
    worker.report(LoadEnded("r", None, quarantined_block_ids=(3, 4, 5)))
    worker.report(QuarantineEnded((4, 5)))
    first = worker.get_transfer_results(set())
    assert (first.quarantined_block_ids, first.unquarantined_block_ids) == ({3}, set())
    worker.report(QuarantineEnded((3,)))
    assert worker.get_transfer_results(set()).unquarantined_block_ids == {3}


def test_get_finished_returns_the_two_sets(worker):
    worker.report(LoadEnded("r", USAGE))
    worker.report(SendingEnded("s"))
    assert worker.get_finished(set()) == ({"s"}, {"r"})


def test_each_report_wakes_the_engine_after_it_can_be_read(worker):
    seen = []
    worker.set_wakeup(lambda: seen.append(not worker.get_transfer_results(set()).is_empty()))
    worker.report(LoadEnded("r", USAGE))
    for request_id in "ab":
        worker.report(SendingEnded(request_id))
    assert seen == [True, True, True]


def test_dead_transfer_thread_ends_the_engine_in_its_next_step(worker):
    woken = []
    worker.set_wakeup(lambda: woken.append(True))
    worker.fail(ValueError("a bug"))
    assert woken == [True]
    with pytest.raises(EngineDead, match="a bug"):
        worker.get_transfer_results(set())


def test_reports_of_many_threads_all_arrive(worker):
    def report(name: int) -> None:
        for index in range(200):
            worker.report(LoadEnded(f"{name}/{index}", USAGE))

    threads = [threading.Thread(target=report, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    found: set[str] = set()
    while any(thread.is_alive() for thread in threads):
        found |= worker.get_transfer_results(set()).finished_recving
    found |= worker.get_transfer_results(set()).finished_recving
    assert len(found) == 800
