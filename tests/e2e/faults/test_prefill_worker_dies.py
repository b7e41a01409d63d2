"""A prefill worker is killed: before, during and after the read of its blocks. The client never notices more than a pause."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.quick_on("nixl")
def test_prefill_worker_killed_after_the_read_is_not_missed(faulty):
    stream = faulty.start(max_tokens=24)
    faulty.wait_for_tokens(stream, 4)
    assert faulty.trace("posted")
    holder = "prefill-0"
    pid = faulty.cluster.pids[holder]
    faulty.kill(holder, signal.SIGKILL)
    faulty.assert_correct(stream, 24)
    faulty.wait_for_restart(holder, pid)
