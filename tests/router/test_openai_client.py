"""The official client as the caller: what it sends by itself, and whether its models take what we answer."""

from __future__ import annotations

import asyncio

import openai
import pytest

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def under_test(start_router):
    under_test = await start_router(worker_wait_s=0.1)
    await under_test.pair()
    return under_test


@pytest.fixture
async def client(under_test):
    async with openai.AsyncOpenAI(base_url=f"{under_test.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(client):
    answer = await client.chat.completions.create(
        model="tiny", messages=USER, n=2, logprobs=True, top_logprobs=2, max_tokens=5, seed=1, user="me", store=False
    )
    assert [choice.message.content for choice in answer.choices] == ["hello", "hello"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.content[0].token == "h"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer._request_id


@pytest.mark.slow
async def test_chat_stream(client):
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 12


async def test_the_stream_helper_puts_the_message_together(client):
    async with client.chat.completions.stream(model="tiny", messages=USER) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "hello world"


async def test_completions_with_echo_and_logprobs(client):
    answer = await client.completions.create(model="tiny", prompt="abc", echo=True, logprobs=1, max_tokens=1)
    assert answer.choices[0].text == "abch"
    assert answer.choices[0].logprobs.token_logprobs == [None, -1.0, -1.0, -0.25]


async def test_completion_stream(client):
    stream = await client.completions.create(model="tiny", prompt="abc", stream=True, max_tokens=50)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"


@pytest.mark.slow
async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


@pytest.mark.slow
async def test_errors_have_their_classes(client, under_test):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="tiny", messages=USER, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unsupported:
        await client.chat.completions.create(
            model="tiny", messages=USER, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert unsupported.value.param == "tools"
    for worker in under_test.workers:
        await worker.leave()
    await under_test.until(lambda: under_test.router.endpoints.not_ready_reason is not None)
    with pytest.raises(openai.InternalServerError) as unserved:
        await client.chat.completions.create(model="tiny", messages=USER)
    assert unserved.value.status_code == 503


@pytest.mark.slow
async def test_an_error_in_mid_stream_reaches_the_caller(client, under_test):
    decode = under_test.workers[1]
    decode.script.pause_after = 3
    stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
    await decode.generated()
    await decode.leave()
    with pytest.raises(openai.APIError, match="decode worker"):
        async for _ in stream:
            pass


async def test_extra_body_fields_of_vllm_clients(client):
    answer = await client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=3,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "return_token_ids": True},
    )
    assert len(answer.choices[0].token_ids) == 3


@pytest.mark.slow
async def test_the_synchronous_client(under_test):
    def call() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{under_test.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny", messages=USER)
            chunks = client.chat.completions.create(model="tiny", messages=USER, stream=True)
            return answer.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(call) == ("hello world", "hello world")
