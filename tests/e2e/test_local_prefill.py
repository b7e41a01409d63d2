"""A real decode worker computes a prompt itself while the prefill worker is busy, and the answer is the same."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.local import LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full]

NUM_TOKENS = 12
NUM_LONG = 500  # tokens of a prompt that keeps the prefill worker busy
NUM_SHORT = 60


@pytest.fixture
def pair(cluster_config, serve, tmp_path):
    """A pair of workers that has served nothing yet; the prefill worker may be silent for a minute."""
    config = cluster_config("router.local_prefill_itl_ms=50", "router.heartbeat_timeout_s=60")
    with LocalCluster(config, log_dir=tmp_path) as cluster, serve("local", cluster) as found:
        yield found


def test_a_decode_worker_computes_a_prompt_while_the_prefill_worker_is_busy(pair, corpus, assert_token_identical, eventually):
    """The prefill worker is stopped with two long prompts. Before the first answer a prompt costs by its tokens.

    So both long prompts are its own, since the second waits no longer than computing it takes; a short one waits longer.
    """
    prompts = [corpus[:NUM_LONG], corpus[100 : 100 + NUM_LONG]]
    short = corpus[50 : 50 + NUM_SHORT]
    pair.cluster.kill("prefill-0", signal.SIGSTOP)
    with ThreadPoolExecutor(max_workers=len(prompts)) as clients:
        try:
            waiting = []
            for prompt in prompts:
                waiting.append(clients.submit(pair.complete, prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
                eventually(lambda: num_in_flight(pair) == len(waiting), "a placement at the prefill worker")
            local = pair.complete(short, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert not any(answer.done() for answer in waiting)
        finally:
            pair.cluster.kill("prefill-0", signal.SIGCONT)
        handed_off = [answer.result() for answer in waiting]
    assert [reason_of(answer) for answer in (local, *handed_off)] == ["local", "load", "load"]
    for prompt, answer in zip([short, *prompts], [local, *handed_off], strict=True):
        assert len(answer["choices"][0]["token_ids"]) == NUM_TOKENS
        assert_token_identical(prompt, answer["choices"][0]["token_ids"])
    outcomes = pair.client.get("/status.json").json()["handoffs"]
    assert outcomes == {"local": 1, "loaded": 2}
    eventually(lambda: not pair.held(), f"release of {pair.held()}")


def reason_of(answer) -> str:
    (placed,) = answer["usage"]["kv_transfer"]["routing"]
    return placed["reason"]


def num_in_flight(served) -> int:
    return served.client.get("/status.json").json()["num_requests"]
