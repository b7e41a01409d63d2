"""The aims that benchmarks make of what they measured."""

from __future__ import annotations

import pytest

from tests.support.benchmark_goals import check_goal


@pytest.fixture
def row(load_benchmark):
    case_class = load_benchmark("engine_cases").Case

    def make(vllm):
        case = case_class("decode", "tokens/s", 1, 1.3, 1.4, ours=[1.0, 1.0], baseline=[1.2, 1.4], vllm=vllm, floor_s=0.5)
        return case.summary()

    return make


def test_engine_is_judged_beside_transformers_with_one_thread(load_benchmark, row):
    cases = load_benchmark("engine_cases")
    (goal,) = cases.goals_of([row([])], 1)
    check_goal(goal)
    assert (goal["name"], goal["value"], goal["goal"]) == ("decode: transformers / ours", pytest.approx(1.3), 1.3)
    assert cases.goals_of([row([])], 2) == []


def test_engine_is_judged_beside_vllm_if_it_takes_part(load_benchmark, row):
    (goal,) = load_benchmark("engine_cases").goals_of([row([1.4, 1.6])], 2)
    check_goal(goal)
    assert (goal["name"], goal["value"], goal["goal"], goal["met"]) == ("decode: vLLM / ours", 1.5, 1.4, True)


def test_engine_has_the_goals_of_the_documentation(load_benchmark):
    engine = load_benchmark("engine")
    page = (load_benchmark("run_all").FOLDER.parent / "docs" / "benchmarks.md").read_text()
    goals = {name: f"{goal:g} ×" for name, goal in engine.GOALS.items()}
    assert f"decode at least {goals['decode']}, 16 streams {goals['streams']}, prefill {goals['prefill']}" in page


def test_schemas_are_not_judged_without_their_corpus(load_benchmark):
    corpus = load_benchmark("schema_corpus")
    for found, values in ((corpus.Found(), [None, None]), (corpus.Found(supported=4), [1.0, 0])):
        goals = corpus.goals_of(found)
        assert [goal["value"] for goal in goals] == values
        for goal in goals:
            check_goal(goal)


def test_handoff_takes_medians_of_all_starts(load_benchmark):
    handoff, verification = load_benchmark("handoff"), load_benchmark("verification")
    firsts = [handoff.Transfer("shm", 1000, ms, 100.0, 4.0) for ms in (30.0, 9.0, 12.0)]
    others = [handoff.Transfer("shm", 1000, 5.0, 100.0, 4.0), handoff.Transfer("shm", 1000, 5.0, 50.0, 3.0)]
    found = {name: handoff.Found(firsts, others, [[5.0, 3.0], [6.0, 3.0]], [[4.0, 3.0], [4.0, 3.0]]) for name in ("shm", "tcp")}
    load = verification.Measured(num_tokens=1, transfer_ms=10.0, verify_ms=5.0, copy_ms=1.0)
    loads = {name: {kind: [load] for kind in verification.KINDS} for name in ("shm", "tcp", "nixl")}
    goals = handoff.goals_of(found, loads, [0.2, 0.4, 0.9])
    for goal in goals:
        check_goal(goal)
    assert [(goal["name"], pytest.approx(goal["value"]), goal["met"]) for goal in goals] == [
        ("shm: transfer / prefill", 0.075, True),
        ("shm: rate / plain copy", 0.7, True),
        ("shm: first transfer / a later one", 2.4, False),
        ("shm: added to the second token by one block", 1.5, True),
        ("tcp: transfer / prefill", 0.075, True),
        ("tcp: added to the second token by one block", 1.5, True),
        ("shm: identity / transfer of 1 tokens", 0.5, False),
        ("shm: digest / transfer of 1 tokens", 0.5, True),
        ("tcp: identity / transfer of 1 tokens", 0.5, False),
        ("tcp: digest / transfer of 1 tokens", 0.5, False),
        ("nixl: identity / transfer of 1 tokens", 0.5, False),
        ("killed prefill worker: until its prompt is computed anew", 0.4, True),
    ]
    assert handoff.transfer_row("shm", found["shm"])[1] == "12.0 (9.0..30.0), 2.4 x"
