"""A prefill worker is killed before, during or after the read of its blocks: the client notices nothing but a pause."""

from __future__ import annotations

import time
from signal import SIGKILL, SIGSTOP

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.quick_on("shm")
def test_prefill_worker_killed_while_it_computes_is_replaced_before_the_first_token(faulty):
    stream = faulty.start(600)
    name = faulty.busy("prefill", "kvferry_num_requests_running")
    pid = faulty.cluster.pids[name]
    killed_at = faulty.kill(name, SIGKILL)
    # A router that has just been paused gives the worker time to connect anew, in which its successor may come.
    faulty.eventually(lambda: faulty.num_members("prefill") == 1 or faulty.has_restarted(name, pid), "loss or successor")
    faulty.measure("kill to out of membership, or to a successor", time.monotonic() - killed_at)
    faulty.assert_correct(stream)
    faulty.measure("kill to first token, from another worker", stream.times[0] - killed_at)
    assert (stream.transfer["retries"], stream.transfer["fallback_reason"]) == (1, "")
    faulty.wait_for_restart(name, pid)


@pytest.mark.quick_on("shm")
def test_prefill_worker_killed_before_the_read_costs_a_computation_of_the_prompt(faulty):
    faulty.plan(late=[1])
    stream = faulty.start()
    faulty.wait_for("kept")
    assert_recomputed_after_kill(faulty, stream)


@pytest.mark.quick_on("nixl-tcp")
def test_prefill_worker_killed_with_a_read_open_costs_a_computation_of_the_prompt(faulty):
    faulty.plan(stall=[1])
    stream = faulty.start()
    faulty.wait_for("posted")
    assert_recomputed_after_kill(faulty, stream)


@pytest.mark.quick_on("nixl-tcp")
def test_prefill_worker_killed_with_bytes_on_the_way_costs_at_most_a_computation(faulty):
    """The read is posted to a stopped worker, so that over TCP it is on its way when the worker dies."""
    faulty.plan(late=[1])
    stream = faulty.start()
    faulty.wait_for("kept")
    name = faulty.holder()
    pid = faulty.cluster.pids[name]
    faulty.kill(name, SIGSTOP)
    faulty.let_go()
    faulty.wait_for("let go")
    killed_at = faulty.kill(name, SIGKILL)
    faulty.assert_correct(stream)
    faulty.measure("kill to next token", stream.times[1] - killed_at)
    if "tcp" in faulty.cell:  # elsewhere the memory of a stopped worker can be read
        assert stream.transfer["fallback_reason"] == "peer_lost"
    faulty.assert_released(killed_at)
    faulty.wait_for_restart(name, pid)


@pytest.mark.quick_on("nixl-tcp")
def test_prefill_worker_killed_after_the_read_is_not_missed(faulty):
    before = faulty.gauges("prefill", "kvferry_prompt_tokens_total")
    stream = faulty.start(max_tokens=40)
    faulty.wait_for_tokens(stream, 3)
    after = faulty.gauges("prefill", "kvferry_prompt_tokens_total")
    (name,) = [worker for worker in after if after[worker] > before[worker]]  # its lease may be over by now
    pid = faulty.cluster.pids[name]
    faulty.kill(name, SIGKILL)
    faulty.assert_correct(stream, 40)
    assert stream.transfer["fallback_reason"] == ""
    faulty.wait_for_restart(name, pid)


@pytest.mark.quick_on("shm")
def test_request_that_asks_for_it_fails_with_its_prefill_worker(faulty):
    faulty.plan(late=[1])
    stream = faulty.start(kv_transfer_params={"kv_load_failure_policy": "fail"})
    faulty.wait_for("kept")
    name = faulty.holder()
    pid = faulty.cluster.pids[name]
    killed_at = faulty.kill(name, SIGKILL)
    assert stream.result().error["code"] == "peer_lost"
    faulty.measure("kill to error", stream.ended_at - killed_at)
    faulty.check_tokens(stream.prompt, stream.token_ids)
    faulty.assert_released(killed_at)
    faulty.wait_for_restart(name, pid)


def assert_recomputed_after_kill(faulty, stream):
    name = faulty.holder()
    pid = faulty.cluster.pids[name]
    killed_at = faulty.kill(name, SIGKILL)
    faulty.measure("kill to fence", faulty.wait_for("fenced")["at"] - killed_at)
    faulty.assert_correct(stream)
    faulty.measure("kill to next token", stream.times[1] - killed_at)
    assert stream.transfer["fallback_reason"] == "peer_lost"
    assert stream.transfer["recomputed_tokens"] > 0
    faulty.assert_released(killed_at)
    faulty.wait_for_restart(name, pid)
