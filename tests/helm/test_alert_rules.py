"""Prometheus itself runs the alerts: each fires in its case, and none in a cluster that works."""

import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry

from connectors.p2p.metrics import P2PMetrics
from core.metrics import WorkerMetrics
from core.sched.stats import ENGINE_METRICS
from core.worker.stats import WORKER_METRICS
from router.metrics import RouterMetrics

pytestmark = pytest.mark.slow

PROMTOOL = shutil.which("promtool")
PODS = {
    "router": "kvferry-router-5f-a",
    "prefill": "kvferry-prefill-7c-b",
    "decode": "kvferry-decode-9d-c",
}
MINUTES = 60  # of a case; a sample a minute
IDLE, RISING = f"0x{MINUTES}", f"0+30x{MINUTES}"
# Counters begin at 0 and have one event after half an hour.
ONE_EVENT = f"0x30 1x{MINUTES - 30}"


def series(target, name, values, **labels):
    """Return a series as Prometheus stores it: with the labels of its target, unless it has them itself."""
    labels = {"namespace": "llm", "pod": PODS[target], "role": target} | labels
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"kvferry_{name}{{{text}}}", values


def first_tokens(slow):
    """Return the histogram of the time to the first token; with ``slow`` all take between 5 and 10 s."""
    return [
        series("router", "time_to_first_token_seconds_bucket", IDLE if slow and le == "5.0" else RISING, le=le)
        for le in ("5.0", "10.0", "+Inf")
    ]


GOOD = dict(
    [
        series("router", "ready", f"1x{MINUTES}"),
        series("router", "workers_unpaired", IDLE),
        *(series("router", "workers_lost_total", IDLE, role=role) for role in ("prefill", "decode")),
        *(series("router", "http_requests_total", IDLE, path="/v1/completions", status=status) for status in ("429", "200")),
        *first_tokens(slow=False),
        *(
            series(role, name, IDLE)
            for role in ("prefill", "decode")
            for name in ("kv_leaked_blocks", "kv_quarantined_blocks", "num_requests_waiting")
        ),
        *(series(role, "registered_routers", f"1x{MINUTES}") for role in ("prefill", "decode")),
        *(series(role, "kv_cache_usage_perc", f"0.6x{MINUTES}") for role in ("prefill", "decode")),
        series("decode", "kv_transfers_total", RISING, transport="tcp"),
        *(series("decode", "kv_transfer_failures_total", IDLE, reason=reason) for reason in ("digest", "peer_lost")),
        series("prefill", "kv_handoff_events_total", IDLE, event="lease_expired"),
    ]
)


def gone(*beginnings):
    return {name: None for name in GOOD if name.startswith(tuple(f"kvferry_{one}" for one in beginnings))}


# Alert → the differences from GOOD, and the labels of the alert in addition to its severity.
CASES = {
    "KVFerryNotReady": (dict([series("router", "ready", IDLE)]), {}),
    "KVFerryNotReady without routers": ({name: None for name in GOOD if PODS["router"] in name}, {"namespace": "llm"}),
    "KVFerryWorkersUnseen": ({name: None for name in GOOD if PODS["decode"] in name}, {"namespace": "llm", "role": "decode"}),
    "KVFerryWorkersUnpaired": (dict([series("router", "workers_unpaired", f"1x{MINUTES}")]), {}),
    "KVFerryWorkerLost": (dict([series("router", "workers_lost_total", ONE_EVENT, role="decode")]), {"role": "decode"}),
    "KVFerryLeakedBlocks": (dict([series("prefill", "kv_leaked_blocks", f"3x{MINUTES}")]), {"pod": PODS["prefill"]}),
    "KVFerryQuarantinedBlocks": (dict([series("decode", "kv_quarantined_blocks", f"3x{MINUTES}")]), {"pod": PODS["decode"]}),
    "KVFerryTransferFailures": (dict([series("decode", "kv_transfer_failures_total", RISING, reason="peer_lost")]), {}),
    "KVFerryTransferFailures from the start": (
        dict([series("decode", "kv_transfer_failures_total", RISING, reason="peer_lost")]) | gone("kv_transfers_total"),
        {},
    ),
    "KVFerryCorruptBlocks": (dict([series("decode", "kv_transfer_failures_total", ONE_EVENT, reason="digest")]), {}),
    "KVFerryLeasesExpired": (dict([series("prefill", "kv_handoff_events_total", ONE_EVENT, event="lease_expired")]), {}),
    "KVFerryPrefillShort": (
        dict(
            [
                series("prefill", "num_requests_waiting", f"9x{MINUTES}"),
                series("decode", "kv_cache_usage_perc", f"0.1x{MINUTES}"),
            ]
        ),
        {},
    ),
    "KVFerryDecodeShort": (dict([series("decode", "kv_cache_usage_perc", f"0.95x{MINUTES}")]), {}),
    "KVFerrySlowFirstToken": (dict(first_tokens(slow=True)), {}),
    "KVFerryOverloaded": (
        dict([series("router", "http_requests_total", RISING, path="/v1/completions", status="429")]),
        {},
    ),
}


@pytest.fixture(scope="module")
def groups(find):
    return find("ha", "PrometheusRule", "")["spec"]["groups"]


def run_promtool(folder, groups, changes, expected):
    """Let Prometheus evaluate the rules over GOOD with ``changes``; ``expected`` are the only alerts at 40 minutes."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    inputs = {name: values for name, values in (GOOD | changes).items() if values is not None}
    names = sorted({rule["alert"] for group in groups for rule in group["rules"]})
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in inputs.items()],
        "alert_rule_test": [{"eval_time": "40m", "alertname": name, "exp_alerts": expected.get(name, [])} for name in names],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    return subprocess.run([PROMTOOL, "test", "rules", path.name], cwd=folder, capture_output=True, text=True, check=False)


def expectation(groups, alert, labels):
    """Return the alert with its texts filled in."""
    rules = [rule for group in groups for rule in group["rules"] if rule["alert"] == alert]
    rule = next(rule for rule in rules if rule["labels"].get("role") in (None, labels.get("role")))
    filled = {
        key: re.sub(r"{{ \$labels\.(\w+) }}", lambda match: labels[match[1]], text) for key, text in rule["annotations"].items()
    }
    return {alert: [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": filled}]}


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")


@needs_promtool
def test_no_alert_fires_in_a_cluster_that_works(groups, tmp_path):
    done = run_promtool(tmp_path, groups, {}, {})
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(("changes", "labels"), CASES.values(), ids=CASES)
def test_alert_fires_in_its_case_and_no_other(groups, tmp_path, request, changes, labels):
    alert = request.node.callspec.id.split()[0]
    expected = expectation(groups, alert, labels)
    if "without routers" in request.node.callspec.id:
        assert "absent" in next(rule["expr"] for group in groups for rule in group["rules"] if rule["alert"] == alert)
    done = run_promtool(tmp_path, groups, changes, expected)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case(groups):
    assert {rule["alert"] for group in groups for rule in group["rules"]} == {name.split()[0] for name in CASES}


# ---- series that exist before their first event ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh():
    """Samples of processes that have served nothing yet."""
    router, worker = CollectorRegistry(), CollectorRegistry()
    RouterMetrics(router)
    WorkerMetrics(worker, dict.fromkeys([*ENGINE_METRICS.values(), *WORKER_METRICS], lambda: 0.0))
    p2p = P2PMetrics(worker)
    p2p.start_transports(("tcp",), set)
    p2p.read_at_scrape(lambda: 0, lambda: 0, lambda: {"lease_expired": 0})
    return [sample for registry in (router, worker) for family in registry.collect() for sample in family.samples]


def counters_of(groups):
    """Return (name, labels in addition to the target's) of every counter that an alert uses."""
    found = set()
    for group in groups:
        for rule in group["rules"]:
            for name, matchers in re.findall(r"(kvferry_\w+_total)\{([^}]*)\}", rule["expr"]):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
                found.add((name, frozenset((key, value) for key, value in labels.items() if key != "namespace")))
    return found


def test_counters_of_alerts_exist_before_their_first_event(groups, fresh):
    wanted = counters_of(groups)
    assert len(wanted) >= 6
    for name, labels in wanted:
        matching = [sample for sample in fresh if sample.name == name and labels <= set(sample.labels.items())]
        assert matching, f"{name} {dict(labels)} would begin at 1, which is no increase"
        assert all(sample.value == 0 for sample in matching)


@pytest.mark.parametrize("name", ["kv_handoffs", "request_failure", "workers_lost", "kv_transfer_failures"])
def test_failures_are_counted_from_zero(fresh, name):
    assert len([sample for sample in fresh if sample.name == f"kvferry_{name}_total"]) > 3
