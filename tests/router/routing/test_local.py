"""When a decode worker should compute a prompt itself."""

from __future__ import annotations

import pytest

from router.routing.local import LocalPrompt, StepTime, finish_ms, pays


def prompt(**changes):
    return LocalPrompt(**({"own_ms": 20.0, "wait_ms": 0.0, "step_ms": 15.0, "num_running": 4} | changes))


def test_a_short_prompt_beside_a_long_queue_is_computed_locally():
    assert pays(prompt(), remote_wait_ms=100.0, max_itl_ms=50.0)


@pytest.mark.parametrize(
    ("changes", "remote_wait_ms"),
    [
        ({"own_ms": 36.0}, 1000.0),  # the step would exceed the limit
        ({"step_ms": 31.0}, 1000.0),
        ({"wait_ms": 1.0}, 1000.0),  # another prompt is there
        ({}, 29.0),  # with the interference it takes 30 ms
    ],
    ids=["long", "slow steps", "queue", "idle prefill worker"],
)
def test_what_would_cost_others_or_be_later_is_not(changes, remote_wait_ms):
    assert not pays(prompt(**changes), remote_wait_ms, max_itl_ms=50.0)


def test_an_idle_decode_worker_has_nobody_to_delay():
    long = prompt(own_ms=400.0, num_running=0)
    assert finish_ms(long) == 400.0
    assert pays(long, remote_wait_ms=401.0, max_itl_ms=50.0)


@pytest.mark.parametrize(
    ("next_ms", "pays_off"), [(0.0, False), (360.0, False), (370.0, True), (400.0, True), (1e9, True)], ids=str
)
def test_a_request_that_begins_meanwhile_is_delayed_by_the_rest_only(next_ms, pays_off):
    long = prompt(own_ms=400.0, num_running=0, next_ms=next_ms)
    assert long.delay_ms == max(0.0, 400.0 - next_ms)
    assert pays(long, remote_wait_ms=10_000.0, max_itl_ms=50.0) is pays_off


def test_the_step_time_follows_the_frames_and_ignores_pauses():
    step = StepTime()
    for number in range(50):
        step.observe(number * 20.0)
    step.observe(60_000.0)
    assert step.ms == pytest.approx(20.0)
    for number in range(1, 60):
        step.observe(60_000.0 + number * 40.0)
    assert step.ms == pytest.approx(40.0, rel=0.01)
