"""What a real router promises of placements: a session's worker, also after a restart, and no wait that must be in vain."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.local import LocalCluster
from tests.e2e.conftest import MODEL, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SESSIONS = [f"session-{number}" for number in range(8)]
NUM_LONG = 400


def prompts(start: int, number: int, length: int) -> list[list[int]]:
    """Return prompts of which none is the beginning of another."""
    return [[300 + start + index, *(300 + (7 * index + step) % 1500 for step in range(length))] for index in range(number)]


def worker_of(served: Served, answer: dict) -> str:
    (timeline,) = served.client.get("/status/requests.json", params={"id": answer["id"]}).json()["found"]
    return timeline["decode"]


@pytest.mark.full
def test_a_session_keeps_its_worker_when_the_router_restarts(cluster_config, tiny_model, serve, tmp_path, eventually):
    config = cluster_config(*tiny_model, "local.aggregated=true", "local.num_prefill=0", "local.num_decode=2")
    with LocalCluster(config, log_dir=tmp_path) as cluster, serve("aggregated", cluster) as served:
        placed = []
        for turn in range(3):
            turns = zip(SESSIONS, prompts(100 * turn, len(SESSIONS), 40), strict=True)
            answers = [served.complete(prompt, session_id=session, max_tokens=2) for session, prompt in turns]
            placed.append([worker_of(served, answer) for answer in answers])
            if turn == 1:
                cluster.restart("router")
                eventually(
                    lambda: len(served.client.get("/status.json").json()["workers"]) == 2, "both workers at the new router"
                )
    assert placed[0] == placed[1] == placed[2]
    assert len(set(placed[0])) == 2


def test_a_request_that_cannot_keep_its_time_is_refused_at_once(cluster_config, tiny_model, serve, tmp_path, eventually):
    config = cluster_config(*tiny_model, "router.heartbeat_timeout_s=60")
    with LocalCluster(config, log_dir=tmp_path) as cluster, serve("shm", cluster) as served:
        served.complete(prompts(0, 1, NUM_LONG)[0], max_tokens=2)
        waiting_prompts = prompts(100, 12, NUM_LONG)
        cluster.kill("prefill-0", signal.SIGSTOP)
        with ThreadPoolExecutor(max_workers=len(waiting_prompts)) as clients:
            try:
                waiting = [clients.submit(served.complete, prompt, max_tokens=2) for prompt in waiting_prompts]
                eventually(lambda: served.gauges("router")["kvferry_num_requests_running"] == len(waiting), "placements")
                body = {"model": MODEL, "prompt": prompts(200, 1, 40)[0], "max_tokens": 2, "timeout_s": 0.02}
                refused = served.client.post("/v1/completions", json=body)
                assert not any(answer.done() for answer in waiting)
            finally:
                cluster.kill("prefill-0", signal.SIGCONT)
            assert all(answer.result()["choices"][0]["token_ids"] for answer in waiting)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_unreachable")
        assert int(refused.headers["retry-after"]) > 0
        eventually(lambda: not served.held(), f"release of {served.held()}")
