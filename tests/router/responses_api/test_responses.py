"""The responses endpoint through the router, answered by scripted workers, and read by OpenAI's own types."""

import asyncio
import json

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseError, ResponseStreamEvent

from core.errors import Overloaded
from core.model.tokenizer import Tokenizer
from core.wire.messages import ErrorInfo, Generate
from core.wire.sampling import FORM_FIELD, SamplingParams
from router.dispatch.types import ChoiceUpdate, Update
from router.http.caller import Caller
from router.http.responses_answer import ResponsesAnswer
from router.openai.chat_output import ChatOutput
from router.openai.logprobs import TokenTexts
from router.openai.postprocess import RequestOutput
from router.openai.preprocess import Prompt
from router.openai.responses import Envelope
from router.openai.sampling import OutputOptions
from router.openai.served_model import ServedModel
from router.openai.text_pool import TextPool
from router.responses_api.requests import ResponsesRequest
from router.responses_api.shaper import ResponsesOutput, ResponsesShaper
from router.tools.formats import HERMES

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "<assistant>{{ '</think>' if false }}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
read_event = pydantic.TypeAdapter(ResponseStreamEvent).validate_python
STATUS = {"response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"}


@pytest.fixture
async def under_test(start_router, write_tiny_files, tmp_path):
    files = write_tiny_files(tmp_path)
    object.__setattr__(files, "chat_template", TEMPLATE)
    found = await start_router(model=ServedModel(name="tiny", tokenizer=Tokenizer(files)), worker_wait_s=1.0)
    await found.pair()
    return found


@pytest.fixture
def ask(under_test):
    async def post(output, **fields):
        for worker in under_test.workers:
            worker.script.text = output
        async with under_test.client() as client:
            return await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 150, **fields})

    return post


async def answer(ask, output, **fields) -> Response:
    response = await ask(output, **fields)
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json())


async def events(ask, output, **fields):
    response = await ask(output, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    pairs = [frame.split("\n") for frame in frames]
    found = [json.loads(second.removeprefix("data: ")) for _, second in pairs]
    assert [first.removeprefix("event: ") for first, _ in pairs] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return [read_event(event) for event in found]


VARYING = ("id", "call_id", "created_at", "kv_transfer")


def without_ids(value):
    if isinstance(value, dict):
        return {
            name: without_ids(one) for name, one in value.items() if name not in ("id", "call_id", "created_at", "kv_transfer")
        }
    return [without_ids(one) for one in value] if isinstance(value, list) else value


async def both(ask, output, **fields) -> Response:
    """Return the whole answer, which must agree with the last event of a stream and with the deltas before it."""
    whole = await answer(ask, output, **fields)
    streamed = await events(ask, output, **fields)
    assert [event.type for event in streamed[:2]] == ["response.created", "response.in_progress"]
    last = streamed[-1]
    assert without_ids(last.response.model_dump()) == without_ids(whole.model_dump())
    for index, item in enumerate(last.response.output):
        mine = [event for event in streamed if event.type not in STATUS and event.output_index == index]
        assert [mine[0].type, mine[-1].type] == ["response.output_item.added", "response.output_item.done"]
        assert mine[-1].item == item
        written = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert written == (item.arguments if item.type == "function_call" else item.content[0].text)
    return whole


async def test_a_text_is_one_message(ask):
    found = await both(ask, "hello world", instructions="be short", metadata={"a": "b"})
    assert (found.status, found.output_text, found.store) == ("completed", "hello world", False)
    assert found.id.startswith("resp_")
    assert found.usage.output_tokens == 12
    assert found.usage.input_tokens_details.cached_tokens == 4
    assert (found.instructions, found.metadata) == ("be short", {"a": "b"})


@pytest.mark.slow
async def test_order_of_the_events_of_a_text(ask):
    found = [event.type for event in await events(ask, "hi")]
    assert [kind for number, kind in enumerate(found) if kind not in found[:number]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.slow
async def test_reasoning_text_and_calls_are_items_in_their_order(ask):
    found = await both(ask, f"<think>hm</think>I look.{CALL}{CALL}", tools=TOOLS, max_output_tokens=250)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output[0].content[0].text == "hm"
    assert json.loads(found.output[2].arguments) == {"city": "Oslo"}
    assert found.output[2].call_id != found.output[3].call_id
    assert len({item.id for item in found.output}) == 4
    assert found.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")


@pytest.mark.slow
async def test_named_call_is_the_only_item(ask):
    choice = {"type": "function", "name": "weather"}
    found = await both(ask, '{"city": "Oslo"}', tools=TOOLS, tool_choice=choice)
    assert [(item.type, item.arguments) for item in found.output] == [("function_call", '{"city": "Oslo"}')]
    assert found.tool_choice.name == "weather"


@pytest.mark.slow
async def test_cut_output_is_incomplete(ask):
    found = await both(ask, "hello world", max_output_tokens=5)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output[0].status, found.output_text) == ("incomplete", "hello")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "fields", "num_characters", "status"),
    [
        (CALL + CALL, {"parallel_tool_calls": False}, len(CALL) + 20, "completed"),
        (CALL, {}, len(CALL) - 3, "completed"),
        (CALL, {}, CALL.index("slo"), "incomplete"),
        ('{"city": "Oslo"}', {"tool_choice": {"type": "function", "name": "weather"}}, 5, "incomplete"),
    ],
)
async def test_a_whole_call_is_complete_also_if_the_output_is_cut_behind_it(ask, output, fields, num_characters, status):
    found = await both(ask, output, tools=TOOLS, max_output_tokens=num_characters, **fields)
    assert (found.status, [(item.type, item.status) for item in found.output]) == ("incomplete", [("function_call", status)])


@pytest.mark.slow
async def test_empty_output_is_an_empty_message(ask):
    found = await both(ask, "")
    assert (found.output_text, [item.type for item in found.output]) == ("", ["message"])


@pytest.mark.slow
async def test_form_reaches_the_workers_and_is_repeated(ask, under_test):
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    found = await answer(ask, '{"city": "x"}', text={"format": form})
    assert found.text.format.name == "n"
    (sent,) = under_test.workers[0].messages(Generate)
    assert json.loads(sent.sampling.structured_output.value) == PARAMETERS


@pytest.mark.slow
async def test_output_is_of_its_form_or_calls_tools(ask):
    text = {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}}
    (message,) = (await both(ask, '{"city": "<tool_call>"}', tools=TOOLS, text=text)).output
    (call,) = (await both(ask, CALL, tools=TOOLS, text=text)).output
    assert (message.content[0].text, call.name, call.arguments) == ('{"city": "<tool_call>"}', "weather", '{"city": "Oslo"}')


@pytest.mark.slow
async def test_the_next_turn_is_rendered_with_the_calls_of_the_last(ask, under_test):
    first = (await ask(CALL, tools=TOOLS)).json()
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    response = await ask("ok", tools=TOOLS, input=[{"role": "user", "content": "hi"}, call, output])
    assert response.status_code == 200, response.text
    assert "x-kvferry-ignored-fields" not in response.headers
    prompt = under_test.tokenizer.decode(under_test.workers[0].messages(Generate)[-1].prompt_token_ids)
    assert '<assistant><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><tool>rain' in prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "object", "not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "schema": PARAMETERS}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": PARAMETERS, "colour": 1}}}, "text.format"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools[0].strict"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
    ],
)
async def test_refusals_name_the_fields_of_this_endpoint(ask, fields, param):
    response = await ask("x", **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert not any(theirs in error["message"] for theirs in ("messages", ".function.", "json_schema."))


@pytest.mark.slow
async def test_failure_in_mid_stream_is_an_event(under_test):
    decode = under_test.workers[1]
    decode.script.pause_after = 3
    async with openai.AsyncOpenAI(base_url=f"{under_test.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        await decode.generated()
        await decode.leave()
        found = [event async for event in stream]
    assert found[-1].type == "response.failed"
    error = ResponseError.model_validate(found[-1].response.error.model_dump(), strict=True)
    assert (error.code, error.reason) == ("server_error", "no_worker")
    assert found[-1].response.output[0].content[0].text


@pytest.mark.slow
async def test_failure_before_any_output_has_its_status_in_every_stream(under_test):
    late = ErrorInfo(code="deadline_exceeded", message="too late", http_status=504)
    for worker in under_test.workers:
        worker.script.error = late
    bodies = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi"},
    }
    async with under_test.client() as client:
        for path, body in bodies.items():
            whole, streamed = [await client.post(path, json={**body, "stream": flag}) for flag in (False, True)]
            assert (streamed.status_code, streamed.json()) == (504, whole.json()), path


@pytest.mark.slow
async def test_a_grammar_that_workers_refuse_is_named_as_in_the_body(under_test):
    refusal = ErrorInfo.of(Overloaded("32 grammars wait to be compiled", param=FORM_FIELD))
    for worker in under_test.workers:
        worker.script.error = refusal
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    function = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    bodies = {
        "guided_regex": ("/v1/completions", {"prompt": "hi", "guided_regex": "a+"}),
        "structured_outputs": ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "a+"}}),
        "response_format": ("/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}}),
        "tools": ("/v1/chat/completions", {**chat, "tools": [function], "tool_choice": "required"}),
        "text.format": ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}),
    }
    async with under_test.client() as client:
        for field, (path, body) in bodies.items():
            found = await client.post(path, json=body)
            assert (found.status_code, found.json()["error"]["param"]) == (429, field)


class Batches:
    """A generation whose updates come in batches."""

    def __init__(self, *batches: list[tuple[int, Update]]) -> None:
        self._batches = list(batches)

    async def updates(self, writer: object) -> list[tuple[int, Update]]:
        return self._batches.pop(0)

    def finish_choice(self, prompt_index: int, choice_index: int) -> None: ...

    def abort(self, reason: str) -> None: ...


def streamed(tiny_tokenizer, *updates: tuple[int, Update]) -> ResponsesAnswer:
    options = OutputOptions(is_stream=True, stop=("END",))
    output = RequestOutput(tiny_tokenizer, options, [Prompt((1,), "x")], 1)
    splitting = ChatOutput(tools=None, format=HERMES, has_reasoning=False, is_reasoning_open=False, shows_reasoning=True)
    envelope = Envelope(id="resp_1", created=1, model="tiny")
    wanted = ResponsesOutput(ResponsesRequest(input="hi"), splitting)
    shaper = ResponsesShaper(envelope, options, output, TokenTexts(tiny_tokenizer), wanted, SamplingParams())
    caller = Caller(client_id="c", receive=asyncio.Event().wait, arrival=0.0, paused_s=0.0, hold=lambda num_bytes: None)
    return ResponsesAnswer(Batches(list(updates)), output, shaper, caller, TextPool(tiny_tokenizer, 1))


async def test_the_event_of_a_failure_names_the_fields_of_this_endpoint(tiny_tokenizer):
    place = "messages[1].content[0]"
    answer = streamed(tiny_tokenizer)
    sent = answer.failed(ErrorInfo(code="encoder_input_missing", message=f"{place}: no memory", param=place)).decode()
    answer.close()
    assert "input: no memory" in sent
    assert "messages" not in sent


async def test_updates_behind_a_stop_string_add_no_second_end(tiny_tokenizer):
    updates = [(0, Update(choices=[ChoiceUpdate(0, tuple(tiny_tokenizer.encode(text)))])) for text in ("a", "b END", "zz", "y")]
    answer = streamed(tiny_tokenizer, *updates)
    text = (await answer.first()).decode()
    answer.close()
    kinds = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]
    assert kinds[-1] == "response.completed"
    assert len([kind for kind in kinds if kind in STATUS]) == 3
    assert answer.is_finished


@pytest.mark.slow
async def test_the_stream_helper_puts_the_response_together(under_test):
    async with (
        openai.AsyncOpenAI(base_url=f"{under_test.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="tiny", input="hi") as stream,
    ):
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_text == "hello world"
