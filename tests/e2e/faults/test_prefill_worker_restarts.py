"""A prefill worker comes back at the same address under the same name: it is another peer, and no other process restarts."""

from __future__ import annotations

import time
from signal import SIGKILL

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.profile("one reader")]


@pytest.mark.quick_on("nixl")
def test_restarted_prefill_worker_is_read_from_again_by_the_same_decode_worker(faulty):
    addresses = ask_both_owners(faulty)
    pids = faulty.cluster.pids
    killed_at = faulty.kill("prefill-0", SIGKILL)
    faulty.wait_for_restart("prefill-0", pids["prefill-0"])
    faulty.measure("kill to the next life", time.monotonic() - killed_at)
    assert ask_both_owners(faulty) == addresses
    assert faulty.cluster.pids["decode-0"] == pids["decode-0"]


@pytest.mark.quick_on("nixl")
def test_handoff_of_a_former_incarnation_is_refused_and_computed_again(faulty):
    """A request waits at the decode worker for blocks, and its owner is another process by the time it gets them."""
    faulty.plan(late=[1])
    first = faulty.start(400)
    faulty.wait_for("kept")
    faulty.eventually(lambda: not faulty.held_leases(), "the end of the first lease")
    stream = faulty.start(120)
    owner = faulty.holder()
    pids = faulty.cluster.pids
    faulty.busy("decode", "kvferry_num_requests_waiting")
    faulty.kill(owner, SIGKILL)
    faulty.wait_for_restart(owner, pids[owner])
    faulty.let_go()
    faulty.assert_correct(first)
    faulty.assert_correct(stream)
    assert stream.transfer["fallback_reason"] == "stale"
    assert stream.transfer["recomputed_tokens"] > 0
    assert faulty.cluster.pids["decode-0"] == pids["decode-0"]


def ask_both_owners(faulty):
    """Send a few prompts that need a handoff, and return the addresses of the workers that were read."""
    faulty.plan()
    for number in range(4):
        stream = faulty.start(60, offset=number)
        faulty.assert_correct(stream)
        assert stream.transfer["fallback_reason"] == ""
    addresses = {note["peer"] for note in faulty.trace("posted")}
    assert len(addresses) == 2
    return addresses
