"""What a router knows from its own placements."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.kv.hashing import BlockHasher
from router.contents.placed import PendingPrefixes, PlacedPrefixes
from tests.support.prompt_keys import prompt_keys

HASHER = BlockHasher(b"model")
ROOMY = 10**6


def keys_of(token_ids):
    return prompt_keys(HASHER, list(token_ids))


@pytest.fixture
def placed():
    return PlacedPrefixes()


def test_a_prompt_is_found_where_it_was_placed(placed):
    placed.add("p0", keys_of(range(200)), ROOMY)
    assert placed.num_blocks_held(keys_of(range(200))) == {"p0": 12}
    assert placed.num_blocks_held(keys_of([*range(130), 7, 8, 9, *range(100)])) == {"p0": 8}


def test_a_worker_that_left_holds_nothing(placed):
    placed.add("p0", keys_of(range(200)), ROOMY)
    placed.forget("p0")
    assert placed.num_blocks_held(keys_of(range(200))) == {}
    assert len(placed) == 0


def test_the_oldest_prompt_loses_its_end_first(placed):
    placed.add("p0", keys_of(range(200)), 16)
    placed.add("p0", keys_of(range(1000, 1130)), 16)
    assert placed.num_blocks_held(keys_of(range(200))) == {"p0": 8}
    assert placed.num_blocks_held(keys_of(range(1000, 1130))) == {"p0": 8}


placements = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 200)), max_size=30)


@given(placements, st.integers(0, 12))
def test_no_worker_holds_more_than_its_capacity(history, capacity):
    placed, sent = PlacedPrefixes(), {}
    for worker, user, length in history:
        prompt = [user] * length
        placed.add(worker, keys_of(prompt), capacity)
        sent.setdefault(worker, []).append(prompt)
        assert len(placed) <= capacity * len(sent)
        for other, depth in placed.num_blocks_held(keys_of(prompt)).items():
            assert any(earlier[: depth * 16] == prompt[: depth * 16] for earlier in sent[other])


def common_blocks(one, other):
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class AnyPending(RuleBasedStateMachine):
    """Compares with a plain list of the prompts under way."""

    def __init__(self):
        super().__init__()
        self.pending = PendingPrefixes()
        self.sent = {}  # by request id: worker and keys
        self.computed = set()

    @rule(name=st.sampled_from("rstu"), worker=st.sampled_from("ab"), user=st.integers(0, 1), length=st.integers(0, 100))
    def add(self, name, worker, user, length):
        keys = keys_of([user] * length)
        self.pending.add(name, worker, keys)
        self.sent.pop(name, None)
        if keys:
            self.sent[name] = worker, keys
        self.computed.discard(name)

    @rule(name=st.sampled_from("rstu"))
    def compute(self, name):
        self.pending.on_computed(name)
        self.computed |= {name} & self.sent.keys()

    @rule(worker=st.sampled_from("ab"))
    def report(self, worker):
        self.pending.on_reported(worker)
        for name in [name for name in self.computed if self.sent[name][0] == worker]:
            self.drop(name)

    @rule(name=st.sampled_from("rstu"))
    def drop(self, name):
        self.pending.drop(name)
        self.sent.pop(name, None)
        self.computed.discard(name)

    @rule(worker=st.sampled_from("ab"))
    def forget(self, worker):
        self.pending.forget(worker)
        for name in [name for name, (other, _) in self.sent.items() if other == worker]:
            del self.sent[name]
            self.computed.discard(name)

    @invariant()
    def finds_the_longest_prefix_under_way(self):
        for wanted in (keys_of([0] * 90), keys_of([1] * 50)):
            expected = {}
            for worker, keys in self.sent.values():
                expected[worker] = max(expected.get(worker, 0), common_blocks(keys, wanted))
            assert self.pending.num_blocks_held(wanted) == {worker: depth for worker, depth in expected.items() if depth}
        assert len(self.pending) == len(self.sent)


AnyPending.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_pending_prompts_after_any_history = pytest.mark.slow(AnyPending.TestCase)
