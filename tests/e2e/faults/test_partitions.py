"""The network between two processes is cut and heals: no request waits without bound, no process counts as dead for good."""

from __future__ import annotations

import time
from signal import SIGKILL

import pytest

from core.config_router import RouterSection

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.profile("network")]

RETRYABLE = {"no_worker", "overloaded", "peer_lost", "router_silent"}
LONG = 640  # tokens that take longer than any heartbeat is waited for
MARGIN_S = 3.0  # for a worker to detect a silence, and for the test to read its metrics


@pytest.mark.quick_on("tcp")
def test_read_that_the_network_cuts_off_is_replaced_by_a_computation_until_it_heals(faulty):
    stream = start_and_cut(faulty)
    cut_at = time.monotonic()
    another = faulty.start(100)  # its prompt can be computed, and its blocks not be fetched
    for cut_off in (stream, another):
        assert cut_off.result().transfer["fallback_reason"] == "peer_lost"
        assert cut_off.transfer["recomputed_tokens"] > 0
    faulty.measure("partition to next token", stream.times[1] - cut_at)
    faulty.network.heal()
    faulty.plan()
    healed = faulty.start(100).result()
    faulty.assert_released(cut_at, "partition to nothing held")
    assert_handoff_succeeded(faulty, healed)
    faulty.assert_correct(stream)
    faulty.assert_correct(another)


@pytest.mark.quick_on("tcp")
def test_network_that_comes_back_at_once_costs_nothing(faulty):
    stream = start_and_cut(faulty)
    faulty.network.heal()
    faulty.let_go()
    assert_handoff_succeeded(faulty, stream)


@pytest.mark.full
@pytest.mark.quick_on("tcp")
def test_connections_that_break_in_the_midst_of_a_read_are_made_again(faulty):
    stream = start_and_cut(faulty)
    faulty.network.heal()
    reset_at = time.monotonic()
    for proxy in (faulty.network.control, faulty.network.data):
        proxy.reset()
    assert stream.result().transfer["fallback_reason"] == "peer_lost"
    faulty.measure("reset to next token", stream.times[1] - reset_at)
    faulty.assert_released(reset_at)
    faulty.assert_correct(stream)
    assert_next_handoff_succeeds(faulty)


@pytest.mark.quick_on("tcp")
def test_decode_worker_that_the_router_cannot_reach_is_replaced_and_comes_back(faulty):
    stream = faulty.start(60, LONG)
    faulty.wait_for_tokens(stream, 5)
    name = faulty.trace("posted")[0]["worker"]
    pid = faulty.cluster.pids[name]
    faulty.network.to_router[name].silence()
    cut_at = time.monotonic()
    assert faulty.gauge(name, "kvferry_num_requests_running") == 1
    assert_ended_in_time(faulty, cut_at, "partition to the end of its requests")
    faulty.wait_for_members("decode", 1)
    num_before = len(stream.token_ids)
    faulty.wait_for_tokens(stream, num_before + 10)  # of the other one
    faulty.measure("partition to next token", stream.times[num_before] - cut_at)
    stream.leave()
    faulty.check_tokens(stream.prompt, stream.token_ids)
    faulty.network.heal()
    faulty.wait_for_members("decode", 2)
    assert faulty.cluster.pids[name] == pid


@pytest.mark.full
@pytest.mark.quick_on("tcp")
def test_prefill_worker_that_the_router_cannot_reach_comes_back(faulty):
    """There is no other one, so a decode worker serves its request alone."""
    stream = faulty.start(700)
    faulty.busy("prefill", "kvferry_num_requests_running")
    faulty.network.to_router["prefill-0"].silence()
    cut_at = time.monotonic()
    faulty.wait_for_members("prefill", 0)
    faulty.assert_correct(stream)
    assert stream.transfer["fallback_reason"] == "no_prefill"
    faulty.assert_released(cut_at, "partition to nothing held")
    faulty.network.heal()
    faulty.wait_for_members("prefill", 1)
    assert_next_handoff_succeeds(faulty)


@pytest.mark.full
@pytest.mark.quick_on("tcp")
def test_requests_of_a_router_that_does_not_come_back_end_within_its_heartbeat(faulty):
    """Its workers are cut off as well, so that none of them hears of the next router."""
    streaming = faulty.start(60, LONG)
    faulty.wait_for_tokens(streaming, 3)
    faulty.plan(late=[1])
    loading = faulty.start(100)
    reader = faulty.wait_for("kept")["worker"]
    pid = faulty.cluster.pids["router"]
    for proxy in faulty.network.to_router.values():
        proxy.silence()
    killed_at = faulty.kill("router", SIGKILL)
    assert faulty.gauge(reader, "kvferry_num_requests_loading") == 1
    assert_ended_in_time(faulty, killed_at, "kill of the router to no request running")
    for stream in (streaming, loading):
        assert stream.result().broken
        faulty.check_tokens(stream.prompt, stream.token_ids)
    faulty.assert_released(killed_at)
    faulty.network.heal()
    faulty.wait_for_restart("router", pid)
    faulty.wait_for_members("decode", 2)
    faulty.wait_for_members("prefill", 1)
    assert_next_handoff_succeeds(faulty)


def start_and_cut(faulty):
    """Start a request and cut its decode worker off from the prefill worker in the midst of the read.

    Where blocks go another way than through the network, their read is still to come, and the control connection is cut.
    """
    network = faulty.network
    faulty.plan(late=[1])
    stream = faulty.start(200)
    faulty.wait_for("kept")
    if faulty.cell == "tcp":
        network.data.silence(1 << 20)  # and that is not all
        faulty.let_go()
        faulty.eventually(lambda: network.data.is_silent, "the first part of the blocks")
    network.control.silence()
    assert len(stream.token_ids) == 1
    return stream


def assert_ended_in_time(faulty, since, what):
    """Wait until no worker that is cut off is at work on requests of the router, for no longer than the default heartbeat."""
    gauges = ("kvferry_num_requests_running", "kvferry_num_requests_loading", "kvferry_num_requests_waiting")
    workers = [name for name, proxy in faulty.network.to_router.items() if proxy.is_silent]
    faulty.eventually(
        lambda: not any(faulty.gauge(worker, name) for worker in workers for name in gauges), "the end of requests"
    )
    seconds = time.monotonic() - since
    faulty.measure(what, seconds)
    assert seconds < RouterSection().heartbeat_timeout_s + MARGIN_S


def assert_next_handoff_succeeds(faulty):
    faulty.plan()
    assert_handoff_succeeded(faulty, faulty.start(100))


def assert_handoff_succeeded(faulty, stream):
    faulty.assert_correct(stream)
    assert (stream.transfer["fallback_reason"], stream.transfer["recomputed_tokens"]) == ("", 0)
    assert stream.transfer["transferred_tokens"] > 0
