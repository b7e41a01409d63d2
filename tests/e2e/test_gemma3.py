"""The real Gemma 3, five sliding layers to each full one, served by one worker that does it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import default_cache_dir
from core.model.hub import resolve_model
from core.model.tokenizer import Tokenizer
from kvferry.local import LocalCluster

MODEL = "gemma3-270m"
WINDOW = 512

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


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


def test_answers_across_the_window_are_those_of_transformers_with_and_without_a_hit(served, text, gemma3_oracle):
    prompt, other = text[: 2 * WINDOW + 76], [*text[: WINDOW + 338], *text[1200:1230]]
    gemma3_oracle.assert_token_identical(prompt, answer(served, prompt, max_tokens=20))
    body = served.complete(other, model=MODEL, max_tokens=8)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= WINDOW
    gemma3_oracle.assert_token_identical(other, body["choices"][0]["token_ids"])


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
def test_decode_leaves_the_window_behind(served, text, gemma3_oracle):
    prompt = text[: WINDOW - 20]
    gemma3_oracle.assert_token_identical(prompt, answer(served, prompt, max_tokens=100, ignore_eos=True))


@pytest.mark.full
def test_prompt_of_2000_tokens(served, text, gemma3_oracle):
    prompt = text[:2000]
    gemma3_oracle.assert_token_identical(prompt, answer(served, prompt, max_tokens=40))
