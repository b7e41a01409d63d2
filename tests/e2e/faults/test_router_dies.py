"""The router is killed and comes back: its requests are aborted on the workers, and retries are served."""

from __future__ import annotations

from signal import SIGKILL

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.quick_on("shm")
def test_requests_of_a_killed_router_end_on_the_workers_and_clients_may_retry(faulty):
    streaming = faulty.start(60, 400)
    faulty.wait_for_tokens(streaming, 3)
    faulty.plan(late=[1])
    loading = faulty.start(100)
    faulty.wait_for("kept")
    pid = faulty.cluster.pids["router"]
    killed_at = faulty.kill("router", SIGKILL)
    for stream in (streaming, loading):
        assert stream.result().broken
        faulty.check_tokens(stream.prompt, stream.token_ids)
    faulty.assert_released(killed_at)
    faulty.plan()
    faulty.wait_for_restart("router", pid)
    retried = faulty.start(100)
    faulty.assert_correct(retried)
    faulty.measure("kill to an answer of the next router", retried.ended_at - killed_at)
