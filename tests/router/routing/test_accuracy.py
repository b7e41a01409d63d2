"""Predicted against real hits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.accuracy import HitAccuracy


def observed(*pairs):
    accuracy = HitAccuracy()
    for predicted, real in pairs:
        accuracy.observe(predicted, real)
    return accuracy


def test_true_claims_count_in_full():
    assert observed(*[(512, 512)] * 20).credit(1000) == 1000


def test_a_lying_worker_loses_its_credit():
    accuracy = observed(*[(4096, 0)] * 5)
    assert accuracy.is_wrong
    assert accuracy.credit(4096) == 0


def test_one_evicted_prefix_is_no_lie():
    assert not observed((4096, 0)).is_wrong


def test_true_claims_restore_the_credit():
    assert not observed(*[(100, 0)] * 5, *[(100, 100)] * 60).is_wrong


def test_a_snapshot_restores_the_credit_at_once():
    accuracy = observed(*[(100, 0)] * 5)
    accuracy.forgive()
    assert accuracy.credit(100) == 100
    assert accuracy.predicted_tokens == 500


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=50), st.integers(0, 10**6))
def test_credit_is_never_more_than_the_claim(pairs, claimed):
    assert 0 <= observed(*pairs).credit(claimed) <= claimed
