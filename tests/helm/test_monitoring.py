"""Alerts, dashboard, scaling and documentation name metrics that exist, and every metric is documented."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from connectors.p2p.consumer.counts import PullCounts
from connectors.p2p.consumer.transport_health import BreakerCounts
from connectors.p2p.metrics import P2PMetrics
from connectors.p2p.producer.leases import LeaseCounts
from core.clock import SystemClock
from core.config_router import RouterSection
from core.errors import CorruptBlock, LayoutMismatch, PeerUnreachable, StaleBlock, TransferTimeout, fallback_reason
from core.metrics import WorkerMetrics
from core.sched.stats import ENGINE_METRICS
from core.worker.stats import WORKER_METRICS
from encode.metrics import EncodeMetrics
from router.dispatch.worker_gateway import WorkerGateway
from router.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bkvferry_[a-z0-9_]+")
ELSEWHERE = {"kvferry_kv_load_fallbacks", "kvferry_upload_bytes", "kvferry_ready"}  # of the worker's shell and of HTTP


def families(registry):
    return {metric.name for metric in registry.collect()}


@pytest.fixture(scope="module")
def known():
    """Names of the router's and the workers' metrics, without the suffixes of samples."""
    router, worker = CollectorRegistry(), CollectorRegistry()
    WorkerGateway(RouterSection(), "model", "router", SystemClock(), RouterMetrics(router))
    WorkerMetrics(worker, dict.fromkeys([*ENGINE_METRICS.values(), *WORKER_METRICS], lambda: 0.0))
    EncodeMetrics(worker)
    p2p = P2PMetrics(worker)
    p2p.read_at_scrape(lambda: 0, lambda: 0, dict)
    p2p.read_broken_transports((), dict)
    p2p.start_prefixes(lambda: 0)
    return families(router) | families(worker) | ELSEWHERE


def base(name):
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


def used_in(text):
    return {base(name) for name in NAME.findall(text)}


def rules(find):
    (group,) = find("ha", "PrometheusRule", "")["spec"]["groups"]
    return group["rules"]


def test_alerts_ask_for_metrics_that_exist(find, known):
    used = used_in(json.dumps([rule["expr"] for rule in rules(find)]))
    assert used
    assert used <= known


def counted_events():
    """Of the state machines; the ends of control connections and the transports count further ones."""
    leases = {f"lease_{field.name}" for field in dataclasses.fields(LeaseCounts)}
    return leases | {field.name for counts in (PullCounts, BreakerCounts) for field in dataclasses.fields(counts)}


def test_alerts_ask_for_label_values_that_exist(find):
    texts = json.dumps([rule["expr"] for rule in rules(find)])
    events = counted_events()
    reasons = {
        fallback_reason(kind.code) for kind in (StaleBlock, CorruptBlock, PeerUnreachable, TransferTimeout, LayoutMismatch)
    }
    assert set(re.findall(r'reason=\\"(\w+)', texts)) <= reasons
    assert set(re.findall(r'event=\\"(\w+)', texts)) <= events
    assert set(re.findall(r'role=\\"(\w+)', texts)) <= {"router", "prefill", "decode"}


def test_dashboard_shows_metrics_that_exist_and_is_installed_as_it_is(find, known):
    text = (ROOT / "helm/kvferry/dashboards/kvferry.json").read_text()
    assert used_in(text) <= known
    assert json.loads(find("ha", "ConfigMap", "dashboard")["data"]["kvferry.json"]) == json.loads(text)


def test_scaling_goes_by_metrics_that_exist(known):
    values = yaml.safe_load((ROOT / "helm/kvferry/ci/ha-values.yaml").read_text())
    for role in ("prefill", "decode"):
        assert set(values[role]["autoscaling"]["metrics"]) <= known


@pytest.mark.parametrize("opening", ["(", "{", "["])
def test_expressions_are_balanced(find, opening):
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    for rule in rules(find):
        assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["alert"]


def test_every_alert_has_a_section_that_says_what_to_do(find):
    documented = set(re.findall(r"^### (\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE))
    assert documented == {rule["alert"] for rule in rules(find)}
    for rule in rules(find):
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_every_metric_is_documented_and_no_other(known):
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("## Metrics") : text.index("## Alerts")]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = {base(f"kvferry_{name}") for cell in cells for name in re.findall(r"`([a-z0-9_]+)", cell)}
    assert documented == known


def test_every_event_of_handoffs_is_documented():
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("### Events of handoffs") : text.index("## Alerts")]
    assert counted_events() <= set(re.findall(r"`(\w+)`", section))
