"""The parts of the benchmarks that compute and format."""

import argparse
import json

import numpy as np
import pytest

from tests.support.benchmark_goals import check_goal, read_figures


@pytest.fixture(scope="module")
def common(load_benchmark):
    return load_benchmark("common")


def test_spread_is_median_and_extremes(common):
    spread = common.Spread.of([5.0, 1.0, 2.0])
    assert (spread.median, spread.low, spread.high) == (2.0, 1.0, 5.0)
    assert spread.show() == "2.0 (1.0..5.0)"
    assert spread.show(0, 100) == "200 (100..500)"


def test_ratios_are_taken_within_a_repeat(common):
    # A machine that slows down tenfold between repeats changes no ratio.
    spread = common.Spread.of_ratios([1.1, 11.0, 0.11], [1.0, 10.0, 0.1])
    assert (spread.low, spread.high) == (pytest.approx(1.1), pytest.approx(1.1))


def test_ratios_to_nothing_are_refused_with_what_was_measured(common):
    with pytest.raises(common.NothingMeasured, match=r"\[3, 0\]"):
        common.Spread.of_ratios([1, 1], [3, 0])


def test_table_is_aligned_as_text_and_as_markdown(common):
    table = common.Table(("case", "ms"), [("one", "5.0"), ("another", "12.0")])
    assert table.text().splitlines() == ["case       ms", "one       5.0", "another  12.0"]
    assert table.markdown().splitlines() == [
        "| case    |   ms |",
        "| ------- | ---: |",
        "| one     |  5.0 |",
        "| another | 12.0 |",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "is_met"),
    [
        ("at_most", 2, True),
        ("at_most", 2.5, False),
        ("at_most", None, False),
        ("at_most", np.float32(1), True),
        ("at_least", 2.0, True),
        ("at_least", 1.5, False),
        ("at_least", None, False),
        ("at_least", np.int64(3), True),
    ],
)
def test_an_aim_is_met_on_its_side_of_the_goal(common, kind, value, is_met):
    aim = getattr(common, kind)("an aim", value, np.float64(2), "ms")
    assert aim == {"name": "an aim", "value": value, "goal": 2.0, "unit": "ms", "met": is_met}
    check_goal(aim)
    json.dumps(aim)


def test_verdicts_tell_value_goal_and_what_was_not_measured(common):
    aims = [common.at_most("a", 1.25, 2, "ms"), common.at_least("b", 1, 2, "x"), common.at_least("c", None, 2, "x")]
    assert common.goal_notes(aims) == [
        "a: 1.25 ms (goal 2): met",
        "b: 1 x (goal 2): MISSED",
        "c: not measured (goal 2): MISSED",
    ]


@pytest.mark.parametrize("has_aims", [False, True])
def test_publish_writes_a_list_of_aims_in_any_case(common, tmp_path, has_aims):
    path = tmp_path / "figures.json"
    arguments = argparse.Namespace(markdown=False, quick=False, json=path)
    aims = [common.at_least("share", 0.5, 0.4, "ratio")] if has_aims else ()
    common.publish(common.Outcome([], goals=aims), common.Machine.now(), arguments)
    assert read_figures(path)["goals"] == list(aims)


def test_publish_prints_tables_and_writes_figures(common, tmp_path, capsys):
    path = tmp_path / "new" / "figures.json"
    arguments = argparse.Namespace(markdown=False, quick=True, json=path)
    outcome = common.Outcome([common.Table(("a", "b"), [("x", "1")])], ["a note"], {"seconds": {"x": [1.0]}})
    common.publish(outcome, common.Machine.now(), arguments)
    printed = capsys.readouterr().out
    assert "x  1\n" in printed
    assert "- a note\n" in printed
    assert "mean nothing" in printed
    figures = json.loads(path.read_text())
    assert figures["seconds"] == {"x": [1.0]}
    assert figures["machine"]["cores"] >= 1
    assert figures["arguments"]["quick"] == "True"
