"""Eviction policies: which key is evicted first, and that none of them loses or invents a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from kvstore.eviction import ARC, LRU, POLICIES, S3FIFO, make_policy

CAPACITY = 20


def fill(policy, keys):
    for key in keys:
        policy.insert(key)
    return policy


def anything(_):
    return True


def evict_all(policy):
    victims = []
    while (victim := policy.evict(anything)) is not None:
        victims.append(victim)
    return victims


def test_lru_evicts_the_least_recently_used_first():
    policy = fill(LRU(3), "abc")
    policy.use("a")
    assert evict_all(policy) == ["b", "c", "a"]


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_a_scan_does_not_push_out_what_is_used(name):
    policy = make_policy(name, CAPACITY)
    cached = set(range(CAPACITY))
    fill(policy, cached)
    for key in range(CAPACITY):
        policy.use(key)
    for scanned in range(1000, 1000 + 10 * CAPACITY):
        cached.discard(policy.evict(anything))
        policy.insert(scanned)
        cached.add(scanned)
    assert len(cached & set(range(CAPACITY))) >= CAPACITY * 0.85


def test_a_scan_does_push_out_everything_of_lru():
    policy = fill(LRU(CAPACITY), range(CAPACITY))
    victims = []
    for scanned in range(1000, 1000 + CAPACITY):
        victims.append(policy.evict(anything))
        policy.insert(scanned)
    assert victims == list(range(CAPACITY))


def test_s3fifo_lets_what_comes_back_into_the_main_queue():
    policy = fill(S3FIFO(10), range(10))
    assert policy.evict(anything) == 0
    policy.insert(0)  # remembered
    assert [policy.evict(anything) for _ in range(9)] == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_arc_gives_new_keys_more_room_when_they_come_back():
    policy = ARC(10)
    fill(policy, range(10))
    for key in range(5):
        policy.use(key)  # frequent
    for number in range(3):
        assert policy.evict(anything) == 5 + number
        policy.insert(100 + number)
    policy.evict(anything)
    policy.insert(5)  # back after its eviction: the recent list should have been longer
    before = policy._target
    policy.evict(anything)
    policy.insert(6)
    assert policy._target > before > 0


@pytest.mark.parametrize("name", POLICIES)
def test_new_keys_that_come_together_stay_together(name):
    policy = make_policy(name, 100)
    cached = set(range(100))
    fill(policy, cached)
    for key in cached:
        policy.use(key)
    batch = range(1000, 1008)
    for key in batch:
        cached.discard(policy.evict(anything))
        policy.insert(key)
        cached.add(key)
    assert cached >= set(batch)


@pytest.mark.parametrize("name", POLICIES)
def test_what_may_not_go_is_passed_over(name):
    policy = fill(make_policy(name, CAPACITY), range(CAPACITY))
    free = {3, 7, 19}
    assert {policy.evict(free.__contains__) for _ in range(3)} == free
    assert policy.evict(free.__contains__) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["ask", "remove", "evict"]), st.integers(0, 40), st.integers(0, 3)), max_size=200)
)
def test_a_policy_knows_exactly_what_is_cached(name, steps):
    policy, cached = make_policy(name, CAPACITY), set()
    for what, key, pinned in steps:

        def can_evict(candidate, pinned=pinned):
            return candidate % 4 != pinned

        if what == "remove":
            policy.remove(key)
            cached.discard(key)
        elif what == "ask" and key in cached:
            policy.use(key)
        elif what == "evict" or len(cached) == CAPACITY:
            victim = policy.evict(can_evict)
            assert (victim is None) == (not any(map(can_evict, cached)))
            if victim is not None:
                assert victim in cached
                assert can_evict(victim)
                cached.remove(victim)
        elif key not in cached:
            policy.insert(key)
            cached.add(key)
        assert sorted(policy.candidates()) == sorted(cached)
    assert sorted(evict_all(policy)) == sorted(cached)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="lru, s3fifo, arc"):
        make_policy("fifo", 3)
