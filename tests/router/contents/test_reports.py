"""What the router knows equals what the workers hold, after any history of events, losses, snapshots and restarts."""

import random
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from core.kv.content_feed import ContentFeed
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from core.wire.contents import MAX_KEYS
from router.contents.reports import ReportedContents
from router.dispatch.members import WorkerKey

GROUP = (b"model", 16)
NUM_BLOCKS = 12
ROUTERS = ["r0", "r1"]
WORKERS = ["w0", "w1", "w2"]


def block_hash(number):
    return number.to_bytes(8, "little") + bytes(8)


class Worker:
    """A pool that stores and evicts, with its feed."""

    def __init__(self, name, incarnation):
        self.key = WorkerKey(name, incarnation)
        self.feed = ContentFeed(name, incarnation)
        self.held = set()

    def store(self, numbers):
        room = NUM_BLOCKS - len(self.held)
        new = [number for number in dict.fromkeys(numbers) if number not in self.held][:room]
        self.feed.publish([BlockStored(tuple(map(block_hash, new)), None, 16, 0)])
        self.feed.publish([BlockStored((block_hash(99),), None, 16, 1)])  # another group's is not reported here
        self.held.update(new)

    def evict(self, numbers):
        gone = [number for number in numbers if number in self.held]
        self.feed.publish([BlockRemoved((block_hash(number),), 0) for number in gone])
        self.held.difference_update(gone)

    def clear(self):
        self.feed.publish([AllBlocksCleared()])
        self.held.clear()

    def round(self, router_name, router, lost=()):
        """Report, then heartbeat, whose answer may ask for a snapshot. Reports with an index in ``lost`` do not arrive."""
        for index, report in enumerate(self.feed.take_reports(router_name)):
            if index not in lost:
                router.on_report(report)
        if router.needs_snapshot(self.key, self.feed.num_sent(router_name)):
            self.feed.request_snapshot(router_name)

    def register(self, router_name, router):
        router.join(self.key, GROUP, NUM_BLOCKS)
        self.feed.start(router_name)


class AnyHistory(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.routers = {name: ReportedContents() for name in ROUTERS}
        self.workers = {}
        self.num_starts = 0
        for name in WORKERS:
            self.restart_worker(name)

    @rule(name=st.sampled_from(WORKERS), numbers=st.lists(st.integers(1, 30), max_size=8))
    def store(self, name, numbers):
        self.workers[name].store(numbers)

    @rule(name=st.sampled_from(WORKERS), numbers=st.lists(st.integers(1, 30), max_size=8))
    def evict(self, name, numbers):
        self.workers[name].evict(numbers)

    @rule(name=st.sampled_from(WORKERS))
    def clear(self, name):
        self.workers[name].clear()

    @rule(name=st.sampled_from(WORKERS), router=st.sampled_from(ROUTERS), is_lost=st.booleans())
    def report(self, name, router, is_lost):
        self.workers[name].round(router, self.routers[router], lost=(0,) if is_lost else ())

    @rule(name=st.sampled_from(WORKERS), router=st.sampled_from(ROUTERS))
    def report_twice(self, name, router):
        for report in self.workers[name].feed.take_reports(router):
            self.routers[router].on_report(report)
            self.routers[router].on_report(report)

    @rule(name=st.sampled_from(WORKERS), router=st.sampled_from(ROUTERS))
    def distrust(self, name, router):
        self.routers[router].distrust(self.workers[name].key)

    @rule(name=st.sampled_from(WORKERS))
    def restart_worker(self, name):
        if name in self.workers:
            for router in self.routers.values():
                router.leave(self.workers[name].key)
        self.num_starts += 1
        self.workers[name] = Worker(name, self.num_starts)
        for router_name, router in self.routers.items():
            self.workers[name].register(router_name, router)

    @rule(router=st.sampled_from(ROUTERS))
    def restart_router(self, router):
        self.routers[router] = ReportedContents()
        for worker in self.workers.values():
            worker.register(router, self.routers[router])

    @rule()
    def two_intervals_pass(self):
        for name, router in self.routers.items():
            for worker in self.workers.values():
                worker.round(name, router)
                worker.round(name, router)
                assert router.is_known(worker.key)
                assert router.contents(worker.key) == worker.held

    def teardown(self):
        self.two_intervals_pass()


AnyHistory.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_index_equals_the_workers_contents_after_any_history = pytest.mark.slow(AnyHistory.TestCase)


@pytest.fixture
def pair():
    worker, router = Worker("w", 1), ReportedContents()
    worker.register("r", router)
    return worker, router


def test_restarted_router_knows_everything_after_one_report(pair):
    worker, _ = pair
    worker.store([1, 2, 3])
    restarted = ReportedContents()
    worker.register("r", restarted)
    worker.round("r", restarted)
    assert restarted.contents(worker.key) == {1, 2, 3}


def test_contents_are_unknown_from_a_gap_until_the_snapshot(pair):
    worker, router = pair
    worker.store([1, 2])
    worker.round("r", router)
    worker.evict([1])
    worker.round("r", router, lost=(0,))
    assert not router.is_known(worker.key)
    assert router.num_blocks_held(GROUP, [1]) == {}
    worker.round("r", router)
    assert router.contents(worker.key) == {2}


def test_a_block_that_came_and_went_is_not_reported(pair):
    worker, router = pair
    worker.round("r", router)
    worker.store([5])
    worker.evict([5])
    reports = worker.feed.take_reports("r")
    assert not any(report.stored for report in reports)


def test_without_news_nothing_is_sent(pair):
    worker, router = pair
    worker.round("r", router)
    assert worker.feed.take_reports("r") == []


def test_worker_that_claims_more_than_its_blocks_is_not_believed(pair):
    worker, router = pair
    worker.feed.publish([BlockStored(tuple(map(block_hash, range(1, NUM_BLOCKS + 2))), None, 16, 0)])
    for _ in range(3):
        worker.round("r", router)
        assert not router.is_known(worker.key)


def test_large_contents_come_in_parts():
    worker, router = Worker("w", 1), ReportedContents()
    router.join(worker.key, GROUP, 3 * MAX_KEYS)
    worker.feed.start("r")
    numbers = random.Random(1).sample(range(1, 2**40), 2 * MAX_KEYS + 1)
    worker.feed.publish([BlockStored(tuple(map(block_hash, numbers)), None, 16, 0)])
    reports = worker.feed.take_reports("r")
    assert [report.is_snapshot for report in reports] == [True, False, False]
    for report in reports:
        router.on_report(report)
    assert router.contents(worker.key) == set(numbers)


def test_report_of_a_former_incarnation_changes_nothing(pair):
    worker, router = pair
    former = Worker("w", 0)
    former.feed.start("r")
    former.store([7])
    worker.round("r", router)
    for report in former.feed.take_reports("r"):
        router.on_report(report)
    assert router.contents(worker.key) == set()


def test_changes_that_are_not_asked_for_take_bounded_memory(pair):
    worker, router = pair
    worker.round("r", router)
    for start in range(1, 2 * MAX_KEYS, NUM_BLOCKS):
        numbers = range(start, start + NUM_BLOCKS)
        worker.store(numbers)
        worker.evict(numbers)
    (report,) = worker.feed.take_reports("r")
    assert (report.is_snapshot, report.stored, report.removed) == (True, b"", b"")


def test_a_worker_with_more_blocks_than_it_has_is_asked_less_and_less_often(caplog):
    """What it has, or what it says of itself, is wrong: the next snapshot will be as wrong."""
    worker, router = Worker("w", 1), ReportedContents()
    worker.register("r", router)
    worker.feed.publish([BlockStored(tuple(map(block_hash, range(1, NUM_BLOCKS + 2))), None, 16, 0)])
    asked = []
    for number in range(200):
        for report in worker.feed.take_reports("r"):
            router.on_report(report)
        if router.needs_snapshot(worker.key, worker.feed.num_sent("r")):
            asked.append(number)
            worker.feed.request_snapshot("r")
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert 3 <= len(asked) <= 10
    assert caplog.text.count("event=contents_exceed_cache") == 1
    assert "worker=w" in caplog.text
    worker.feed.publish([BlockRemoved((block_hash(1),), 0)])
    for _ in range(100):
        worker.round("r", router)
    assert router.is_known(worker.key)
    assert len(router.contents(worker.key)) == NUM_BLOCKS


def test_an_excess_long_ago_delays_no_snapshot():
    worker, router = Worker("w", 1), ReportedContents()
    worker.register("r", router)
    extra = tuple(map(block_hash, range(1, NUM_BLOCKS + 2)))
    num_unknown = []
    for _ in range(3):
        worker.feed.publish([BlockStored(extra, None, 16, 0)])
        worker.round("r", router)
        worker.feed.publish([BlockRemoved(extra, 0)])
        num_unknown.append(0)
        while not router.is_known(worker.key):
            worker.round("r", router)
            num_unknown[-1] += 1
        for _ in range(100):
            worker.round("r", router)
    assert len(set(num_unknown)) == 1
