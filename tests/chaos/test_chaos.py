"""The chaos command: its verdicts on made-up runs, and one minute of the real thing."""

from __future__ import annotations

import pytest

from tests.chaos import verdict
from tests.chaos.faults import FAULTS, Incident
from tests.chaos.load import Answer
from tests.chaos.run import ChaosPlan, Report, _judge, run
from tests.chaos.watch import Growth


def plan(**changed):
    values = {
        "transport": "tcp",
        "minutes": 1.0,
        "num_pairs": 2,
        "num_at_a_time": 1,
        "kinds": tuple(FAULTS),
        "num_clients": 4,
        "min_answers": 0,
        "seed": 1,
    }
    return ChaosPlan(**values | changed)


def answer(tokens=(1, 2, 3), times=(1.0, 2.0, 3.0), ended_at=3.1, **changed):
    return Answer("a", 0.0, ended_at, list(tokens), (1, 2, 3), list(times), **changed)


def judged(answers=(), incidents=(), growths=(), held=None, **changed):
    report = Report(plan(**changed), 60.0, list(answers), list(incidents), list(growths), held or {}, [])
    _judge(report)
    return report.problems


def test_right_answers_are_good():
    assert judged([answer()]) == []


@pytest.mark.parametrize("tokens", [(1, 2, 4), (1, 2), (9,)])
def test_wrong_or_short_answers_are_bad(tokens):
    assert "wrong tokens" in judged([answer(tokens)])[0]


def test_wrong_token_before_an_error_is_bad():
    problems = judged(
        [answer((1, 9), error="503 no_worker: lost")], [Incident("kill", "decode-0", 0.0, 0.1, 5.0)], num_at_a_time=2
    )
    assert [problem for problem in problems if "wrong tokens" in problem]


def test_client_that_leaves_needs_no_whole_answer():
    assert judged([answer((1,), (1.0,), has_left=True)]) == []


def test_error_with_one_fault_at_a_time_is_bad():
    assert judged([answer((), (), error="503 no_worker: none")], [Incident("kill", "decode-0", 0.0, 0.1, 5.0)])


def test_long_pause_is_bad():
    assert "pause of 11.0 s after 3 tokens" in judged([answer(times=(1.0, 2.0, 3.0), ended_at=14.0)])[0]


def test_pause_of_the_router_itself_does_not_count():
    assert judged([answer(ended_at=14.0)], [Incident("freeze-router", "router", 3.0, 9.0, 9.5)]) == []


def test_pause_while_another_process_is_frozen_counts():
    assert judged([answer(ended_at=14.0)], [Incident("freeze", "decode-0", 3.0, 9.0, 9.5)])


@pytest.mark.parametrize(
    ("incident", "is_good"),
    [
        (Incident("kill", "decode-0", 1.0, 1.0, 9.0), True),
        (Incident("blackhole", "decode-0", 1.0, 1.0, 9.0), False),
        (Incident("kill", "decode-0", 50.0, 51.0, 60.0), False),
    ],
)
def test_error_in_a_dense_run_needs_a_cause(incident, is_good):
    problems = judged([answer((), (), error="503 no_worker: none")], [incident], num_at_a_time=3)
    assert (not problems) == is_good


@pytest.mark.parametrize(
    ("megabytes", "fds", "threads", "is_good"), [(20, 3, 0, True), (60, 0, 0, False), (0, 40, 0, False), (0, 0, 9, False)]
)
def test_growth_beyond_the_bounds_is_bad(megabytes, fds, threads, is_good):
    growth = Growth("router", 1, 200.0, 200 << 20, megabytes << 20, fds, threads)
    assert (not judged(growths=[growth])) == is_good


def test_what_is_held_at_the_end_is_bad():
    assert judged(held={"decode-0:kvferry_kv_leaked_blocks": 2.0})


def test_too_few_answers_are_bad():
    assert judged([answer()], min_answers=2)


def test_pause_before_the_first_token_counts():
    pause = verdict.longest_pause(answer(times=(12.0, 12.5, 13.0), ended_at=13.0), [])
    assert (pause.duration_s, pause.after_tokens) == (12.0, 0)


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_minute_of_chaos(transport, tmp_path):
    report = run(plan(transport=transport), tmp_path)
    print(report.text())
    assert report.problems == []
    assert len(report.complete) >= 40
