"""Clients disconnect while their request waits, is computed, is handed off, or streams: everything it held is free again."""

from __future__ import annotations

import time
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def leave(faulty, stream):
    assert not stream.has_ended
    left_at = stream.leave()
    faulty.assert_released(left_at)


@pytest.mark.quick_on("shm")
def test_client_that_leaves_the_queue_leaves_nothing(faulty):
    """Both prefill workers are stopped, so the request waits; when they continue, its abort follows it at once."""
    workers = ("prefill-0", "prefill-1")
    for name in workers:
        faulty.kill(name, SIGSTOP)
    stream = faulty.start()
    faulty.eventually(lambda: faulty.samples("router")["kvferry_num_requests_running",], "the request at the router")
    stream.leave()
    faulty.eventually(lambda: not faulty.samples("router")["kvferry_num_requests_running",], "its end")
    for name in workers:
        faulty.kill(name, SIGCONT)
    faulty.assert_released(stream.ended_at)
    assert stream.token_ids == []


@pytest.mark.quick_on("shm")
def test_client_that_leaves_during_the_prefill_leaves_nothing(faulty):
    stream = faulty.start(700)
    faulty.busy("prefill", "kvferry_num_requests_running")
    leave(faulty, stream)
    assert stream.token_ids == []


@pytest.mark.quick_on("nixl-tcp")
def test_client_that_leaves_during_the_handoff_leaves_nothing(faulty):
    """Its read is still to come: what it may write into is kept from others until the read has ended."""
    faulty.plan(late=[1], ignore_cancel=True)
    stream = faulty.start()
    reader = faulty.wait_for("kept")["worker"]
    left_at = stream.leave()
    faulty.eventually(lambda: faulty.gauge(reader, "kvferry_kv_quarantined_blocks"), "quarantine")
    assert not faulty.gauge(reader, "kvferry_num_requests_loading")
    faulty.let_go()
    faulty.wait_for("landed late")
    faulty.assert_released(left_at)


@pytest.mark.quick_on("shm")
def test_client_that_leaves_in_mid_stream_leaves_nothing(faulty):
    stream = faulty.start(100, 600)
    faulty.wait_for_tokens(stream, 4)
    leave(faulty, stream)
    faulty.check_tokens(stream.prompt, stream.token_ids)


@pytest.mark.quick_on("nixl")
@pytest.mark.profile("one reader")
def test_client_that_leaves_while_its_request_waits_for_blocks_leaves_nothing(faulty):
    """Nearly all blocks of the decode worker belong to another request, whose read is still to come."""
    faulty.plan(late=[1])
    other = faulty.start(400)
    faulty.wait_for("kept")
    stream = faulty.start(120)
    reader = faulty.busy("decode", "kvferry_num_requests_waiting")
    assert not stream.has_ended
    left_at = stream.leave()
    faulty.eventually(lambda: not faulty.gauge(reader, "kvferry_num_requests_waiting"), "the end of the request")
    faulty.measure("leaving to the end of the request", time.monotonic() - left_at)
    faulty.let_go()
    faulty.assert_correct(other)
    faulty.assert_released()


@pytest.mark.quick_on("nixl")
@pytest.mark.profile("one reader")
def test_client_that_leaves_while_its_request_waits_at_the_router_leaves_nothing(faulty):
    """The only decode worker is lost, so that the router keeps the request until its next incarnation arrives."""
    stream = faulty.start(100, 250)
    faulty.wait_for_tokens(stream, 4)
    pid = faulty.cluster.pids["decode-0"]
    faulty.kill("decode-0", SIGKILL)
    faulty.eventually(lambda: faulty.samples("router")["kvferry_num_requests_waiting",], "the request in the router's queue")
    assert not stream.has_ended
    stream.leave()
    for name in ("waiting", "running"):
        faulty.eventually(lambda name=name: not faulty.samples("router")[f"kvferry_num_requests_{name}",], f"the end of {name}")
    faulty.check_tokens(stream.prompt, stream.token_ids)
    faulty.wait_for_restart("decode-0", pid)
    faulty.assert_released()
