"""The agent's metrics have the names of our workers' and the values of its server."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from agent.readings import count_handoffs, readings
from agent.server_metrics import ServerLoad, labels_of, read_load
from core.engine.step_watch import StepReading
from core.errors import FALLBACK_REASONS
from core.metrics import WorkerMetrics

PLUGIN = """
vllm:kvferry_loads_total{engine="0",model_name="m"} 3.0
vllm:kvferry_loads_total{engine="1",model_name="m"} 1.0
vllm:kvferry_loads_created{engine="0",model_name="m"} 1.7e+09
vllm:kvferry_bytes_total{engine="0",model_name="m"} 1.5e+10
vllm:kvferry_verified_blocks_total{engine="0",model_name="m"} 30.0
vllm:kvferry_failures_total{engine="0",model_name="m",reason="digest"} 2.0
vllm:kvferry_failures_total{engine="0",model_name="m",reason="stale"} 1.0
vllm:kvferry_refusals_total{engine="0",model_name="m",reason="stale"} 5.0
vllm:kvferry_held_blocks{engine="0",model_name="m"} 7.0
"""
RULES = Path(__file__).parents[2] / "helm/kvferry/templates/prometheusrule.yaml"
WITHOUT_COUNTERPART = {"kv_handoff_events_total"}  # the plug-in counts no leases


class Bench:
    """The metrics of an agent whose server has told nothing yet."""

    def __init__(self, role="decode"):
        self.engine = SimpleNamespace(load=ServerLoad(), num_requests=0, reading=StepReading)
        self.registry = CollectorRegistry()
        WorkerMetrics(self.registry, readings(self.engine, 100, lambda: None, role))
        count_handoffs(self.registry, self.engine)

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"kvferry_{name}", labels)

    def failures(self):
        return {reason: self.value("kv_transfer_failures_total", reason=reason) for reason in FALLBACK_REASONS}


@pytest.fixture
def bench():
    return Bench()


def test_what_the_plug_in_counts_has_the_names_of_our_own_connector(bench):
    bench.engine.load = read_load(PLUGIN)
    assert bench.failures() == dict.fromkeys(FALLBACK_REASONS, 0) | {"digest": 2, "stale": 6}
    assert bench.value("kv_transfers_total", transport="vllm") == 4
    assert bench.value("kv_transfer_bytes_total", transport="vllm") == 15e9
    assert bench.value("kv_verified_blocks_total") == 30


def test_counts_begin_with_what_the_server_says_first(bench):
    """An agent that is started again must not let them rise from 0: that would be an alert for what is long past."""
    assert set(bench.failures().values()) == {None}
    bench.engine.load = read_load('\nvllm:kvferry_loads_total{engine="0"} 0.0\n')
    assert set(bench.failures().values()) == {0}


def test_a_server_without_the_plug_in_counts_no_handoffs(bench):
    bench.engine.load = read_load('\nvllm:num_requests_running{engine="0"} 1.0\n')
    assert set(bench.failures().values()) == {None}


@pytest.mark.parametrize(("role", "leased", "quarantined"), [("prefill", 7, 0), ("decode", 7, 7), ("aggregated", 7, 0)])
def test_what_a_decode_server_holds_waits_for_late_reads(role, leased, quarantined):
    bench = Bench(role)
    bench.engine.load = read_load(PLUGIN)
    assert (bench.value("kv_leased_blocks"), bench.value("kv_quarantined_blocks")) == (leased, quarantined)


def test_alerts_of_transfers_find_their_series_at_an_agent(bench):
    bench.engine.load = read_load(PLUGIN)
    found = {sample.name for metric in bench.registry.collect() for sample in metric.samples}
    used = set(re.findall(r"kvferry_(kv_\w+)\{", RULES.read_text()))
    assert {name for name in used if f"kvferry_{name}" not in found} == WITHOUT_COUNTERPART


@pytest.mark.parametrize("name", ["a}b", "{}", "a} 5", 'a\\"} 5', "a,b=c"])
def test_labels_may_hold_any_text(name):
    text = f'vllm:num_requests_running{{engine="0",x="{name}"}} 2.0\nvllm:num_requests_waiting{{engine="0"}} 3.0\n'
    assert (read_load(text).num_running, read_load(text).num_waiting) == (2, 3)
    assert labels_of(text, "vllm:num_requests_running") == {"engine": "0", "x": name}
