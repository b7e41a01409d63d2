"""Faults one at a time, under load, over two prefill and two decode servers: all answers are those of vLLM alone."""

import contextlib
import time

import pytest

from tests.support.http_relay import HttpRelay
from tests.support.routed_servers import RoutedServers
from tests.vllm.http.fault_cluster import FaultCluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.full]

GENERATE = "/inference/v1/generate"
ROUTER_FREEZE_S = 8.0  # longer than the heartbeat timeout of its workers
EITHER = pytest.mark.parametrize("name", ["p0", "d0"])


@EITHER
def test_agent_is_killed(faulty, name):
    with faulty.load() as load:
        faulty.routed.kill(name)
        load.wait_for_answers()


@EITHER
def test_agent_is_frozen(faulty, name):
    with faulty.load() as load, faulty.frozen(faulty.routed.pid(name)):
        load.wait_for_answers()


@EITHER
@pytest.mark.parametrize("process", ["EngineCore", "Worker"])
def test_process_of_the_server_is_frozen(faulty, name, process):
    with faulty.load() as load, faulty.frozen(faulty.servers[name].process(process).pid):
        load.wait_for_answers()


@EITHER
def test_server_is_frozen_for_longer_than_the_patience_of_its_agent(faulty, name):
    with faulty.load() as load, faulty.frozen(*faulty.servers[name].pids):
        assert faulty.routed.wait_for_end(name) == 1
        load.wait_for_answers(1)


@EITHER
def test_agent_is_drained(faulty, name):
    with faulty.load() as load:
        began = time.monotonic()
        assert faulty.routed.drain_agent(name) == 0
        faulty.note("drain", time.monotonic() - began)
        load.wait_for_answers(1)


@EITHER
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_server_is_paused(faulty, name, mode):
    with faulty.load() as load, faulty.paused(name, mode):
        load.wait_for_answers()


@pytest.mark.parametrize("relay", ["control", "data"])
def test_way_of_the_blocks_is_silent(faulty, relay):
    with faulty.load() as load, faulty.silent(relay):
        load.wait_for_answers()


@pytest.mark.parametrize("relay", ["control", "data"])
def test_way_of_the_blocks_is_cut(faulty, relay):
    with faulty.load() as load:
        faulty.relays[relay].reset()
        load.wait_for_answers()


def test_router_is_frozen(faulty):
    with faulty.load() as load:
        with faulty.frozen(faulty.routed.pid("router")):
            time.sleep(ROUTER_FREEZE_S)
        load.wait_for_answers()


def test_router_is_killed_and_started_again(faulty):
    """Its connections break, so clients see that; those that ask again are served."""
    with faulty.load(may_break=True) as load:
        faulty.routed.kill("router")
        faulty.routed.start_router()
        faulty.routed.wait_for(f"{faulty.routed.base_url}/ready")
        load.wait_for_answers()


# ---- a server that answers badly -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def behind_a_relay(faulty, folder, name):
    """Yield a cluster of the same servers, and a relay between a server and its agent."""
    with HttpRelay(faulty.servers[name].base_url, GENERATE) as relay:
        servers = {each: relay if each == name else server for each, server in faulty.servers.items()}
        roles = {each: (server, "prefill" if each[0] == "p" else "decode") for each, server in servers.items()}
        with RoutedServers(folder, faulty.model, roles) as routed:
            cluster = FaultCluster(routed, faulty.servers)
            cluster.name, cluster.measured = faulty.name, faulty.measured
            yield cluster, relay


@EITHER
@pytest.mark.parametrize("status", [500, 503])
def test_server_answers_requests_with_errors(faulty, tmp_path, name, status):
    with behind_a_relay(faulty, tmp_path, name) as (cluster, relay), cluster.load() as load:
        relay.status = status
        wait_until(lambda: relay.num_failed)
        load.wait_for_answers()
        relay.heal()
        load.wait_for_answers(1)


@EITHER
def test_server_is_slow(faulty, tmp_path, name):
    with behind_a_relay(faulty, tmp_path, name) as (cluster, relay), cluster.load() as load:
        relay.delay_s = 0.2
        load.wait_for_answers()
        relay.heal()


# ---- one engine of each role ---------------------------------------------------------------------------------------------


@EITHER
def test_the_only_agent_of_a_role_is_killed_and_started_again(faulty, name):
    with faulty.without("p1", "d1"), faulty.load(may_refuse=True) as load:
        faulty.routed.kill(name)
        faulty.routed.start_agent(name)
        load.wait_for_answers()


@EITHER
def test_the_only_engine_of_a_role_is_frozen_for_a_while(faulty, name):
    """Answers that have begun wait for it; new requests are refused until it goes on."""
    with faulty.without("p1", "d1"), faulty.load(may_refuse=True) as load:
        with faulty.frozen(faulty.core(name).pid):
            wait_until(lambda: faulty.agent_metric("router", "kvferry_workers_stalled"))
        load.wait_for_answers()


# ---- clients that leave --------------------------------------------------------------------------------------------------


def test_client_leaves_while_its_request_waits_for_a_worker(faulty):
    stream = faulty.stream(40, max_tokens=900)
    wait_until(lambda: stream.token_ids)
    for name in ("d0", "d1"):
        faulty.routed.kill(name)
    wait_until(lambda: faulty.agent_metric("router", "kvferry_num_requests_waiting"))
    stream.leave()
    wait_until(lambda: not faulty.agent_metric("router", "kvferry_num_requests_waiting"))


@pytest.mark.parametrize("names", [("p0", "p1"), ("d0", "d1")], ids=["prefill", "decode before its first token"])
def test_client_leaves_while_its_request_is_computed(faulty, names):
    with faulty.frozen(*(faulty.core(name).pid for name in names)):
        stream = faulty.stream(max_tokens=40)
        wait_until(lambda: faulty.has_work(*names))
        stream.leave()
        wait_until(lambda: not faulty.has_work(*names))


def test_client_leaves_while_blocks_are_read(faulty):
    with faulty.without("p1"), faulty.silent("data"):
        stream = faulty.stream(500, max_tokens=40)
        loading = "vllm:num_requests_kv_fetch_by_stage"
        wait_until(lambda: sum(faulty.servers[name].metric(loading, stage="in_progress") for name in ("d0", "d1")))
        stream.leave()
        wait_until(lambda: not faulty.has_work("d0", "d1"))


def test_client_leaves_in_the_midst_of_its_answer(faulty):
    stream = faulty.stream(40, max_tokens=900)
    wait_until(lambda: stream.token_ids)
    stream.leave()
    wait_until(lambda: not faulty.has_work("d0", "d1"))
    faulty.assert_no_wrong_token(stream)
