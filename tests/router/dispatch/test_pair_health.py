"""Penalties of pairs whose handoffs fail, under times that the test sets."""

from __future__ import annotations

import pytest

from router.dispatch.members import WorkerKey
from router.dispatch.pair_health import PairHealth

P0, D0, D1 = WorkerKey("p0", 1), WorkerKey("d0", 1), WorkerKey("d1", 1)


@pytest.fixture
def pairs() -> PairHealth:
    return PairHealth()


@pytest.mark.parametrize("reason", ["deadline", "peer_lost"])
def test_a_pair_that_fails_twice_is_bad_and_others_of_its_workers_are_not(pairs, reason):
    pairs.note((P0, D0), reason, 0.0)
    pairs.note((P0, D1), reason, 0.0)
    assert pairs.bad(0.0) == frozenset()
    pairs.note((P0, D0), reason, 1.0)
    assert pairs.bad(1.0) == {(P0, D0)}


@pytest.mark.parametrize("reason", ["stale", "digest", "layout", "store_miss", "rejected"])
def test_failures_that_are_not_the_path_s_are_no_reason(pairs, reason):
    for _ in range(9):
        pairs.note((P0, D0), reason, 0.0)
    assert pairs.bad(0.0) == frozenset()


def test_failures_far_apart_do_not_add_up(pairs):
    for now in (0.0, 600.0, 1200.0):
        pairs.note((P0, D0), "deadline", now)
        assert pairs.bad(now) == frozenset()


def test_a_bad_pair_is_tried_again_later_and_longer_avoided_if_it_fails(pairs):
    def avoided_for(now: float) -> float:
        start = now
        while pairs.bad(now):
            now += 1.0
        return now - start

    for _ in range(2):
        pairs.note((P0, D0), "deadline", 0.0)
    first_s = avoided_for(0.0)
    pairs.note((P0, D0), "deadline", first_s)
    assert 0 < first_s < avoided_for(first_s)


def test_a_load_that_works_clears_the_pair(pairs):
    for _ in range(6):
        pairs.note((P0, D0), "deadline", 0.0)
    pairs.note((P0, D0), "", 1.0)
    assert pairs.bad(1.0) == frozenset()


def test_a_worker_that_left_takes_its_pairs_along(pairs):
    for pair in ((P0, D0), (P0, D1)):
        pairs.note(pair, "deadline", 0.0)
        pairs.note(pair, "deadline", 0.0)
    pairs.forget(D0)
    assert pairs.bad(0.0) == {(P0, D1)}


def test_penalties_that_have_decayed_are_forgotten(pairs):
    for number in range(9):
        pairs.note((WorkerKey("p0", number), D0), "deadline", 100.0 * number)
    assert pairs.bad(900.0) == frozenset()
    assert 0 < len(pairs) < 9
    assert pairs.bad(9000.0) == frozenset()
    assert len(pairs) == 0
