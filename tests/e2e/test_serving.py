"""The answers that clients get from real processes with a real model, on every topology and transport."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.only_full import rest_in_full

MODEL = "smollm2-135m"
BLOCK_SIZE = 64
BLOCK_BYTES = 30 * 2 * 3 * BLOCK_SIZE * 64 * 4  # layers, keys and values, heads, tokens, head size, float32
CHUNK = 256  # max_num_batched_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
on_one_pair = pytest.mark.parametrize("served", ["1p1d-shm"], indirect=True)  # what no transport or topology can change
on_a_pair_and_on_two = pytest.mark.parametrize(
    "served",
    rest_in_full(("1p1d-shm", "2p2d-tcp", "1p1d-tcp", "1p1d-nixl", "2p2d-shm", "aggregated"), always=("1p1d-shm", "2p2d-tcp")),
    indirect=True,
)


@pytest.fixture
def openai_client(served):
    return openai.OpenAI(base_url=f"{served.cluster.base_url}/v1", api_key="none", timeout=240.0, max_retries=0)


def tokens_of(body):
    return [choice["token_ids"] for choice in body["choices"]]


def test_greedy_answers_are_those_of_transformers_at_every_prompt_length(served, corpus, assert_token_identical):
    lengths = (1, 5, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, CHUNK, CHUNK + 44)
    prompts = [corpus[length : 2 * length] for length in lengths]
    for prompt, body in zip(prompts, served.complete_all(prompts, max_tokens=8), strict=True):
        assert body["usage"]["prompt_tokens"] == len(prompt)
        assert_token_identical(prompt, body["choices"][0]["token_ids"])


@on_a_pair_and_on_two
def test_concurrent_requests_with_shared_prefixes_are_all_correct(served, corpus, assert_token_identical):
    prefixes = [corpus[:96], corpus[200:328], corpus[500:520]]
    prompts = [[*prefixes[number % 3], *corpus[10 * number : 10 * number + 5 + number]] for number in range(32)]
    bodies = served.complete_all(prompts, max_tokens=6)
    for prompt, body in zip(prompts, bodies, strict=True):
        assert body["choices"][0]["finish_reason"] in {"length", "stop"}
        assert_token_identical(prompt, body["choices"][0]["token_ids"])


@on_one_pair
def test_repeated_prompt_is_found_in_the_prefix_cache(served, corpus):
    prompt = corpus[1000:1200]
    bodies = [served.complete(prompt, max_tokens=2) for _ in range(3)]
    assert tokens_of(bodies[0]) == tokens_of(bodies[1]) == tokens_of(bodies[2])
    # With two pairs the second request may meet the other one, the third cannot miss both.
    assert max(body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies[1:]) == 3 * BLOCK_SIZE


@on_one_pair
def test_openai_client_streams_what_it_gets_whole(served, openai_client, assert_token_identical):
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = openai_client.chat.completions.create(**request)
    chunks = list(openai_client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason == "stop"


def test_usage_tells_the_handoff(served, corpus):
    usage = served.complete(corpus[1300:1400], max_tokens=4)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (100, 4)
    if not served.is_disaggregated:
        assert "kv_transfer" not in usage
        return
    transfer = usage["kv_transfer"]
    assert transfer["transport"] == served.kind.rpartition("-")[2]
    assert transfer["transferred_tokens"] == 100
    assert transfer["transferred_bytes"] == 2 * BLOCK_BYTES


@on_one_pair
def test_the_parts_of_both_waits_fit_what_the_client_s_own_clock_says(served, corpus):
    """Workers and router measure by clocks of their own: what they claim lies within what the client has waited.

    A relay of 0 would mean that the parts were cut to fit; a duration that is counted twice, or from the wrong moment on,
    exceeds the client's, and one that is left out leaves the long prefill unexplained.
    """
    sent_at, times, usage = time_tokens(served, corpus[400:700], max_tokens=3)
    first, second = (usage["kv_transfer"]["timing"][name] for name in ("first_token", "second_token"))
    waits = [sum(value for name, value in split.items() if name != "total_ms") for split in (first, second)]
    assert waits[0] < (times[0] - sent_at) * 1e3
    assert sum(waits) < (times[1] - sent_at) * 1e3
    assert min(first["relay_ms"], second["relay_ms"]) > 0
    assert min(first["prefill_ms"], second["transfer_ms"], second["verify_ms"], second["first_step_ms"]) > 0
    assert first["prefill_ms"] > first["queue_ms"] + first["relay_ms"]


def time_tokens(served, prompt, max_tokens):
    """Stream a completion; return when it was sent, when each token came, and its usage."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    times, usage, sent_at = [], {}, time.monotonic()
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                times += [time.monotonic()] * sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
    return sent_at, times, usage


@on_one_pair
def test_answer_that_ends_at_its_first_token_needs_no_handoff(served, corpus, eventually):
    body = served.complete(corpus[700:790], max_tokens=1)
    assert body["usage"]["completion_tokens"] == 1
    assert "kv_transfer" not in body["usage"]
    eventually(lambda: not served.held())


@on_one_pair
@pytest.mark.parametrize("name", ["seeded", "two seeded choices", "penalties", "minimum", "stop string"])
def test_answer_does_not_depend_on_where_it_is_computed(served, aggregated_answers, parity_cases, name):
    body, expected = served.complete(**parity_cases[name]), aggregated_answers(name)
    assert tokens_of(body) == tokens_of(expected)
    assert [choice["text"] for choice in body["choices"]] == [choice["text"] for choice in expected["choices"]]
    assert [choice["finish_reason"] for choice in body["choices"]] == [c["finish_reason"] for c in expected["choices"]]
    counts = ("prompt_tokens", "completion_tokens")
    assert [body["usage"][count] for count in counts] == [expected["usage"][count] for count in counts]


@on_one_pair
def test_logprobs_do_not_depend_on_where_they_are_computed(served, aggregated_answers, parity_cases):
    body, expected = served.complete(**parity_cases["logprobs"]), aggregated_answers("logprobs")
    found, wanted = body["choices"][0]["logprobs"], expected["choices"][0]["logprobs"]
    assert found["tokens"] == wanted["tokens"]
    assert found["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)
    assert [set(top) for top in found["top_logprobs"]] == [set(top) for top in wanted["top_logprobs"]]


@on_one_pair
def test_prompt_logprobs_do_not_depend_on_where_they_are_computed(served, aggregated_answers, parity_cases):
    body, expected = served.complete(**parity_cases["prompt logprobs"]), aggregated_answers("prompt logprobs")
    found, wanted = body["choices"][0]["prompt_logprobs"], expected["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == body["usage"]["prompt_tokens"]
    for row, expected_row in zip(found[1:], wanted[1:], strict=True):
        assert {token: entry["logprob"] for token, entry in row.items()} == pytest.approx(
            {token: entry["logprob"] for token, entry in expected_row.items()}, abs=1e-3
        )


@on_one_pair
def test_two_choices_of_one_prompt_differ_and_repeat_with_their_seed(served, corpus):
    fields = {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 12}
    first, second = served.complete(corpus[:40], **fields), served.complete(corpus[:40], **fields)
    assert tokens_of(first) == tokens_of(second)
    assert tokens_of(first)[0] != tokens_of(first)[1]
    assert first["usage"]["completion_tokens"] == sum(map(len, tokens_of(first)))


@on_one_pair
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 0}, "max_tokens"), ({"prompt": []}, "prompt"), ({"prompt": [10**6]}, "prompt"), ({"top_p": 3}, "top_p")],
)
def test_wrong_request_is_refused_and_does_no_harm(served, corpus, fields, param):
    response = served.client.post("/v1/completions", json={"model": MODEL, "prompt": corpus[:8], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert served.complete(corpus[:8], max_tokens=2)["usage"]["completion_tokens"] == 2


@on_one_pair
def test_prompt_beyond_the_context_is_refused(served, corpus):
    response = served.client.post("/v1/completions", json={"model": MODEL, "prompt": corpus[:64] * 200})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@on_a_pair_and_on_two
def test_client_that_disconnects_frees_both_legs(served, corpus, eventually):
    body = {"model": MODEL, "prompt": corpus[400:700], "max_tokens": 400, "ignore_eos": True, "stream": True}
    for num_lines in (0, 1, 3):
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(num_lines):
                next(lines)
        eventually(lambda: not served.held(), f"release after {num_lines} lines of {served.held()}", timeout_s=30.0)


@on_one_pair
def test_many_clients_that_disconnect_leave_a_working_cluster(served, corpus, eventually, assert_token_identical):
    def leave_early(number):
        body = {"model": MODEL, "prompt": corpus[number : number + 150], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            if number % 2:
                next(response.iter_lines())

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(leave_early, range(16)))
    eventually(lambda: not served.held(), f"release of {served.held()}")
    prompt = corpus[3:120]
    assert_token_identical(prompt, tokens_of(served.complete(prompt, max_tokens=6))[0])


@on_one_pair
def test_stream_carries_every_token_once(served, corpus):
    whole = served.complete(corpus[50:90], max_tokens=16)
    body = {
        "model": MODEL,
        "prompt": corpus[50:90],
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    token_ids = []
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    token_ids += choice.get("token_ids") or []
    assert token_ids == tokens_of(whole)[0]


@on_one_pair
def test_metrics_add_up_over_the_workers(served, corpus):
    before = {worker.engine_id: served.gauges(worker.engine_id) for worker in served.cluster.workers}
    served.complete(corpus[900:960], max_tokens=5, ignore_eos=True)
    after = {worker.engine_id: served.gauges(worker.engine_id) for worker in served.cluster.workers}
    name = "kvferry_generation_tokens_total"
    assert math.isclose(sum(after[engine_id][name] - before[engine_id][name] for engine_id in after), 5)
