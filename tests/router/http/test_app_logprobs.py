"""Log-probabilities and echo as clients see them."""

from __future__ import annotations

import pytest

from core.wire.messages import Generate


async def post(under_test, path: str, **body):
    async with under_test.client() as client:
        return await client.post(path, json=body)


async def test_logprobs_of_a_completion(served):
    body = (await post(served, "/v1/completions", prompt="p", max_tokens=2, logprobs=2)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "e"]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["token_logprobs"] == [-0.25, -0.25]
    assert logprobs["top_logprobs"][0]["h"] == -0.25
    assert len(logprobs["top_logprobs"][0]) == 2


async def test_echo_with_logprobs_scores_the_prompt(served):
    body = (await post(served, "/v1/completions", prompt="abc", max_tokens=1, echo=True, logprobs=1)).json()
    choice = body["choices"][0]
    assert choice["text"] == "abch"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "h"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"][0] is None


async def test_offsets_count_characters_of_the_text_and_not_of_its_tokens(start_router):
    under_test = await start_router(has_http=False)
    await under_test.pair(text="é!€?")
    body = (await post(under_test, "/v1/completions", prompt="a€b", max_tokens=7, echo=True, logprobs=0)).json()
    choice = body["choices"][0]
    assert choice["text"] == "a€bé!€?"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 5, 6]
    assert [choice["text"][offset] for offset in choice["logprobs"]["text_offset"]] == list("a€€€béé!€€€?")


@pytest.mark.parametrize("settings", [{}, {"n": 2}])
async def test_no_tokens_with_echo_return_the_prompt_and_its_logprobs(served, settings):
    fields = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1, **settings}
    body = (await post(served, "/v1/completions", **fields)).json()
    for choice in body["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert len(body["choices"]) == settings.get("n", 1)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
    assert served.workers[1].messages(Generate) == []


async def test_no_tokens_without_echo_are_refused(served):
    response = await post(served, "/v1/completions", prompt="abc", max_tokens=0)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_prompt_logprobs_have_vllm_s_shape(served):
    body = (await post(served, "/v1/completions", prompt="ab", max_tokens=1, prompt_logprobs=1)).json()
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert next(iter(second.values())) == {"logprob": -1.0, "rank": 1, "decoded_token": "b"}
