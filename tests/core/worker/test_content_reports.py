"""When a worker reports its prefix cache, and to which router."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import VersionMismatch
from core.kv.content_feed import ContentFeed
from core.kv.events import BlockStored
from core.wire.contents import ContentReport
from core.wire.messages import ErrorInfo, Heartbeat, Refused, Registered
from core.worker.actions import Send
from core.worker.content_reports import REPORT_INTERVAL_S
from tests.core.worker.conftest import Harness

TAKES = Registered(router_id="R", takes_contents=True)


class Reporting(Harness):
    """A worker with a prefix cache."""

    def __init__(self):
        self.feed = ContentFeed("w", 7)
        super().__init__(contents=self.feed)

    def store(self, *numbers):
        hashes = tuple(number.to_bytes(8, "little") + bytes(8) for number in numbers)
        self.feed.publish([BlockStored(hashes, None, 16, 0)])

    def hear(self, message, now=0.0, link="a"):
        return reports(self.state.on_router_message(link, message, now))


def reports(actions):
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, ContentReport)]


def stored(report):
    return [int.from_bytes(report.stored[start : start + 8], "little") for start in range(0, len(report.stored), 8)]


@pytest.fixture
def worker():
    worker = Reporting()
    worker.state.connect("a", 0.0)
    return worker


def test_a_router_gets_a_snapshot_with_its_answer(worker):
    worker.store(1, 2)
    (report,) = worker.hear(TAKES)
    assert (report.number, report.is_snapshot, stored(report)) == (0, True, [1, 2])


def test_a_router_that_takes_none_gets_none(worker):
    worker.store(1)
    assert worker.hear(Registered(router_id="R")) == []
    assert reports(worker.state.on_timer(1.0)) == []


def test_a_change_is_reported_with_the_next_outputs(worker):
    worker.hear(TAKES)
    worker.store(1)
    (report,) = reports(worker.state.on_outputs([], REPORT_INTERVAL_S))
    assert (report.number, report.is_snapshot, stored(report)) == (1, False, [1])


def test_changes_in_quick_succession_make_one_report_when_it_is_due(worker):
    worker.hear(TAKES)
    worker.store(1)
    assert reports(worker.state.on_outputs([], 0.01)) == []
    worker.store(2)
    assert worker.state.next_timer(0.02) == REPORT_INTERVAL_S
    (report,) = reports(worker.state.on_timer(REPORT_INTERVAL_S))
    assert stored(report) == [1, 2]
    assert worker.state.next_timer(REPORT_INTERVAL_S) > REPORT_INTERVAL_S


def test_a_heartbeat_comes_after_all_news_and_counts_the_reports(worker):
    worker.hear(TAKES)
    worker.store(1)
    sent = [action.message for action in worker.state.on_timer(1.0)]
    assert [type(message) for message in sent] == [ContentReport, Heartbeat]
    assert sent[1].num_reports == 2


def test_a_snapshot_is_sent_on_request_and_the_numbers_go_on(worker):
    worker.store(1)
    worker.hear(TAKES)
    (report,) = worker.hear(msgspec.structs.replace(TAKES, needs_snapshot=True), now=1.0)
    assert (report.number, report.is_snapshot, stored(report)) == (1, True, [1])


def test_an_answer_to_a_heartbeat_causes_no_report(worker):
    worker.hear(TAKES)
    assert worker.hear(TAKES, now=1.0) == []


def test_another_router_process_gets_a_snapshot(worker):
    worker.store(1)
    worker.hear(TAKES)
    (report,) = worker.hear(Registered(router_id="R2", takes_contents=True), now=1.0)
    assert (report.number, report.is_snapshot) == (0, True)


@pytest.mark.parametrize("end", ["refused", "other version", "silent", "gone"])
def test_nothing_is_reported_to_a_router_that_does_not_know_the_worker(worker, end):
    worker.hear(TAKES)
    match end:
        case "refused":
            worker.hear(Refused(error=ErrorInfo(code="not_registered", message="register", http_status=400)))
        case "other version":
            worker.state.on_bad_frame("a", VersionMismatch(ours=2, theirs=9, is_refusal=True), 0.0)
        case "silent":
            for second in range(1, 7):
                worker.state.on_timer(float(second))
        case "gone":
            worker.state.disconnect("a", 1.0)
    worker.store(1)
    assert reports(worker.state.on_outputs([], 7.0)) == []
    assert worker.feed.num_sent("a") == 0


def test_each_router_has_its_own_numbers(worker):
    worker.hear(TAKES)
    worker.state.connect("b", 0.0)
    worker.store(1)
    worker.state.on_timer(1.0)
    (report,) = worker.hear(msgspec.structs.replace(TAKES, router_id="R2"), now=1.1, link="b")
    assert (report.number, stored(report)) == (0, [1])
