"""The index against a model that keeps a set of keys for each worker."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.contents.index import MAX_HOLDERS, ContentIndex
from router.contents.table import KeyTable

# The last ones share a table and a slot; the others are spread.
KEYS = [1, 2, 3, 2**63, 2**64 - 1, *(7 + (number << 40) for number in range(12))]
WORKERS = ["a", "b", "c", "d"]
keys = st.lists(st.sampled_from(KEYS), max_size=8)
workers = st.sampled_from(WORKERS)


def num_leading(held, prompt):
    return next((depth for depth, key in enumerate(prompt) if key not in held), len(prompt))


class AnyHistory(RuleBasedStateMachine):
    """Adds, removes and forgets in any order."""

    def __init__(self):
        super().__init__()
        self.index = ContentIndex()
        self.model = {worker: set() for worker in WORKERS}

    @rule(worker=workers, keys=keys)
    def add(self, worker, keys):
        self.index.add(worker, keys)
        self.model[worker].update(keys)

    @rule(worker=workers, keys=keys)
    def remove(self, worker, keys):
        self.index.remove(worker, keys)
        self.model[worker].difference_update(keys)

    @rule(worker=workers)
    def forget(self, worker):
        self.index.forget(worker)
        self.model[worker].clear()

    @rule(prompt=keys)
    def look_up(self, prompt):
        expected = {worker: num_leading(held, prompt) for worker, held in self.model.items()}
        assert self.index.num_blocks_held(prompt) == {worker: depth for worker, depth in expected.items() if depth}

    @invariant()
    def contents_are_those_of_the_model(self):
        for worker, held in self.model.items():
            assert set(self.index.contents(worker)) == held
            assert self.index.num_keys(worker) == len(held)
        assert len(self.index) == sum(map(len, self.model.values()))


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_index_equals_the_model_after_any_history = pytest.mark.slow(AnyHistory.TestCase)


@pytest.mark.slow
def test_many_keys_survive_growth_and_churn():
    index, rng = ContentIndex(), random.Random(5)
    held = {worker: set() for worker in range(5)}
    for _ in range(40):
        worker = rng.randrange(5)
        new = [rng.getrandbits(64) or 1 for _ in range(2000)]
        gone = rng.sample(sorted(held[worker]), len(held[worker]) // 2)
        index.add(worker, new)
        index.remove(worker, gone)
        held[worker] = (held[worker] | set(new)) - set(gone)
    assert {worker: set(index.contents(worker)) for worker in held} == held


@pytest.mark.slow
def test_memory_is_bounded_by_the_live_keys_not_by_the_past_ones():
    table, live = KeyTable(), 20_000
    rng = random.Random(3)
    for _ in range(20):
        keys = [rng.getrandbits(64) or 1 for _ in range(live)]
        for key in keys:
            table.set(key, 7)
        for key in keys:
            table.set(key, 0)
    assert table.num_bytes < 64 * live


@pytest.mark.slow
def test_an_entry_takes_less_than_64_bytes_with_its_share_of_the_sets():
    index, rng = ContentIndex(), random.Random(4)
    for worker in range(20):
        index.add(worker, [rng.getrandbits(64) or 1 for _ in range(10_000)])
    assert index.num_bytes < 64 * len(index)


def test_key_zero_is_not_stored():
    index = ContentIndex()
    index.add("a", [0, 5])
    index.remove("a", [0])
    assert (set(index.contents("a")), index.num_keys("a")) == ({5}, 1)


def test_too_many_workers_are_refused():
    index = ContentIndex()
    for worker in range(MAX_HOLDERS):
        index.add(worker, ())
    with pytest.raises(ValueError, match="more than 65535 workers"):
        index.add("one more", ())
