"""A decode worker is killed: another one continues from the client's tokens, and the client sees one answer."""

from __future__ import annotations

from signal import SIGKILL

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.quick_on("nixl-tcp")
def test_decode_worker_killed_during_the_read_is_replaced(faulty):
    faulty.plan(stall=[1])
    stream = faulty.start()
    name = faulty.wait_for("posted")["worker"]
    faulty.let_go()  # for the next reader; the killed one has no time to look
    kill_and_finish(faulty, stream, name, 12)


@pytest.mark.quick_on("shm")
def test_decode_worker_killed_in_mid_stream_is_replaced_without_a_break(faulty):
    stream = faulty.start(max_tokens=40)
    faulty.wait_for_tokens(stream, 5)
    kill_and_finish(faulty, stream, faulty.trace("posted")[0]["worker"], 40)


@pytest.mark.quick_on("shm")
def test_sampled_answer_continues_with_the_same_random_numbers_on_another_worker(faulty):
    # With this seed no random number comes closer than 0.005 to the border between two tokens.
    fields = {"temperature": 0.9, "seed": 5, "max_tokens": 30}
    expected = faulty.start(**fields).result().token_ids
    faulty.plan()
    stream = faulty.start(**fields)
    faulty.wait_for_tokens(stream, 5)
    name = faulty.trace("posted")[0]["worker"]
    pid = faulty.cluster.pids[name]
    faulty.kill(name, SIGKILL)
    stream.result()
    assert (stream.error, stream.broken, stream.token_ids) == (None, "", expected)
    faulty.wait_for_restart(name, pid)


def kill_and_finish(faulty, stream, name, num_tokens):
    pid = faulty.cluster.pids[name]
    num_before = len(stream.token_ids)
    killed_at = faulty.kill(name, SIGKILL)
    faulty.assert_correct(stream, num_tokens)
    assert stream.transfer["retries"] == 1
    faulty.measure("kill to next token, from another worker", stream.times[num_before] - killed_at)
    faulty.assert_released(killed_at)
    faulty.wait_for_restart(name, pid)
