"""Ten minutes of figures from counters: rates, percentiles, gaps, and bounds."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.metrics import RouterMetrics
from router.records.history import INTERVAL_S, NUM_INTERVALS, OTHER, Gauges, History, PoolLoad


class Bench:
    """A history over real metrics, with gauges and a time that are set by hand."""

    def __init__(self) -> None:
        self.metrics = RouterMetrics(CollectorRegistry())
        self.gauges = Gauges(0, 0, {})
        self.history = History(self.metrics.registry, lambda: self.gauges)
        self.now = 100.0
        self.history.tick(self.now)

    def interval(self, seconds: float = INTERVAL_S) -> None:
        self.now += seconds
        assert self.history.tick(self.now)

    def report(self):
        return self.history.report(self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_interval_has_the_differences_of_the_counters(bench):
    bench.metrics.count_failed("internal_error")
    bench.interval()
    bench.gauges = Gauges(500, 3, {"decode": PoolLoad(0.25, 0.5)})
    bench.metrics.count_hit(100, 40)
    bench.metrics.observe_success(1.0, ["stop", "length"])
    bench.metrics.observe_handoff(None, "loaded")
    bench.metrics.count_placement("prefix")
    bench.interval()
    found = bench.report()
    assert found.output_tokens_per_s == [0.0, 100.0]
    assert (found.prompt_tokens_per_s, found.hit_rate) == ([0.0, 20.0], [None, 0.4])
    assert (found.answers_per_s, found.failures_per_s) == ([0.0, 0.4], [0.2, 0.0])
    assert found.handoffs_per_s == {"loaded": [0.0, 0.2]}
    assert found.placements == {"prefix": 1}
    assert (found.kv_usage_mean, found.kv_usage_highest) == ({"decode": [None, 0.25]}, {"decode": [None, 0.5]})
    assert (found.num_requests, found.ages_s) == ([0, 3], [5.0, 0.0])


def test_errors_of_clients_are_refusals_and_no_failures(bench):
    for code in ("invalid_request", "cancelled", "body_too_large", "no_worker"):
        bench.metrics.count_failed(code)
    bench.interval()
    found = bench.report()
    assert (found.num_failures, found.num_refusals) == (1, 3)


def test_percentiles_are_those_of_the_interval_alone(bench):
    for _ in range(100):
        bench.metrics.inter_token_s.observe(5.0)
    bench.interval()
    for _ in range(99):
        bench.metrics.inter_token_s.observe(0.004)
        bench.history.on_first_token(0.2)
    bench.metrics.inter_token_s.observe(0.4)
    bench.interval()
    bench.interval()
    found = bench.report()
    assert found.itl_p50_ms[1] == pytest.approx(2.5 + 2.5 * 50 / 99, abs=0.01)
    assert found.itl_p99_ms[1] == pytest.approx(5.0)
    assert found.itl_p50_ms[0] > 1000
    assert found.itl_p50_ms[2] is None
    assert (found.ttft_p50_ms[0], found.ttft_p99_ms[2]) == (None, None)
    assert found.ttft_p50_ms[1] == pytest.approx(200, rel=0.05)


def test_ten_minutes_are_kept_and_no_more(bench):
    for _ in range(3 * NUM_INTERVALS):
        bench.interval()
    found = bench.report()
    assert len(found.ages_s) == NUM_INTERVALS
    assert found.ages_s[0] == INTERVAL_S * (NUM_INTERVALS - 1)


def test_an_interval_that_lasted_longer_has_true_rates_and_leaves_no_old_ones(bench):
    bench.interval()
    bench.gauges = Gauges(1000, 0, {})
    bench.interval(10 * 60)
    assert bench.report().output_tokens_per_s == [pytest.approx(1000 / 600, abs=1e-3)]


def test_outcomes_from_workers_cannot_fill_the_memory(bench):
    for number in range(100):
        for _ in range(2 if number < 5 else 1):
            bench.metrics.observe_handoff(None, f"outcome-{number:03}")
    bench.interval()
    found = bench.report().handoffs_per_s
    assert len(found) == 17
    assert set(found) > {f"outcome-{number:03}" for number in range(5)}
    assert sum(rates[0] for rates in found.values()) * INTERVAL_S == pytest.approx(105)
    assert found[OTHER][0] * INTERVAL_S == pytest.approx(105 - 5 * 2 - 11)
