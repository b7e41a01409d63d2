from dataclasses import fields
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from core.metrics import WorkerMetrics
from core.sched.stats import ENGINE_METRICS, EngineStats
from core.worker.stats import WORKER_METRICS, WorkerStats


def make_stats(stats: EngineStats) -> WorkerStats:
    engine = SimpleNamespace(stats=lambda: stats, reading=lambda: SimpleNamespace(stalled_s=0.0))
    built = SimpleNamespace(num_blocks=1, image_decode_thread=None)
    state = SimpleNamespace(is_draining=False, num_registered_routers=0, num_requests=0)
    return WorkerStats(SimpleNamespace(connector=None, ec_connector=None, built=built), engine, lambda: state)


def test_every_metric_has_the_value_of_its_field():
    values = {name: number for number, name in enumerate(ENGINE_METRICS, start=1)}
    registry = CollectorRegistry()
    WorkerMetrics(registry, make_stats(EngineStats(**values)).readings())
    for name, metric in ENGINE_METRICS.items():
        suffix = "_total" if metric.kind == "counter" else ""
        assert registry.get_sample_value(f"kvferry_{metric.name}{suffix}") == values[name], name


def test_every_metric_is_served():
    assert set(make_stats(EngineStats()).readings()) == {*ENGINE_METRICS.values(), *WORKER_METRICS}


def test_every_number_of_the_engine_but_two_is_a_plain_metric():
    left = {field.name for field in fields(EngineStats)} - ENGINE_METRICS.keys()
    assert left == {"num_loading_blocks", "num_load_fallbacks"}  # for the simulation; has labels
