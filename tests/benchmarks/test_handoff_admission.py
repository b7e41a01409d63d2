"""Handoffs that all want to load at once: nothing is computed twice, and no slot waits without need."""

import pytest


@pytest.fixture(scope="module")
def figures(load_benchmark):
    benchmark = load_benchmark("handoff_admission")
    return {case.name: benchmark.measure(case) for case in benchmark.CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["thrash", "thrash, slow loads", "idle", "idle, very slow loads", "long promises"])
def test_no_handoff_is_preempted(figures, case):
    assert figures[case].num_preemptions == 0
    assert figures[case].num_computed_tokens == figures[case].num_output_tokens


def test_slots_stay_busy_while_loads_are_slow(figures):
    assert figures["idle"].mean_running > 15
    assert figures["thrash, slow loads"].mean_running > 13
    assert figures["long promises"].mean_running > 13
