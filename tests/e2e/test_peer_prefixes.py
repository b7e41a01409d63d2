"""Beginnings of prompts loaded from other workers, on real processes: the next turn from D, another prompt's from P."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kvferry.local import LocalCluster

BLOCK_SIZE = 16
SETTINGS = ("connector.peer_prefixes=true", f"cache.block_size={BLOCK_SIZE}")
NUM_ANSWER = 40
NUM_TURNS = 3

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module", params=["shm", "tcp", "nixl"])
def pair(request, cluster_config, serve, tmp_path_factory, eventually):
    config = cluster_config(*SETTINGS, f"connector.transports=[{request.param}]")
    with (
        LocalCluster(config, log_dir=tmp_path_factory.mktemp(request.param)) as cluster,
        serve(request.param, cluster) as found,
    ):
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")


@pytest.fixture
def two_prefills(cluster_config, serve, tmp_path_factory):
    config = cluster_config(*SETTINGS, "connector.transports=[tcp]", "local.num_prefill=2")
    with (
        LocalCluster(config, supervise=True, log_dir=tmp_path_factory.mktemp("two")) as cluster,
        serve("2p1d", cluster) as found,
    ):
        yield found


def indexed(served):
    return served.gauges("router")["kvferry_routing_indexed_blocks"]


def has_more(served, num_before):
    return indexed(served) > num_before


def turn(served, prompt, max_tokens=NUM_ANSWER):
    body = served.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
    return body["choices"][0]["token_ids"], body["usage"]


def test_the_next_turn_computes_only_what_the_decode_worker_lacks(pair, corpus, assert_token_identical, eventually):
    prompt, answer = corpus[:100], []
    for number in range(NUM_TURNS):
        num_held = len(prompt) + len(answer)
        prompt = [*prompt, *answer, *corpus[500 + 20 * number : 520 + 20 * number]] if answer else prompt
        num_before = indexed(pair)
        answer, usage = turn(pair, prompt)
        num_computed = len(prompt) - usage["prompt_tokens_details"]["cached_tokens"]
        routing = usage["kv_transfer"]["routing"][0]
        is_open = number > 1 or pair.kind != "nixl"  # the first agent of a process takes longer to open than computing this
        if number and is_open:
            assert (routing["reason"], routing["source"]) == ("source", "decode-0")
            assert num_computed <= len(prompt) - num_held + 1 + BLOCK_SIZE  # the last answer token has no KV
            assert routing["pulled_tokens"] > 0
        assert_token_identical(prompt, answer)
        eventually(partial(has_more, pair, num_before), "the report of what was decoded")
        eventually(lambda: pair.gauges("decode-0")["kvferry_kv_prefix_pinned_blocks"] == 0, "release of the pins")


def test_a_source_killed_in_mid_pull_costs_time_only(two_prefills, corpus, assert_token_identical, eventually):
    """The decode worker is killed and restarted while prefill workers load the next turns of conversations from it."""
    cluster = two_prefills.cluster
    prompts = [corpus[start : start + 160] for start in range(0, 320, 40)]
    answers = [turn(two_prefills, prompt, 24)[0] for prompt in prompts]
    turns = [[*prompt, *answer, *corpus[900:910]] for prompt, answer in zip(prompts, answers, strict=True)]
    eventually(lambda: indexed(two_prefills) > 0, "reports")
    killer = threading.Timer(0.3, lambda: cluster.kill("decode-0"))
    killer.start()
    bodies = two_prefills.complete_all(turns, max_tokens=8, ignore_eos=True)
    killer.join()
    for prompt, body in zip(turns, bodies, strict=True):
        assert_token_identical(prompt, body["choices"][0]["token_ids"])
    eventually(lambda: not two_prefills.held(), f"release of {two_prefills.held()}")
