"""The router's index of contents on real processes: the workers' reports fill it, and a restarted router places by prefix."""

from __future__ import annotations

import pytest

from kvferry.local import LocalCluster

NUM_BLOCKS = 24  # of two prompts of 6 blocks, each on a prefill worker and on the decode worker

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_prefills(cluster_config, tiny_model, serve, tmp_path_factory):
    config = cluster_config(*tiny_model, "local.num_prefill=2")
    with (
        LocalCluster(config, supervise=True, log_dir=tmp_path_factory.mktemp("contents")) as cluster,
        serve("2p1d", cluster) as found,
    ):
        yield found


def indexed(served):
    return served.gauges("router")["kvferry_routing_indexed_blocks"]


def routing_of(served, prompt):
    return served.complete(prompt, max_tokens=2)["usage"]["kv_transfer"]["routing"][0]


def test_a_restarted_router_places_by_prefix(two_prefills, eventually):
    prompts = [[300 + (7 * start + step) % 1500 for step in range(400)] for start in range(2)]
    for prompt in prompts:
        two_prefills.complete(prompt, max_tokens=2)
    eventually(lambda: indexed(two_prefills) == NUM_BLOCKS, "reports of all three workers")
    cluster, pid = two_prefills.cluster, two_prefills.cluster.pids["router"]
    cluster.kill("router")
    eventually(lambda: cluster.pids.get("router", pid) != pid, "restart of the router")
    cluster.wait_until_ready()
    eventually(lambda: indexed(two_prefills) == NUM_BLOCKS, "their snapshots")
    for prompt in prompts:
        routing = routing_of(two_prefills, prompt)
        assert routing["reason"] == "prefix"
        assert routing["predicted_hit_tokens"] == routing["hit_tokens"] == 384
        assert routing["candidates"] == 2
