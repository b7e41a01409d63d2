"""The router's gauges of its requests."""

from prometheus_client import CollectorRegistry

from core.testing.clock import FakeClock
from router.dispatch.gauges import add_gauges
from router.metrics import RouterMetrics


def test_a_request_waits_for_a_worker_or_is_with_one(make_bench):
    bench, metrics = make_bench("a0"), RouterMetrics(CollectorRegistry())
    add_gauges(metrics, bench.core, FakeClock())

    def counts():
        return [metrics.registry.get_sample_value(f"kvferry_num_requests_{name}") for name in ("running", "waiting")]

    bench.submit()
    assert counts() == [1, 0]
    bench.do(bench.core.on_unreachable(b"a0", bench.now))
    assert counts() == [0, 1]
    bench.join("a1")
    assert counts() == [1, 0]
