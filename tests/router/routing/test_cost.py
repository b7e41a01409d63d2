"""Predicted prefill time, score and patience."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.cost import DISLIKE_WEIGHT, PrefillTime, dislike_of, patience_ms, score

TIME = PrefillTime(12, 0.05337, 2.30e-6)
tokens = st.integers(0, 200_000)


def test_prefill_time_follows_the_formula():
    assert PrefillTime(10, 0.5, 0.001).ms(100, 40) == pytest.approx(10 + 50 + 0.001 * 100 * 90)


@given(tokens, tokens, st.integers(1, 1000))
def test_a_longer_hit_never_takes_longer(num_tokens, hit, more):
    hit = min(hit, num_tokens)
    more = min(more, num_tokens - hit)
    assert TIME.ms(num_tokens - hit - more, hit + more) <= TIME.ms(num_tokens - hit, hit) + 1e-6


@given(tokens, tokens)
def test_computing_in_two_parts_costs_one_more_base(first, second):
    parts = TIME.ms(first, 0) + TIME.ms(second, first)
    assert parts == pytest.approx(TIME.ms(first + second, 0) + TIME.base_ms)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 50), st.floats(0, 10))
def test_score_is_at_least_the_time_to_the_first_token(wait, own, delayed, weight):
    assert score(wait, own, delayed, reuse_weight=weight) >= wait + own


def test_a_miss_costs_more_than_the_wait_it_avoids():
    assert score(wait_ms=250, own_ms=100, num_delayed=0, reuse_weight=2) < score(0, 200, 0, reuse_weight=2)


def test_overtaking_costs_the_own_time_of_each_overtaken_prompt():
    assert score(0, 100, 3) - score(0, 100, 1) == 200


def test_longer_prompts_are_due_later():
    assert patience_ms(100) < patience_ms(200)


@given(st.integers(1, 5), st.integers(0, 30))
def test_each_worker_is_preferred_by_one_router(num_routers, worker):
    assert [dislike_of(worker, rank, num_routers) for rank in range(num_routers)].count(0.0) == 1


def test_a_dislike_counts_less_than_the_own_time():
    assert 0 < score(0, 100, 0, dislike=1.0) - score(0, 100, 0) == pytest.approx(DISLIKE_WEIGHT * 100)
