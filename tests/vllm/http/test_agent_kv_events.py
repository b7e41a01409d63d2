"""Our router knows what a real ``vllm serve`` holds, by the agent that re-keys its KV events."""

from __future__ import annotations

import random
import time

import httpx
import pytest

from kvferry.cluster_plan import free_ports
from kvferry.vllm_plan import REPLAY_SUFFIX, VllmServerPlan
from tests.support.routed_servers import RoutedServers
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.vllm_server import MODEL, VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

WAIT_S = 60.0
BLOCK, NUM_BLOCKS = 32, 40
WORDS = random.Random(3)


@pytest.fixture(scope="module")
def routed(served_model, tmp_path_factory):
    """Yield a router over one aggregated server, which publishes as `kvferry serve` lets it."""
    folder = tmp_path_factory.mktemp("events")
    port = free_ports(1)[0]
    plan = VllmServerPlan(worker="w", role="aggregated", ports=range(port, port + 17), gpus=())
    arguments = [
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--enable-scale-out"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(NUM_BLOCKS), "--enable-prompt-tokens-details"),
        *plan.events_arguments(),
    ]
    settings = (
        f"agent.kv_events_address={plan.events_address}",
        f"agent.kv_events_replay_address={plan.events_address}{REPLAY_SUFFIX}",
    )
    with VllmServer(folder / "server.log", served_model, port, arguments) as server:
        roles = {"w": (server.wait(), "aggregated")}
        with RoutedServers(folder, served_model, roles, *settings) as running:
            running.server = server
            yield running


def prompt_of(num_tokens):
    return [WORDS.randrange(300, VOCAB_SIZE) for _ in range(num_tokens)]


def gauge(routed, name):
    text = httpx.get(f"{routed.base_url}/metrics", timeout=20).text
    line = next(line for line in text.splitlines() if line.startswith(f"kvferry_routing_{name}"))
    return float(line.split()[-1])


def hits(routed, prompt):
    """Ask the router; return how many tokens of the prompt it expected in the server's cache, and how many there were."""
    before = counts(routed)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{routed.base_url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    after = counts(routed)
    num_found = after[1] - before[1]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == num_found
    return after[0] - before[0], num_found


def counts(routed):
    """Return the hits that the router has expected, and those that the server has had, in tokens."""
    return gauge(routed, "predicted_hit_tokens"), routed.server.metric("vllm:prefix_cache_hits_total")


def num_indexed(routed):
    return gauge(routed, "indexed_blocks")


def wait_until(holds):
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_restarted_router_expects_what_the_server_has(routed):
    prompt = prompt_of(300)
    assert hits(routed, prompt) == (0, 0)
    routed.kill("router")
    routed.start_missing()
    routed.wait_for(f"{routed.base_url}/ready")
    wait_until(lambda: num_indexed(routed) >= 300 // BLOCK * (BLOCK // 16))
    assert hits(routed, prompt) == (300 // BLOCK * BLOCK,) * 2


def test_a_restarted_agent_learns_what_was_published_before(routed):
    prompt = prompt_of(200)
    hits(routed, prompt)
    routed.kill("w")
    routed.start_missing()
    routed.wait_for_agent("w")
    wait_until(lambda: num_indexed(routed) >= 200 // BLOCK * (BLOCK // 16))
    assert hits(routed, prompt) == (200 // BLOCK * BLOCK,) * 2


def test_evicted_blocks_are_not_expected(routed):
    old = [prompt_of(100) for _ in range(8)]
    for prompt in old:
        hits(routed, prompt)
    for _ in range(4):
        hits(routed, prompt_of(600))  # 40 blocks hold two of them
    unasked = iter(old)  # each once, since asking brings it back
    wait_until(lambda: hits(routed, next(unasked)) == (0, 0))
