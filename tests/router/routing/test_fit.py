"""Learning the prefill time on line."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.cost import PrefillTime
from router.routing.fit import PrefillFit

REAL = PrefillTime(12, 0.05337, 2.30e-6)


def learn(fit, real, count, seed=1, noise=0.0, outliers=0.0, *, slowness=20):
    source = random.Random(seed)
    for _ in range(count):
        new, hit = source.randrange(16, 40_000), source.choice([0, 0, source.randrange(40_000)])
        factor = 1 + noise * source.uniform(-1, 1)
        if source.random() < outliers:
            factor *= slowness
        fit.observe(new, hit, real.ms(new, hit) * factor)
    return fit


def worst_error(fit, real, cases=((100, 0), (1000, 0), (1000, 30_000), (8000, 8000), (40_000, 0))):
    return max(abs(fit.time.ms(*case) / real.ms(*case) - 1) for case in cases)


def test_exact_times_are_learned_exactly():
    assert worst_error(learn(PrefillFit(), REAL, 60), REAL) < 0.01


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.floats(1, 100), st.floats(0.005, 1), st.floats(1e-8, 1e-5), st.integers(0, 1000))
def test_any_model_is_learned_from_noisy_times(base, token, pair, seed):
    real = PrefillTime(base, token, pair)
    assert worst_error(learn(PrefillFit(), real, 400, seed, noise=0.3), real, ((2000, 0), (8000, 8000), (40_000, 0))) < 0.3


def test_rare_stalls_hardly_change_the_fit():
    assert worst_error(learn(PrefillFit(), REAL, 600, noise=0.1, outliers=0.02), REAL) < 0.3


@pytest.mark.parametrize("slowness", [1 / 100, 1 / 4, 4, 100])
def test_a_tenth_of_unusual_times_hardly_changes_the_fit(slowness):
    fit = learn(PrefillFit(), REAL, 600, noise=0.1, outliers=0.1, slowness=slowness)
    assert worst_error(fit, REAL) < 0.3
    assert fit.mean_error < 0.3


def test_a_faster_worker_is_noticed():
    fit = learn(PrefillFit(), REAL, 300)
    faster = PrefillTime(6, 0.0267, 1.15e-6)
    assert worst_error(learn(fit, faster, 1500, seed=2), faster) < 0.1


def test_without_observations_a_prompt_costs_by_its_tokens():
    time = PrefillFit().time
    assert time.ms(2000, 0) / time.ms(1000, 0) == pytest.approx(2, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 10**6), st.integers(0, 10**6), st.floats(allow_nan=True)), max_size=60))
def test_coefficients_stay_finite_and_never_negative(observations):
    fit = PrefillFit()
    for new, hit, real_ms in observations:
        fit.observe(new, hit, real_ms)
    assert all(0 <= value < 1e15 for value in (fit.time.base_ms, fit.time.token_ms, fit.time.pair_ms))


@pytest.mark.slow
def test_equal_prompts_for_long_do_not_blow_up_the_fit():
    fit = PrefillFit()
    for _ in range(20_000):
        fit.observe(1000, 0, 70.0)
    fit.observe(2000, 500, 140.0)
    assert fit.time.ms(1000, 0) == pytest.approx(70, rel=0.1)


def test_the_usual_error_is_that_of_the_times():
    assert learn(PrefillFit(), REAL, 500, noise=0.3).mean_error == pytest.approx(0.15, abs=0.06)


def test_a_slower_worker_is_noticed():
    fit = learn(PrefillFit(), REAL, 300)
    slower = PrefillTime(24, 0.1067, 4.6e-6)
    assert worst_error(learn(fit, slower, 1500, seed=2), slower) < 0.1


@pytest.mark.parametrize("factor", [1 / 75, 1 / 3, 3, 75])
def test_rare_long_prompts_of_an_unusual_time_hardly_change_the_fit(factor):
    fit = learn(PrefillFit(), REAL, 300, noise=0.1)
    for _ in range(5):
        fit.observe(30_000, 0, REAL.ms(30_000, 0) * factor)
    assert worst_error(fit, REAL) < 0.3


@pytest.mark.parametrize("num_before", [0, 3, 300])
def test_one_time_next_to_nothing_is_forgotten_soon(num_before):
    fit = learn(PrefillFit(), REAL, num_before)
    fit.observe(1000, 0, 0.01)
    assert worst_error(learn(fit, REAL, 60, seed=2), REAL) < 0.1
