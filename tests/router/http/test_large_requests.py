"""Requests that are as large as a client can make them: what is refused before it costs anything, and where the rest is done.

Nothing is timed here: the tests look at what was done, and on which thread. ``benchmarks/router_attack.py`` measures.
"""

from __future__ import annotations

import asyncio
import json
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ContextTooLong, InvalidRequest
from core.wire.messages import TokenLogprobs
from router.dispatch.types import PromptReport
from router.http.body_checks import check_num_values, separators_outside_texts
from router.openai import sampling as params_module
from router.openai.body_parser import parse_body
from router.openai.chat_template import ChatTemplate
from router.openai.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from router.openai.postprocess import Delta, RequestOutput
from router.openai.preprocess import MAX_MESSAGES, MAX_TOKEN_IDS, Prompt, PromptReader, max_text_tokens
from router.openai.requests import ChatCompletionRequest, ChatMessage, CompletionRequest, DetokenizeRequest, TextPart
from router.openai.responses import ChatShaper, CompletionShaper, Envelope
from router.openai.sampling import (
    ModelLimits,
    OutputOptions,
    check_num_logprobs,
    check_ranges,
    output_options,
    params_of_prompt,
    shared_params,
)
from router.openai.text_pool import INLINE_CHARACTERS, TextPool
from router.rendered.splitting import OutputSplitter

LIMITS = ModelLimits(max_model_len=100_000, vocab_size=257)
LOOP_THREAD = threading.main_thread()
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def pool(tiny_tokenizer):
    made = TextPool(tiny_tokenizer, 2)
    yield made
    made.close()


@pytest.fixture
def reader(tiny_tokenizer, pool):
    return PromptReader(tiny_tokenizer, pool)


def never(*args, **kwargs):
    raise AssertionError("it was looked at")


def spy_on(monkeypatch, kind, name):
    """Return the list of (thread, first argument) of the calls of a method."""
    calls = []
    original = getattr(kind, name)

    def spy(self, argument, *rest, **options):
        calls.append((threading.current_thread(), argument))
        return original(self, argument, *rest, **options)

    monkeypatch.setattr(kind, name, spy)
    return calls


def on_loop(monkeypatch, kind, name):
    """Return the list of whether each call of a method was on the event loop."""
    calls, original = [], getattr(kind, name)

    def spy(self, *arguments):
        calls.append(threading.current_thread() is LOOP_THREAD)
        return original(self, *arguments)

    monkeypatch.setattr(kind, name, spy)
    return calls


async def post(under_test, path, **body):
    async with under_test.client() as client:
        return await client.post(path, content=json.dumps(body).encode(), timeout=60)


# ---- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"tokens":[' + b",".join([b"1"] * 700_000) + b"]}",
        b'{"tokens":[' + b"[],".join([b"1"] * 90_000) + b"]}",
        b'{"tokens":[' + b'{"a":1},'.join([b"1"] * 60_000) + b"]}",
        b'{"tokens":{' + b'"a":1,'.join([b""] * 60_000) + b"}}",
    ],
    ids=["numbers", "lists", "objects", "keys"],
)
def test_body_of_too_many_values_is_refused_undecoded(monkeypatch, body):
    monkeypatch.setattr(params_module.msgspec.json, "decode", never)
    with pytest.raises(InvalidRequest, match=r"the body has more than \d+ times"):
        parse_body(body, DetokenizeRequest)


@pytest.mark.parametrize(
    "prompt",
    ["," * 700_000, "x" * 3_000_000, ["12:00:01 [worker] step {7}: done, next\n" * 140] * 128, [[7] * 65_000] * 8],
    ids=["commas", "one text", "logs", "token ids"],
)
def test_ordinary_bodies_are_not_taken_for_too_many_values(prompt):
    check_num_values(json.dumps({"prompt": prompt}).encode())


@given(st.lists(st.text(alphabet='a",:[{\\'), max_size=6), st.integers(1, 40))
def test_what_texts_contain_is_not_counted(texts, piece_bytes):
    body = json.dumps({"prompt": texts}, separators=(",", ":")).encode()
    expected = {",": max(0, len(texts) - 1), "[": 1, "{": 1, ":": 1}
    *_, found = separators_outside_texts(body, piece_bytes=piece_bytes)
    assert found == expected


# ---- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "is_batch"), [(4096, False), (4097, True)])
def test_long_text_is_encoded_where_the_lock_is_free(tiny_tokenizer, monkeypatch, size, is_batch):
    backend, called = tiny_tokenizer.backend, []

    class Backend:
        def __getattr__(self, name):
            called.append(name)
            return getattr(backend, name)

    monkeypatch.setattr(tiny_tokenizer, "backend", Backend())
    ids = tiny_tokenizer.encode("x" * size)
    assert tiny_tokenizer.decode(ids) == "x" * size
    assert called == (["encode_batch_fast", "decode_batch"] if is_batch else ["encode", "decode"])


async def test_no_more_texts_are_tokenized_at_once_than_there_are_threads(pool, tiny_tokenizer, monkeypatch):
    running, most = 0, 0
    lock, both = threading.Lock(), threading.Barrier(2, timeout=20)
    original = type(tiny_tokenizer).encode

    def counted(self, text, **options):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()  # only two at once get by
        with lock:
            running -= 1
        return original(self, text, **options)

    monkeypatch.setattr(type(tiny_tokenizer), "encode", counted)
    text = "x" * (INLINE_CHARACTERS + 1)
    await asyncio.gather(*(pool.encode(text, add_special_tokens=False, max_tokens=10**6) for _ in range(6)))
    assert most == 2


async def test_text_of_too_many_tokens_is_not_tokenized_to_its_end(pool, tiny_tokenizer, monkeypatch):
    calls = spy_on(monkeypatch, type(tiny_tokenizer), "encode")
    with pytest.raises(ContextTooLong):
        await pool.encode("x" * 1_000_000, add_special_tokens=False, max_tokens=50_000)
    assert sum(len(text) for _, text in calls) < 100_000
    assert LOOP_THREAD not in {thread for thread, _ in calls}


async def test_a_text_is_told_no_more_characters_than_it_has(pool):
    with pytest.raises(ContextTooLong, match="has 60000 characters, and the first 60000 of them are more than 50000 tokens"):
        await pool.encode("x" * 60_000, add_special_tokens=False, max_tokens=50_000)


async def test_pieces_of_a_text_are_counted_and_the_whole_is_tokenized(pool, tiny_tokenizer):
    text = "xyz" * 30_000
    ids = await pool.encode(text, add_special_tokens=False, max_tokens=90_000)
    assert tiny_tokenizer.decode(ids) == text


async def test_tokens_of_prompts_count_as_held_memory(reader):
    held = []
    await reader.read_completion(CompletionRequest(prompt=["x" * 2000, "y" * 2000]), LIMITS, held.append)
    assert sum(held) == 48 * (4000 - 1024)


async def test_prompts_have_a_bound_for_all_tokens_together(reader):
    item = [1] * 99_000
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TOKEN_IDS} are allowed"):
        await reader.read_completion(CompletionRequest(prompt=[item] * 11), LIMITS)


async def test_memory_that_tokens_would_take_is_refused_like_bodies(start_router):
    under_test = await start_router(has_http=False, max_body_bytes=30_000, max_upload_bytes=100_000)
    for role in ("prefill", "decode"):
        await under_test.add(role, max_model_len=20_000)
    refused = await post(under_test, "/v1/completions", prompt="x" * 15_000, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")  # it would never fit
    assert under_test.metric("kvferry_upload_bytes") == 0


# ---- tokenize and detokenize -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": "x" * (5 * max_text_tokens(512) + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "messages"),
        ("/detokenize", {"tokens": [1] * (max_text_tokens(512) + 1)}, "tokens"),
    ],
    ids=["text", "messages", "tokens"],
)
async def test_what_is_too_long_is_refused_untouched(served, monkeypatch, path, body, field):
    for name in ("encode", "decode", "apply_chat_template"):
        monkeypatch.setattr(type(served.tokenizer), name, never)
    refused = await post(served, path, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "at most" in refused.json()["error"]["message"]


async def test_bound_of_tokenize_grows_with_the_context():
    assert max_text_tokens(0) == max_text_tokens(512) == 32_768
    assert max_text_tokens(100_000) == 400_000


async def test_spellings_of_tokens_are_looked_up_off_the_loop(served, monkeypatch):
    calls = spy_on(monkeypatch, type(served.tokenizer), "token")
    answer = await post(served, "/tokenize", prompt="x" * 5000, return_token_strs=True)
    assert answer.json()["token_strs"] == ["x"] * 5000
    assert LOOP_THREAD not in {thread for thread, _ in calls}


# ---- conversations -----------------------------------------------------------------------------------------------------


def chat(*messages):
    return ChatCompletionRequest(messages=list(messages))


@pytest.mark.parametrize(
    "messages",
    [
        [ChatMessage(role="user")] * (MAX_MESSAGES + 1),
        [ChatMessage(role="user", content=[TextPart(text="")] * (MAX_MESSAGES + 1))],
        [ChatMessage(role="user", content="x" * (5 * LIMITS.max_model_len + 1))],
    ],
    ids=["messages", "parts", "text"],
)
async def test_conversation_that_cannot_fit_is_not_rendered(reader, monkeypatch, messages):
    monkeypatch.setattr(ChatTemplate, "render", never)
    with pytest.raises(InvalidRequest) as refused:
        await reader.read_chat(chat(*messages), LIMITS)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "is_on_loop"),
    [
        ([ChatMessage(role="user", content="x")] * 64, True),
        ([ChatMessage(role="user", content="x")] * 65, False),
        ([ChatMessage(role="user", content=[TextPart(text="x")] * 65)], False),
        ([ChatMessage(role="user", content="x" * 70_000)], False),
    ],
    ids=["short", "many messages", "many parts", "long text"],
)
async def test_long_conversation_is_rendered_off_the_loop(reader, tiny_tokenizer, monkeypatch, messages, is_on_loop):
    calls = spy_on(monkeypatch, type(tiny_tokenizer), "apply_chat_template")
    monkeypatch.setattr("router.openai.preprocess._INLINE_RENDER_S", 10.0)  # however busy the machine is
    await reader.read_chat(chat(*messages), LIMITS)
    assert [thread is LOOP_THREAD for thread, _ in calls] == [is_on_loop]


# ---- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("request_id", "i" * 129), ("session_id", "s" * 129), ("cache_salt", "s" * 129)],
)
def test_ids_that_a_client_chooses_are_bounded(field, value):
    with pytest.raises(InvalidRequest, match="129 characters, at most 128") as refused:
        check_ranges(CompletionRequest(prompt="p", **{field: value}))
    assert refused.value.param == field


def test_stop_strings_are_bounded_together():
    output_options(CompletionRequest(prompt="p", stop=["a" * 512, "b" * 512]))
    with pytest.raises(InvalidRequest, match="1025 characters") as refused:
        output_options(CompletionRequest(prompt="p", stop=["a" * 512, "b" * 513]))
    assert refused.value.param == "stop"


def test_biases_are_bounded():
    with pytest.raises(InvalidRequest, match="at most 8192"):
        shared_params(CompletionRequest(prompt="p", logit_bias={str(number): 1.0 for number in range(8193)}), LIMITS)


def test_lists_of_ids_are_bounded_by_the_number_of_prompts():
    request = CompletionRequest(prompt="p", stop_token_ids=list(range(200)))
    shared_params(request, LIMITS, num_prompts=128)
    with pytest.raises(InvalidRequest, match=r"once for each of 5243 prompts") as refused:
        shared_params(request, LIMITS, num_prompts=5243)
    assert refused.value.param == "stop_token_ids"


def test_prompts_of_a_request_share_their_lists():
    request = CompletionRequest(prompt="p", stop_token_ids=[1, 2], logit_bias={"3": 1.0})
    shared = shared_params(request, LIMITS)
    one, other = (params_of_prompt(request, shared, number, number, LIMITS) for number in (5, 6))
    assert one.stop_token_ids is other.stop_token_ids
    assert one.logit_bias is other.logit_bias
    assert (one.seed, other.seed) == (5, 6)
    assert msgspec.structs.replace(one, seed=6) == other


@pytest.mark.slow
async def test_prompts_of_one_request_are_started_in_turns(start_router):
    under_test = await start_router(has_http=False, request_timeout_s=0.5)
    for role in ("prefill", "decode"):
        worker = await under_test.add(role, max_num_seqs=1000, num_blocks=100_000)
        worker.script.is_silent = True
    seen = []

    async def other():
        while True:
            seen.append(under_test.router.gateway.num_requests)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    answer = await post(under_test, "/v1/completions", prompt=["x"] * 100, max_tokens=1)
    task.cancel()
    assert answer.status_code == 504
    assert max(seen) == 100
    assert {number for number in seen if 0 < number < 100}, "all were started in one turn"


# ---- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")]
)
def test_logprobs_of_prompts_are_bounded_over_all_choices(fields, field):
    request = CompletionRequest(prompt="p", n=4, **fields)
    shared = shared_params(request, LIMITS)
    check_num_logprobs(request, shared, [1000, 2000])
    with pytest.raises(InvalidRequest, match="at most 262144") as refused:
        check_num_logprobs(request, shared, [1000, 2200])
    assert refused.value.param == field


def test_answers_without_logprobs_of_prompts_have_no_such_bound():
    request = CompletionRequest(prompt="p", n=128, logprobs=20)
    check_num_logprobs(request, shared_params(request, LIMITS), [10**6])


@pytest.mark.parametrize("number", [128, 129, 1000])
def test_long_logprobs_of_a_prompt_are_the_same_json_in_pieces(tiny_tokenizer, number):
    entries = [None, *(TokenLogprobs((index % 250, 7), (-0.5, -1.5), 1) for index in range(number - 1))]
    options = OutputOptions(prompt_logprobs=1)
    output = RequestOutput(tiny_tokenizer, options, [Prompt((1,), "a")], 1)
    output.prompts[0].report = PromptReport(num_cached_tokens=0, prompt_logprobs=tuple(entries))
    texts = TokenTexts(tiny_tokenizer)
    shaper = ChatShaper(Envelope(id="i", created=1, model="m", system_fingerprint=None), options, output, texts)
    written = json.loads(msgspec.json.encode(shaper._prompt_logprobs(output.prompts[0])))
    assert written == prompt_logprobs(texts, entries)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("fields", "is_on_loop"), [({}, True), ({"echo": True, "logprobs": 0}, False)])
async def test_logprobs_of_prompts_are_written_off_the_loop(served, monkeypatch, is_stream, fields, is_on_loop):
    calls = on_loop(monkeypatch, CompletionShaper, "chunks" if is_stream else "merged")
    answer = await post(served, "/v1/completions", prompt="abc", max_tokens=2, stream=is_stream, **fields)
    assert answer.status_code == 200
    assert set(calls) == {is_on_loop}


@pytest.mark.parametrize(("kind", "prompt"), [(CompletionShaper, {"prompt": "abc"}), (ChatShaper, {"messages": MESSAGES})])
@pytest.mark.parametrize(("at_once", "is_on_loop"), [(10**6, True), (10, False)])
async def test_many_logprobs_of_an_answer_are_written_off_the_loop(served, monkeypatch, kind, prompt, at_once, is_on_loop):
    monkeypatch.setattr("router.openai.responses._LOGPROBS_AT_ONCE", at_once)
    calls = on_loop(monkeypatch, kind, "merged")
    path = "/v1/completions" if kind is CompletionShaper else "/v1/chat/completions"
    logprobs = {"logprobs": 4} if kind is CompletionShaper else {"logprobs": True, "top_logprobs": 4}
    answer = await post(served, path, max_tokens=8, **prompt, **logprobs)
    assert answer.status_code == 200
    assert set(calls) == {is_on_loop}


def test_many_logprobs_of_a_chat_are_the_same_json_in_pieces(tiny_tokenizer):
    entries = [TokenLogprobs((index % 250, 7), (-0.5, -1.5), 1) for index in range(300)]
    texts, options = TokenTexts(tiny_tokenizer), OutputOptions(logprobs=1)
    output = RequestOutput(tiny_tokenizer, options, [Prompt((1,), "a")], 1)
    shaper = ChatShaper(Envelope(id="i", created=1, model="m"), options, output, texts)
    shaper.gather([Delta(0, "x", [1] * 300, entries, [0] * 300, "length")])
    written = json.loads(msgspec.json.encode(shaper.whole()))
    expected = json.loads(msgspec.json.encode(chat_logprobs(texts, entries, 1)))
    assert written["choices"][0]["logprobs"] == expected


async def test_gathered_logprobs_count_with_the_memory_of_requests(start_router):
    under_test = await start_router(has_http=False, max_upload_bytes=4096)
    await under_test.add("aggregated")
    body = {"messages": MESSAGES, "logprobs": True}
    assert (await post(under_test, "/v1/chat/completions", **body, top_logprobs=1)).status_code == 200
    refused = await post(under_test, "/v1/chat/completions", **body, top_logprobs=4)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")  # no other try would succeed
    assert "log-probabilities of an answer that is not streamed" in refused.json()["error"]["message"]
    assert (await post(under_test, "/v1/chat/completions", **body, top_logprobs=4, stream=True)).status_code == 200


@pytest.mark.parametrize(("at_once", "is_on_loop"), [(10**6, True), (3, False)])
async def test_many_logprobs_that_an_engine_splits_are_written_off_the_loop(start_router, monkeypatch, at_once, is_on_loop):
    monkeypatch.setattr("router.rendered.splitting.ENCODED_AT_ONCE", at_once)
    monkeypatch.setattr("router.openai.logprobs.ENCODED_AT_ONCE", at_once)
    calls = on_loop(monkeypatch, OutputSplitter, "_choice")
    given = []

    def split(body):
        (choice,) = body["generate_response"]["choices"]
        given.append(choice["logprobs"])
        found = {"index": 0, "finish_reason": "stop", "logprobs": choice["logprobs"]}
        return 200, {"choices": [found | {"message": {"role": "assistant", "content": "x"}}]}

    under_test = await start_router(has_http=False)
    path, tools = "/v1/chat/completions", [{"type": "function", "function": {"name": "f"}}]
    scripted = {f"{path}/render": lambda body: (200, {"token_ids": [5, 6, 7]}), f"{path}/derender": split}
    await under_test.add("aggregated", takes_calls=True, script=under_test.script(calls=scripted, tokens_per_frame=8))
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    answer = (await post(under_test, path, **body)).json()
    assert answer["choices"][0]["logprobs"] == given[0]
    assert [len(entry["top_logprobs"]) for entry in given[0]["content"]] == [2] * 8
    assert set(calls) == {is_on_loop}
