"""Of a hybrid model the router expects exactly the hits that the worker finds, after any history."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from core.kv.content_feed import POOL, ContentFeed, FeedPart, pool_parts
from core.kv.coordinator import get_kv_cache_coordinator
from core.kv.events import BlockRemoved, BlockStored
from core.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSizes,
    SlidingWindowSpec,
)
from core.wire.contents import ContentPart
from router.contents.keys import hash_keys
from router.contents.reports import ReportedContents
from router.contents.windows import Window, longest_hit
from router.dispatch.members import WorkerKey

BLOCK, NUM_BLOCKS = 16, 24
GROUP = (b"model", BLOCK)
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}
FULL = FullAttentionSpec(**SHAPE)
SHORT, LONG = (SlidingWindowSpec(sliding_window=window, **SHAPE) for window in (17, 50))
CHUNKED = ChunkedLocalAttentionSpec(attention_chunk_size=48, **SHAPE)
MODELS = {
    "full": (FULL,),
    "windows and full": (SHORT, SHORT, FULL),
    "two windows": (LONG, FULL, SHORT),
    "chunks": (CHUNKED, FULL, CHUNKED),
    "windows only": (SHORT, LONG),
    "several full": (FULL, FULL, LONG),
}
# Two conversations that part after four blocks; the hash of a block names its whole prefix.
CHAINS = [[bytes([family if at >= 4 else 9, at]) * 8 for at in range(10)] for family in range(2)]
ROUTERS = ("r0", "r1")


class Worker:
    """A real pool of several groups, with its feed."""

    def __init__(self, incarnation: int, specs) -> None:
        self.key = WorkerKey("w", incarnation)
        groups = tuple(KVCacheGroup((number,), spec) for number, spec in enumerate(specs))
        sizes = KVCacheSizes(scheduler_block_size=BLOCK, hash_block_size=BLOCK, max_in_flight_tokens=64, max_model_len=160)
        config = KVCacheConfig(NUM_BLOCKS, groups)
        self.coordinator = get_kv_cache_coordinator(config, sizes, enable_caching=True, enable_kv_cache_events=True)
        self.feed = ContentFeed("w", incarnation, pool_parts(groups))

    def store(self, group, chain, at):
        """Cache one block of one group, evicting the oldest if there is no room."""
        pool, manager = self.coordinator.block_pool, self.coordinator.managers[group % len(self.coordinator.managers)]
        table = [pool.null_block] * at + pool.get_new_blocks(1)
        pool.cache_full_blocks(table, chain, at, BLOCK, manager.group_id)
        pool.free_blocks(table[at:])
        self.feed.publish(pool.take_events())

    def clear(self):
        pool = self.coordinator.block_pool
        pool.reset_prefix_cache()
        self.feed.publish(pool.take_events())

    def hit(self, chain):
        return self.coordinator.find_longest_cache_hit(chain, len(chain) * BLOCK)[1] // BLOCK

    def register(self, name, router):
        router.join(self.key, GROUP, NUM_BLOCKS, self.feed.parts)
        self.feed.start(name)

    def round(self, name, router, lost=()):
        for index, report in enumerate(self.feed.take_reports(name)):
            if index not in lost:
                router.on_report(report)
        if router.needs_snapshot(self.key, self.feed.num_sent(name)):
            self.feed.request_snapshot(name)


class AnyHistory(RuleBasedStateMachine):
    @initialize(model=st.sampled_from(sorted(MODELS)))
    def start(self, model):
        self.specs, self.num_starts = MODELS[model], 0
        self.routers = {name: ReportedContents() for name in ROUTERS}
        self.restart_worker()

    @rule(group=st.integers(0, 2), family=st.integers(0, 1), first=st.integers(0, 9), count=st.integers(1, 10))
    def store(self, group, family, first, count):
        for at in range(first, min(10, first + count)):
            self.worker.store(group, CHAINS[family], at)

    @rule(family=st.integers(0, 1), count=st.integers(1, 6))
    def compute(self, family, count):
        for group in range(len(self.specs)):
            for at in range(count):
                self.worker.store(group, CHAINS[family], at)

    @rule()
    def clear(self):
        self.worker.clear()

    @rule(name=st.sampled_from(ROUTERS), lost=st.sets(st.integers(0, 2)))
    def report(self, name, lost):
        self.worker.round(name, self.routers[name], lost)

    @rule(name=st.sampled_from(ROUTERS))
    def distrust(self, name):
        self.routers[name].distrust(self.worker.key)

    @rule(name=st.sampled_from(ROUTERS))
    def restart_router(self, name):
        self.routers[name] = ReportedContents()
        self.worker.register(name, self.routers[name])

    @rule()
    def restart_worker(self):
        for router in self.routers.values():
            if self.num_starts:
                router.leave(self.worker.key)
        self.num_starts += 1
        self.worker = Worker(self.num_starts, self.specs)
        for name, router in self.routers.items():
            self.worker.register(name, router)

    @rule()
    def two_intervals_pass(self):
        for name, router in self.routers.items():
            self.worker.round(name, router)
            self.worker.round(name, router)
            for chain in CHAINS:
                expected = router.num_blocks_held(GROUP, hash_keys(chain)).get(self.worker.key, 0)
                assert expected == self.worker.hit(chain)

    def teardown(self):
        if hasattr(self, "worker"):
            self.two_intervals_pass()


AnyHistory.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_expected_hits_are_the_workers_hits_after_any_history = pytest.mark.slow(AnyHistory.TestCase)


def test_a_prefix_without_its_window_is_no_hit():
    worker, router = Worker(1, (SHORT, FULL)), ReportedContents()
    worker.register("r", router)
    for at in range(8):
        worker.store(1, CHAINS[0], at)
    for at in (0, 1, 2, 5):
        worker.store(0, CHAINS[0], at)
    worker.round("r", router)
    assert router.num_blocks_held(GROUP, hash_keys(CHAINS[0])) == {worker.key: 6}
    assert worker.hit(CHAINS[0]) == 6


def test_a_router_of_an_earlier_release_is_told_of_the_first_part_only():
    feed = ContentFeed("w", 1, pool_parts([KVCacheGroup((0,), SHORT), KVCacheGroup((1,), FULL)]))
    feed.start("old", takes_parts=False)
    feed.publish([BlockStored((CHAINS[0][0],), None, BLOCK, 0), BlockStored((CHAINS[0][1],), None, BLOCK, 1)])
    (report,) = feed.take_reports("old")
    assert (report.part, report.stored) == (0, CHAINS[0][1][:8])
    feed.publish([BlockRemoved((CHAINS[0][0],), 0)])
    assert not feed.has_news("old")


def test_a_part_of_an_unknown_medium_is_ignored():
    feed = ContentFeed("w", 1, [FeedPart(POOL, (0,)), FeedPart(ContentPart(medium="tape"))])
    router = ReportedContents()
    router.join(WorkerKey("w", 1), GROUP, NUM_BLOCKS, feed.parts)
    feed.start("r")
    feed.publish_tier("tape", [CHAINS[0][0]], [])
    for report in feed.take_reports("r"):
        router.on_report(report)
    assert router.num_blocks_held(GROUP, hash_keys(CHAINS[0])) == {}
    assert list(router.num_blocks_in_tiers(GROUP, hash_keys(CHAINS[0]), {})) == []
    assert router.is_known(WorkerKey("w", 1))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_hit_is_that_of_its_definition(seed):
    draws = random.Random(seed)
    windows = [Window(draws.choice((1, 2, 16, 17, 33, 64, 100)), draws.random() < 0.3) for _ in range(draws.randint(1, 3))]
    for _ in range(50):
        held = [{at for at in range(20) if draws.random() < 0.8} for _ in windows]
        longest = max(
            length
            for length in range(21)
            if all(set(range(w.first_block(length, BLOCK), length)) <= found for w, found in zip(windows, held, strict=True))
        )
        checks = [(window, found.__contains__) for window, found in zip(windows, held, strict=True)]
        assert longest_hit(20, BLOCK, checks) == longest
