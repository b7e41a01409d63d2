"""The counts of a step on their way through vLLM: added up over ranks and steps, logged, and shown to Prometheus."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm_engine import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = """
from types import SimpleNamespace
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from agent.server_metrics import read_load
from connectors.vllm.counts import RankCounts, SchedulerCounts
from connectors.vllm.metrics import HandoffMetrics, HandoffStats, stats_of_rank, stats_of_scheduler

kinds, labels = {kind: kind for kind in (Counter, Gauge, Histogram)}, {0: ["tiny", "0"], 1: ["tiny", "1"]}
metrics = HandoffMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["model", "engine"], labels)

def value(name, **labels):
    return REGISTRY.get_sample_value("vllm:kvferry_" + name, {"model": "tiny", "engine": "1"} | labels)

assert HandoffStats().is_empty() and stats_of_rank(RankCounts()).is_empty()
assert stats_of_scheduler(SchedulerCounts(refusals={}, held_blocks=None)).is_empty()
assert not stats_of_scheduler(SchedulerCounts(refusals={}, held_blocks=0)).is_empty()
assert value("loads_total") == value("held_blocks") == 0

ranks = [RankCounts(1, 10, 1000, 500.0, 250.0, {"stale": 1}), RankCounts(2, 20, 2000, 500.0, 250.0, {"stale": 1, "digest": 1})]
step = stats_of_rank(ranks[0]).aggregate(stats_of_rank(ranks[1]))
step = step.aggregate(stats_of_scheduler(SchedulerCounts({"layout": 1}, 7)))
received = HandoffStats(step.to_dict())
metrics.observe(received.data, 1)
metrics.observe(stats_of_scheduler(SchedulerCounts({"layout": 2}, None)).data, 1)
assert (value("loads_total"), value("verified_blocks_total"), value("bytes_total")) == (3, 30, 3000)
assert (value("transfer_seconds_total"), value("verify_seconds_total")) == (1.0, 0.5)
assert (value("failures_total", reason="stale"), value("failures_total", reason="digest")) == (2, 1)
assert (value("refusals_total", reason="layout"), value("held_blocks")) == (3, 7)
assert value("loads_total", engine="0") == 0

shown = read_load(generate_latest().decode())
assert (shown.handoffs.num_loads, shown.handoffs.num_bytes, shown.handoffs.num_verified_blocks) == (3, 3000, 30)
assert (shown.handoffs.failures, shown.num_held_blocks) == ({"stale": 2, "digest": 1, "layout": 3}, 7)

assert "held_blocks" not in stats_of_rank(ranks[0]).reduce()
logged = received.aggregate(stats_of_scheduler(SchedulerCounts({}, 0))).reduce()
assert logged == {
    "loads": 3, "verified_blocks": 30, "bytes": 3000, "transfer_seconds": 1.0, "verify_seconds": 0.5,
    "failures (stale)": 2, "failures (digest)": 1, "refusals (layout)": 1, "held_blocks": 0,
}, logged
"""

OF_CONNECTOR = """
from types import SimpleNamespace
from connectors.vllm.connector import KvferryConnector
from connectors.vllm.counts import RankCounts
from connectors.vllm.metrics import stats_of_rank
from connectors.vllm.orders import QuarantineNews, RankReports
from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.scheduler_side import SchedulerSide, TransferGroups
from core.ids import RandomIds
from tests.connectors.vllm.fake_requests import engine
from tests.connectors.vllm.test_counts import Pool

connector = KvferryConnector.__new__(KvferryConnector)
connector._is_scheduler, connector._ranks_have_counted = True, False
connector._scheduler_side = SchedulerSide(engine(), PeerRules(()), RandomIds(), TransferGroups((0,), (None,)))
connector._scheduler_side.bind_block_pool(Pool(9))

def told(stats, reports=None):
    output = SimpleNamespace(
        finished_sending=None, finished_recving=None, kv_connector_worker_meta=reports, kv_connector_stats=stats
    )
    connector.update_connector_output(output)
    found = connector.get_kv_connector_stats()
    return None if found is None else (stats.aggregate(found) if stats is not None else found).reduce()["held_blocks"]

assert told(None) is None
assert told(None, RankReports([QuarantineNews(added=(3, 4))])) == 2
assert told(None) is None
assert told(stats_of_rank(RankCounts(1, 10, 1000, 500.0, 250.0))) == 2
assert told(None) is None
assert connector.get_kv_connector_stats() is None
"""


def run_in_vllm(program):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_TARGET_DEVICE": "cpu"}
    command = [str(vllm_python()), "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_counts_are_added_up_over_ranks_and_steps():
    run_in_vllm(PROGRAM)


def test_the_held_blocks_are_told_with_the_counts_of_the_ranks():
    run_in_vllm(OF_CONNECTOR)
