"""Figures follow from results by arithmetic that is checked by hand here."""

import pytest

from core.errors import ConfigError
from kvferry.bench.client import RequestResult
from kvferry.bench.report import distribution, make_report, parse_slos, percentile


def result(ttft, gaps, tokens, error=""):
    return RequestResult(
        started_s=0.0,
        ttft_s=ttft,
        e2e_s=ttft + sum(gaps),
        itl_s=gaps,
        num_prompt_tokens=10,
        num_output_tokens=tokens,
        error=error,
    )


def test_percentiles_interpolate_between_ranks():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 0) == 1
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile([7], 99) == 7


def test_no_values_give_no_distribution():
    assert distribution([]) is None


def test_throughput_counts_only_what_succeeded():
    report = make_report([result(0.1, [0.1, 0.1], 3), result(0.1, [0.1], 2), result(9, [], 1, "HTTP 503")], 2.0, {})
    assert report.num_failed == 1
    assert report.request_throughput_per_s == 1.0
    assert report.output_tokens_per_s == 2.5
    assert report.total_tokens_per_s == 12.5
    assert report.ttft_ms.max == pytest.approx(100)
    assert report.itl_ms.mean == pytest.approx(100)
    assert report.errors == {"HTTP 503": 1}
    assert report.goodput_per_s is None


def test_goodput_counts_requests_that_meet_every_limit():
    results = [result(0.1, [0.05], 2), result(0.3, [0.05], 2), result(0.1, [0.5], 2)]
    assert make_report(results, 1.0, {"ttft": 200}).goodput_per_s == 2
    assert make_report(results, 1.0, {"ttft": 200, "tpot": 100}).goodput_per_s == 1


def test_request_without_a_first_token_meets_no_limit_on_tokens():
    silent = RequestResult(started_s=0.0, e2e_s=0.1)
    assert make_report([silent], 1.0, {"ttft": 200}).goodput_per_s == 0
    assert make_report([silent], 1.0, {"tpot": 200}).goodput_per_s == 0


def test_answer_of_one_token_meets_any_time_per_output_token():
    assert make_report([result(0.1, [], 1)], 1.0, {"ttft": 200, "tpot": 1}).goodput_per_s == 1


@pytest.mark.parametrize("item", ["ttft", "itl:5", "tpot:-1", "e2e:x"])
def test_bad_slo_is_refused(item):
    with pytest.raises(ConfigError, match="NAME:MILLISECONDS"):
        parse_slos([item])
