"""Faults under load, over two ``vllm serve``, each with an agent for prompts and one for answers: no client sees any.

The whole table, over four servers, is in ``test_router_fault_table.py`` and ``test_router_lost_servers.py``.
"""

import time

import pytest

from tests.support.routed_servers import RoutedServers
from tests.vllm.http.fault_cluster import FaultCluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

FREEZE_S = 3.0  # shorter than the router's heartbeat timeout


@pytest.fixture(scope="module")
def lasting_cluster(servers, served_model, tmp_path_factory):
    p, d = servers
    servers_of = {"p0": p, "d0": d, "p1": d, "d1": p}
    roles = {name: (server, "prefill" if name[0] == "p" else "decode") for name, server in servers_of.items()}
    with RoutedServers(tmp_path_factory.mktemp("faults"), served_model, roles, "agent.patience_s=30") as routed:
        yield FaultCluster(routed, servers_of)


@pytest.fixture
def cluster(lasting_cluster, request):
    """Yield the cluster; afterwards it is whole and holds nothing."""
    lasting_cluster.name, lasting_cluster.measured = request.node.name, request.node.user_properties
    yield lasting_cluster
    lasting_cluster.make_whole()
    lasting_cluster.assert_whole()


@pytest.mark.parametrize("name", ["d0", pytest.param("p0", marks=pytest.mark.full)])
def test_answers_go_on_when_an_agent_is_killed(cluster, name):
    with cluster.load() as load:
        cluster.routed.kill(name)
        load.wait_for_answers(3)


def test_answers_go_on_elsewhere_while_an_engine_core_is_frozen(cluster):
    with cluster.load() as load, cluster.frozen(cluster.core("d0").pid):
        load.wait_for_answers(3)


def test_answers_go_on_when_the_router_was_frozen(cluster):
    with cluster.load() as load:
        with cluster.frozen(cluster.routed.pid("router")):
            time.sleep(FREEZE_S)
        load.wait_for_answers(3)


def test_a_client_that_leaves_during_the_prefill_leaves_nothing(cluster):
    with cluster.frozen(*(cluster.core(name).pid for name in ("p0", "p1"))):
        stream = cluster.stream(max_tokens=40)
        wait_until(lambda: cluster.has_work("p0", "p1"))
        stream.leave()
        wait_until(lambda: not cluster.has_work("p0", "p1"))
