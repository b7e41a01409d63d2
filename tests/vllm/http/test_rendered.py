"""What only vLLM does (tools, forms of the output), through our router: the answers are those of vLLM alone."""

import json
import random
import string
import time

import httpx
import pytest

from agent.server_metrics import read_start
from tests.support.routed_servers import RoutedServers
from tests.support.vllm_server import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def routed(servers, served_model, tmp_path_factory):
    roles = {"p0": (servers[0], "prefill"), "d0": (servers[1], "decode")}
    with RoutedServers(tmp_path_factory.mktemp("rendered"), served_model, roles) as running:
        yield running


@pytest.fixture
def new_words():
    source = random.Random(4)

    def words():
        return "".join(source.choices(string.ascii_letters + " ", k=200))

    return words


@pytest.fixture
def both(routed, servers):
    """Return a function that asks our router, and then D alone."""

    def ask(body, path=CHAT):
        ours = httpx.post(routed.base_url + path, json=body, timeout=120)
        assert ours.status_code == 200, ours.text
        status, alone = servers[1].post(path, body | {"cache_salt": "alone"})
        assert status == 200, alone
        return ours.json(), alone

    return ask


@pytest.fixture
def loads(servers):
    """Return a function that counts D's verified handoffs."""
    return lambda: int(servers[1].metric("vllm:kvferry_loads_total"))


def chat(words, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 50, "temperature": 0} | fields


def comparable(answer):
    """Return the choices without what differs from request to request."""
    found = []
    for choice in answer["choices"]:
        message = {name: value for name, value in choice["message"].items() if value}
        for call in message.get("tool_calls", ()):
            del call["id"]
        likely = [
            [top["token"] for top in entry["top_logprobs"] if top["logprob"] > -100]
            for entry in (choice.get("logprobs") or {"content": []})["content"]
        ]
        found.append((choice["index"], message, choice["finish_reason"], likely))
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": SCHEMA},
        pytest.param({"response_format": SCHEMA, "logprobs": True, "top_logprobs": 2}, marks=pytest.mark.full),
        {"response_format": SCHEMA, "n": 2, "temperature": 1, "seed": 5},
        {"structured_outputs": {"regex": "[ab]{3}x"}},
        pytest.param({"structured_outputs": {"choice": ["red", "green"]}}, marks=pytest.mark.full),
        pytest.param({"tools": TOOLS}, marks=pytest.mark.full),
        {"tools": TOOLS, "tool_choice": "required"},
        pytest.param({"tools": TOOLS, "tool_choice": "required", "max_tokens": 20}, marks=pytest.mark.full),
        {"tools": TOOLS, "tool_choice": NAMED, "logprobs": True, "top_logprobs": 1},
    ],
    ids="-".join,
)
def test_an_answer_is_that_of_vllm_alone_by_a_handoff(both, loads, new_words, fields):
    before = loads()
    ours, alone = both(chat(new_words(), **fields))
    assert comparable(ours) == comparable(alone)
    assert ours["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert loads() == before + 1


def test_a_schema_is_kept(both, new_words):
    ours, _ = both(chat(new_words(), response_format=SCHEMA, max_tokens=400))
    (choice,) = ours["choices"]
    assert json.loads(choice["message"]["content"])["city"] in ("Rome", "Oslo")


def test_calls_and_results_of_tools_in_the_history(both, new_words):
    history = [
        {"role": "user", "content": new_words()},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    ours, alone = both(chat("", messages=history, tools=TOOLS))
    assert comparable(ours) == comparable(alone)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"response_format": SCHEMA}, marks=pytest.mark.full),
        {"tools": TOOLS, "tool_choice": "required"},
        pytest.param({"tools": TOOLS, "tool_choice": NAMED}, marks=pytest.mark.full),
        {"tools": TOOLS, "tool_choice": "required", "stop": ["never"]},
        {"tools": TOOLS, "tool_choice": "required", "logprobs": True, "top_logprobs": 1},
    ],
    ids="-".join,
)
def test_a_stream_says_the_same(routed, servers, new_words, fields):
    body = chat(new_words(), **fields, stream=True, stream_options={"include_usage": True})
    ours = streamed(routed.base_url, body)
    assert ours == streamed(servers[1].base_url, body | {"cache_salt": "alone"})
    assert any(ours[:2])


def streamed(base_url, body):
    """Return text, calls by their numbers, tokens with logprobs, the last reason and the numbers of tokens of a stream."""
    text, calls, tokens, reason, is_done, usage = "", {}, [], None, False, {}
    with httpx.stream("POST", base_url + CHAT, json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            is_done = is_done or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                tokens += [entry["token"] for entry in (choice.get("logprobs") or {"content": []})["content"]]
                for call in choice["delta"].get("tool_calls") or ():
                    said = (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
                    calls[call["index"]] = calls.get(call["index"], "") + said
                reason = choice["finish_reason"] or reason
    assert is_done
    return text, calls, tokens, reason, usage["prompt_tokens"], usage["completion_tokens"]


def test_a_server_tells_when_its_process_began(servers):
    """By that, an agent learns that another process has its server's place."""
    found = {read_start(httpx.get(f"{servers[0].base_url}/metrics").text) for _ in range(2)}
    assert len(found) == 1
    assert 0 < time.time() - found.pop() < 3600


def test_completions_under_a_grammar(both, new_words):
    body = {"model": MODEL, "prompt": [new_words(), new_words()], "max_tokens": 10, "temperature": 0}
    ours, alone = both(body | {"structured_outputs": {"regex": "[ab]{3}x"}}, COMPLETIONS)
    assert [choice["text"] for choice in ours["choices"]] == [choice["text"] for choice in alone["choices"]]
    assert len(ours["choices"]) == 2


@pytest.mark.parametrize(
    ("body", "path"),
    [
        pytest.param({"use_beam_search": True, "n": 2}, CHAT, marks=pytest.mark.full),
        ({"model": MODEL, "max_tokens": 10, "temperature": 0}, MESSAGES),
    ],
)
def test_what_cannot_be_rendered_goes_in_two_legs(both, loads, new_words, body, path):
    before = loads()
    words = new_words()
    ours, alone = both(chat(words) | body, path)
    if path == CHAT:
        assert comparable(ours) == comparable(alone)
    else:
        assert ours["content"] == alone["content"]
        assert loads() == before + 1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "nope"}, 404),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, 400),
    ],
)
def test_what_vllm_refuses_is_refused_with_its_reason(routed, servers, new_words, fields, status):
    body = chat(new_words(), **fields)
    ours = httpx.post(routed.base_url + CHAT, json=body, timeout=60)
    assert ours.status_code == status
    _, alone = servers[1].post(CHAT, body)
    assert ours.json()["error"]["message"].removeprefix("vLLM: ") == alone["error"]["message"]
