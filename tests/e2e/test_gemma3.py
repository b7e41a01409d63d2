"""The real Gemma 3, five sliding layers to each full one: served by one aggregated worker, and with a handoff."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config_types import default_cache_dir
from core.config_workers import CacheSection
from core.model.hub import resolve_model
from core.model.tokenizer import Tokenizer
from kvferry.local import LocalCluster, ProcessOptions

MODEL = "gemma3-270m"
WINDOW = 512
NUM_SLIDING_GROUPS = 5  # and a full one
TOKEN_BYTES = 3 * 2 * 1 * 256 * 4  # of a group: layers, keys and values, heads, head size, float32

PAIRS = {  # transport, and the size of a block at the prefill and at the decode worker; all but one in the full matrix only
    "shm": ("shm", 64, 64),
    "tcp": ("tcp", 64, 64),
    "nixl": ("nixl", 64, 64),
    "shm-16-to-64": ("shm", 16, 64),
    "shm-64-to-16": ("shm", 64, 16),
}
CELLS = [pytest.param(name, id=name, marks=() if name == "shm" else pytest.mark.full) for name in PAIRS]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]  # an answer that is not kept takes minutes


@pytest.fixture(scope="module")
def served(cluster_config, serve, tmp_path_factory, eventually):
    config = cluster_config(f"model.name={MODEL}", "local.aggregated=true", "local.num_prefill=1", "local.num_decode=1")
    with LocalCluster(config, log_dir=tmp_path_factory.mktemp("gemma3")) as cluster, serve("aggregated", cluster) as found:
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model(MODEL, Path(default_cache_dir())))


@pytest.fixture(scope="module")
def text(tokenizer):
    """Prompts are cut from it; it says nothing twice, so that no answer is right by chance."""
    sentences = [
        f"On day {day} the ferry carried {day * 37 % 91} people and {day * 53 % 17} cars across the strait, "
        f"while the wind blew from the {('north', 'east', 'south', 'west')[day * day % 7 % 4]}."
        for day in range(1, 100)
    ]
    return tokenizer.encode(" ".join(sentences))


def answer(served, prompt, **fields):
    return served.complete(prompt, model=MODEL, **fields)["choices"][0]["token_ids"]


@pytest.mark.full
def test_answers_across_the_window_are_those_of_transformers_with_and_without_a_hit(served, text, gemma3_oracle):
    prompt, other = text[: 2 * WINDOW + 76], [*text[: WINDOW + 338], *text[1200:1230]]
    gemma3_oracle.assert_token_identical(prompt, answer(served, prompt, max_tokens=20))
    body = served.complete(other, model=MODEL, max_tokens=8)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= WINDOW
    gemma3_oracle.assert_token_identical(other, body["choices"][0]["token_ids"])


@pytest.mark.full
def test_text_is_answered_in_text(served, tokenizer, gemma3_oracle):
    prompt = "The ferry left the harbour on"
    body = served.complete(prompt, model=MODEL, max_tokens=6)
    token_ids = body["choices"][0]["token_ids"]
    assert body["choices"][0]["text"] == tokenizer.decode(token_ids)
    gemma3_oracle.assert_token_identical(tokenizer.encode(prompt), token_ids)


@pytest.mark.full
def test_requests_side_by_side_do_not_see_each_other(served, text, gemma3_oracle):
    prompts = [text[:1], text[100:140], text[300:700], text[20 : 20 + WINDOW], text[40 : 41 + WINDOW]]
    for prompt, body in zip(prompts, served.complete_all(prompts, model=MODEL, max_tokens=6), strict=True):
        gemma3_oracle.assert_token_identical(prompt, body["choices"][0]["token_ids"])


@pytest.mark.full
def test_decode_moves_past_the_window(served, text, gemma3_oracle):
    prompt = text[: WINDOW - 20]
    gemma3_oracle.assert_token_identical(prompt, answer(served, prompt, max_tokens=100, ignore_eos=True))


@pytest.mark.full
def test_prompt_of_2000_tokens(served, text, gemma3_oracle):
    prompt = text[:2000]
    gemma3_oracle.assert_token_identical(prompt, answer(served, prompt, max_tokens=40))


# ---- prefill and decode apart


@pytest.fixture(scope="module", params=CELLS)
def pair(request, cluster_config, serve, tmp_path_factory, eventually):
    transport, *block_sizes = PAIRS[request.param]
    prefill, decode = (CacheSection(block_size=size, memory_bytes=384 << 20) for size in block_sizes)
    options = ProcessOptions(caches={"prefill": prefill, "decode": decode})
    settings = ("connector.kv_load_failure_policy=fail", "scheduler.max_num_batched_tokens=384")
    config = cluster_config(f"model.name={MODEL}", f"connector.transports=[{transport}]", *settings)
    logs = tmp_path_factory.mktemp(request.param)
    with LocalCluster(config, log_dir=logs, options=options) as cluster, serve(request.param, cluster) as found:
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")


def handoff_bytes(num_tokens, prefill_block, decode_block):
    """Count the owner's blocks that the token after the prompt attends to."""
    num_blocks = -(-num_tokens // prefill_block)
    first_seen = max(0, num_tokens - WINDOW + 1)
    num_gone = max(first_seen // prefill_block, first_seen // decode_block * decode_block // prefill_block)
    return (num_blocks + NUM_SLIDING_GROUPS * (num_blocks - num_gone)) * prefill_block * TOKEN_BYTES


def test_handoff_brings_the_tail_of_the_windows_and_the_answers_of_transformers(pair, text, gemma3_oracle):
    _, prefill_block, decode_block = PAIRS[pair.kind]
    prompt, other = text[: 2 * WINDOW + 76], [*text[: WINDOW + 338], *text[1200:1230]]
    for prompt_ids, max_tokens in ((prompt, 20), (other, 8)):
        body = pair.complete(prompt_ids, model=MODEL, max_tokens=max_tokens)
        gemma3_oracle.assert_token_identical(prompt_ids, body["choices"][0]["token_ids"])
        usage = body["usage"]["kv_transfer"]
        assert (usage["transferred_tokens"], usage["recomputed_tokens"]) == (len(prompt_ids), 0)
        assert usage["transferred_bytes"] == handoff_bytes(len(prompt_ids), prefill_block, decode_block)


@pytest.mark.full
def test_local_hit_that_is_shorter_than_the_window_is_gone_on_from(pair, text, gemma3_oracle):
    """The decode worker computed the text after the first prompt itself, so it has the window after its own tokens."""
    first = text[300 : 300 + WINDOW - 200]
    tokens = answer(pair, first, max_tokens=30, ignore_eos=True)
    gemma3_oracle.assert_token_identical(first, tokens)
    second = [*first, *tokens[:-2], *text[1300 : 1300 + WINDOW]]
    body = pair.complete(second, model=MODEL, max_tokens=8)
    gemma3_oracle.assert_token_identical(second, body["choices"][0]["token_ids"])
    assert 0 < body["usage"]["kv_transfer"]["transferred_tokens"] < len(second)
