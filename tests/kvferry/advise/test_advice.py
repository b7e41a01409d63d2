"""The comparison of both sides, the verdict, the page, the plot and the command."""

import json
import math
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from core.errors import ConfigError
from kvferry import cli
from kvferry.__main__ import main
from kvferry.advise.cluster import Layout, Outcome, Slo
from kvferry.advise.costs import KNOWN, Costs, PrefillCost, StepCost, read_costs
from kvferry.advise.plot import draw
from kvferry.advise.report import decide
from kvferry.advise.study import Comparison, ConfidenceInterval, Study, StudySide
from kvferry.advise.trace import Trace, TraceRequest

COSTS = Costs(prefill=PrefillCost(base_ms=10, token_ms=0.1), step=StepCost(base_ms=20, request_ms=0.1), kv_tokens=100_000)


def trace_of(number=400, every_ms=500.0, num_tokens=2000, num_output_tokens=50):
    return Trace(tuple(TraceRequest(index * every_ms, num_tokens, num_output_tokens) for index in range(number)), True)


def study_of(disaggregated, aggregated, num_workers=4):
    outcome = Outcome([], 0)
    sides = (StudySide(Layout(1, 3), tuple(values), outcome, None, None) for values in (aggregated, disaggregated))
    return Study(num_workers, *sides)


@pytest.mark.parametrize(
    ("disaggregated", "aggregated", "disaggregate", "words"),
    [
        ((1.5, 1.5, 1.52), (1, 1, 1), True, "beyond the model's error of 10%"),
        ((1.08, 1.08, 1.08), (1, 1, 1), False, "not surely more than the model's error"),
        ((1.2, 0.9, 1.9), (1, 1, 1), False, "not surely more than the model's error"),
        ((0.8, 0.8, 0.81), (1, 1, 1), False, "carry 0.80 ± 0.01 times"),
        ((9,), (1,), False, "too short"),
        ((0, 0, 0), (1, 1, 1), False, "do not meet the SLO"),
        ((0, 0, 0), (0, 0, 0), False, "too strict"),
        ((1, 1, 1), (0, 0, 0), True, "carry 256.00"),
    ],
)
def test_the_advice_follows_the_interval_of_the_ratio(disaggregated, aggregated, disaggregate, words):
    verdict = decide(study_of(disaggregated, aggregated), 0.1, 0)
    assert verdict.disaggregate == disaggregate
    assert words in verdict.reason


def test_a_floor_of_workers_comes_before_the_ratio():
    study = study_of((2, 2, 2), (1, 1, 1), num_workers=4)
    assert not decide(study, 0.1, 5).disaggregate
    assert decide(study, 0.1, 4).disaggregate


def test_an_interval_is_that_of_student_s_t():
    interval = ConfidenceInterval.of([1.0, 2.0, 3.0])
    assert (interval.mean, interval.half_width) == (2.0, pytest.approx(4.303 / math.sqrt(3)))


@pytest.mark.slow
def test_a_strict_limit_between_tokens_favours_prefill_and_decode_workers():
    comparison = Comparison(trace_of(), COSTS, Slo(ttft_ms=1000, itl_ms=30), 0.95)
    assert comparison.study(4).ratio.low > 1.1


@pytest.mark.slow
def test_short_prompts_and_long_answers_favour_aggregated_workers():
    trace = trace_of(num_tokens=100, num_output_tokens=300, every_ms=50)
    costs = Costs(prefill=COSTS.prefill, step=COSTS.step, kv_tokens=4000)
    study = Comparison(trace, costs, Slo(ttft_ms=1000, tpot_ms=100), 0.95).study(4)
    assert study.disaggregated.layout.num_prefill == 1
    assert study.ratio.high < 1


@pytest.mark.slow
def test_the_best_split_follows_the_work():
    long_prompts = Comparison(trace_of(num_output_tokens=2), COSTS, Slo(), 0.95).study(6).disaggregated.layout
    assert long_prompts == Layout(5, 1)


@pytest.mark.slow
def test_the_workers_needed_are_enough_and_one_less_is_not():
    comparison = Comparison(trace_of(every_ms=100), COSTS, Slo(ttft_ms=1000), 0.95)
    side = comparison.study().aggregated
    assert side.num_needed > 1
    assert comparison.shares(side.needed_layout, [1.0])[0] >= 0.95
    assert comparison.shares(Layout(num_aggregated=side.num_needed - 1, chunk=side.needed_layout.chunk), [1.0])[0] < 0.95


def test_goodput_is_the_largest_rate_within_the_slo():
    comparison = Comparison(trace_of(), COSTS, Slo(ttft_ms=1000), 0.95)
    layout = Layout(1, 3)
    speed = comparison.goodput(layout, 0) / 2  # the trace has two requests a second
    assert comparison.shares(layout, [speed])[0] >= 0.95
    assert comparison.shares(layout, [speed * 1.2])[0] < 0.95


@pytest.mark.slow
def test_a_slo_that_no_rate_meets_ends():
    study = Comparison(trace_of(100), COSTS, Slo(tpot_ms=1), 0.95).study()
    assert study.aggregated.num_needed is None
    assert study.aggregated.goodput.mean == 0
    assert not decide(study, 0.1, 0).disaggregate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefill: {base_ms: .nan, token_ms: 1}\nstep: {base_ms: 1}\nkv_tokens: 9", "prefill.base_ms"),
        ("prefill: {base_ms: -1, token_ms: 1}\nstep: {base_ms: 1}\nkv_tokens: 9", "prefill.base_ms"),
        ("prefill: {base_ms: 1, token_ms: 1}\nstep: {base_ms: 0}\nkv_tokens: 9", "more than 0 ms"),
        ("prefill: {base_ms: 1, token_ms: 1}\nkv_tokens: 9", "step"),
        ("prefill: {base_ms: 1, tokens: 1}\nstep: {base_ms: 1}\nkv_tokens: 9", "tokens"),
        ("[", "costs"),
    ],
)
def test_bad_costs_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as found:
        read_costs(str(path))
    assert words in found.value.message
    assert "\n" not in found.value.message


def test_costs_are_read_from_a_file_or_known_by_name(tmp_path):
    path = tmp_path / "costs.yaml"
    path.write_text("prefill: {base_ms: 10, token_ms: 0.1}\nstep: {base_ms: 20, request_ms: 0.1}\nkv_tokens: 100000\n")
    assert read_costs(str(path)) == COSTS
    assert read_costs("qwen3-32b-2gpu") is KNOWN["qwen3-32b-2gpu"]
    with pytest.raises(ConfigError, match="qwen3-32b-2gpu"):
        read_costs("unheard-of")


def test_the_plot_is_valid_and_has_both_curves():
    root = ET.fromstring(draw([1.0, 2.0], [("one", [1.0, 0.9]), ("other", [0.5, 0.1])], 0.95))
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [2, 2]


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": index * 500, "input_length": 4000, "output_length": 40, "hash_ids": [index]} for index in range(200)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.slow
def test_the_command_prints_a_page_and_writes_a_plot(trace_file, tmp_path):
    plot = tmp_path / "plot.svg"
    result = CliRunner().invoke(
        cli.app, ["advise", str(trace_file), "--workers", "4", "--min-workers", "5", "--plot", str(plot)]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Advice: ")
    assert all(words in result.stdout for words in ("stay aggregated", "goodput", "decode KV", "Workers needed"))
    assert len(result.stdout.splitlines()) < 50
    ET.parse(plot)


@pytest.mark.parametrize(
    "flags", [[], ["--ttft-ms", "nan"], ["--costs", "none"], ["--plot", "/nowhere/a.svg", "--workers", "2"]]
)
def test_the_command_fails_in_one_line_with_code_2(flags, trace_file, monkeypatch, capsys):
    if not flags:
        trace_file.write_text("hello\n")
    monkeypatch.setattr("sys.argv", ["kvferry", "advise", str(trace_file), *flags])
    with pytest.raises(SystemExit) as found:
        main()
    assert found.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
