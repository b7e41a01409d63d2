"""A prefill worker freezes, and its bytes come after their load has ended: they never land in a block of another."""

from __future__ import annotations

import time
from http import HTTPStatus
from signal import SIGCONT, SIGSTOP

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.quick_on("nixl-tcp")
def test_bytes_of_a_worker_that_thaws_late_spoil_no_other_block(faulty):
    faulty.plan(late=[1])
    stream = faulty.start(200)
    faulty.wait_for("kept")
    frozen = faulty.holder()
    frozen_at = faulty.kill(frozen, SIGSTOP)
    faulty.let_go()  # the read goes to a worker that does not answer
    faulty.assert_correct(stream)
    faulty.measure("freeze to next token", stream.times[1] - frozen_at)
    if "tcp" in faulty.cell:  # elsewhere the memory of a stopped worker can be read
        assert stream.transfer["fallback_reason"] in {"deadline", "peer_lost"}  # it, or the silence of the control connection
    faulty.wait_for_members("prefill", 1)
    others = use_every_block(faulty)
    faulty.kill(frozen, SIGCONT)
    assert_all_correct(faulty, others)
    faulty.assert_released()
    faulty.wait_for_members("prefill", 2)  # UCX may end a process that thaws after a fence; that is a death like any other


@pytest.mark.full
@pytest.mark.quick_on("nixl-tcp")
@pytest.mark.profile("short deadlines")
def test_deadline_ends_the_read_of_a_frozen_worker_before_its_silence_does(faulty):
    """Another read of the same owner ends before it freezes, which spares it the fence until a second deadline has passed."""
    faulty.plan(late=[1], ignore_cancel=True)
    stream = faulty.start(200)
    faulty.wait_for("kept")
    tiny = faulty.start(20, 2)
    tiny.result()  # is compared below: the deadline runs, and the oracle may take longer
    frozen_at = faulty.kill("prefill-0", SIGSTOP)
    if "tcp" in faulty.cell:  # elsewhere the memory of a stopped worker can be read, so the read does not begin
        faulty.let_go()
    faulty.wait_for("cancelled")
    faulty.eventually(lambda: faulty.gauge("decode-0", "kvferry_kv_quarantined_blocks"), "quarantine")
    assert not faulty.trace("fenced")
    assert "prefill-0: no answer" in faulty.held()  # a check that a stopped worker would pass shows nothing
    faulty.assert_correct(tiny, 2)
    faulty.assert_correct(stream)
    faulty.measure("freeze to next token", stream.times[1] - frozen_at)
    assert stream.transfer["fallback_reason"] == "deadline"
    assert stream.transfer["recomputed_tokens"] > 0
    faulty.wait_for("fenced")
    faulty.eventually(lambda: not faulty.gauge("decode-0", "kvferry_kv_quarantined_blocks"), "the end of the quarantine")
    faulty.measure("freeze to the end of the quarantine", time.monotonic() - frozen_at)
    faulty.kill("prefill-0", SIGCONT)
    faulty.assert_released(frozen_at)
    faulty.eventually(
        lambda: faulty.start(20, 2).result().status == HTTPStatus.OK, "an answer: nobody takes it for lost any more"
    )


@pytest.mark.quick_on("nixl")
@pytest.mark.profile("one reader")
def test_bytes_that_land_after_a_deadline_spoil_no_other_block(faulty):
    """Every transport behaves as NIXL does: an abandoned read still ends, and writes into its buffers.

    Other reads of the same owner end before the deadline, which shows that it is alive and spares it the fence for a while.
    There are fewer free blocks than are wanted, so those that the late read was given would be taken if they were free.
    """
    faulty.plan(late=[1], ignore_cancel=True)
    stream = faulty.start(160, 40)
    faulty.wait_for("kept")
    for tiny in [faulty.start(20, 2) for _ in range(4)]:  # of both owners in turn
        faulty.assert_correct(tiny, 2)
    faulty.end_deadlines()
    faulty.wait_for("cancelled")
    others = [faulty.start(96, 40, offset=20 * number) for number in range(3)]
    faulty.wait_for_steps("decode-0", 6)  # so all blocks that were free have been allocated and written
    assert faulty.gauge("decode-0", "kvferry_kv_quarantined_blocks") == 10
    faulty.let_go()
    assert faulty.wait_for("landed late")["error"] == ""
    assert_all_correct(faulty, [stream, *others])
    assert stream.transfer["fallback_reason"] == "deadline"
    faulty.assert_released()


@pytest.mark.quick_on("nixl")
@pytest.mark.profile("one reader")
def test_bytes_that_land_after_an_abort_spoil_no_other_block(faulty):
    faulty.plan(late=[1], ignore_cancel=True)
    stream = faulty.start(200)
    faulty.wait_for("kept")
    stream.leave()
    faulty.wait_for("cancelled")
    faulty.eventually(lambda: faulty.gauge("decode-0", "kvferry_kv_quarantined_blocks") >= 13, "quarantine")
    assert not faulty.gauge("decode-0", "kvferry_num_requests_loading")
    other = faulty.start(160, 40)  # has to make do with what is left of the pool
    faulty.wait_for_tokens(other, 2)
    faulty.let_go()
    assert faulty.wait_for("landed late")["error"] == ""
    faulty.assert_correct(other, 40)
    faulty.assert_released()


def use_every_block(faulty):
    """Start so many answers that every free block of the decode workers is used again, and return them once they run."""
    streams = [faulty.start(200, 40, offset=20 * number) for number in range(6)]
    for stream in streams:
        faulty.wait_for_tokens(stream, 2)
    return streams


def assert_all_correct(faulty, streams):
    for stream in streams:
        faulty.assert_correct(stream, 40)
