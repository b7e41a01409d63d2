from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from core.metrics import WorkerMetrics
from core.sched.stats import ENGINE_METRICS, EngineStats
from core.worker.stats import WORKER_METRICS, WorkerStats


def make_stats(stats: EngineStats) -> WorkerStats:
    engine = SimpleNamespace(stats=lambda: stats, reading=lambda: SimpleNamespace(stalled_s=0.0))
    built = SimpleNamespace(num_blocks=65, image_decode_thread=None)
    state = SimpleNamespace(is_draining=False, num_registered_routers=0, num_requests=0)
    return WorkerStats(SimpleNamespace(connector=None, ec_connector=None, built=built), engine, lambda: state)


def num_leaked(**values) -> float:
    """Return the gauge of an engine that has 4 of its 64 blocks in use."""
    readings = make_stats(EngineStats(kv_cache_usage=4 / 64, **values)).readings()
    (read,) = [read for metric, read in readings.items() if metric.name == "kv_leaked_blocks"]
    return read()


def test_blocks_in_use_that_nothing_holds_are_leaked():
    assert num_leaked() == 4
    assert num_leaked(num_quarantined_blocks=1) == 3


@pytest.mark.parametrize("holder", ["num_running", "num_waiting", "num_loading", "num_parked_blocks", "num_early_blocks"])
def test_no_block_is_leaked_while_something_holds_blocks(holder):
    assert num_leaked(**{holder: 1}) == 0


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
