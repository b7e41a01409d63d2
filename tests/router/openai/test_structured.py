from __future__ import annotations

import asyncio
import json
import threading

import pytest

from core.errors import InvalidRequest, Overloaded
from core.model.hub import resolve_model
from core.model.tokenizer import Tokenizer
from core.wire.sampling import StructuredOutput
from router.openai.body_parser import parse_body
from router.openai.requests import ChatCompletionRequest, CompletionRequest
from router.openai.sampling import ModelLimits, check_supported, shared_params
from router.openai.structured import MAX_TRIALS, GrammarGate, field_of_form, structured_output
from router.openai.tool_choice import tool_use
from tests.support.json_model import write_json_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


def completion(**fields):
    return parse_body(json.dumps({"prompt": "p", **fields}).encode(), CompletionRequest)


def of_schema(schema):
    return StructuredOutput(kind="json_schema", value=json.dumps(schema, separators=(",", ":")))


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None, "guided_json_object": False}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
            of_schema(SCHEMA),
        ),
        ({"response_format": TAG}, StructuredOutput(kind="structural_tag", value=json.dumps(TAG, separators=(",", ":")))),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, of_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA, separators=(",", ":"))}}, of_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, StructuredOutput(kind="regex", value="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(kind="choice", value='["a","b"]')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(kind="json_object")),
        ({"guided_json": SCHEMA}, of_schema(SCHEMA)),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, StructuredOutput(kind="regex", value="a")),
        ({"guided_choice": ["a"]}, StructuredOutput(kind="choice", value='["a"]')),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(kind="grammar", value='start: "a"')),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_reads_each_spelling(fields, form):
    request = completion(**fields)
    check_supported(request)
    assert structured_output(request) == form
    assert shared_params(request, ModelLimits(max_model_len=100, vocab_size=50)).structured_output == form


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format", "got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format",
            "must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format",
            "response_format.schema .* json_object: use type json_schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            "response_format.json_schema .* text: leave it out",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strikt": True}}},
            "response_format",
            "response_format.json_schema.strikt .* leave it out",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "response_format",
            "response_format.json_schema.schema must be",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "no field 'xml'"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be a string"),
        ({"guided_choice": "a"}, "guided_choice", "list of strings"),
        ({"guided_regex": "a{1,99999}"}, "guided_regex", "99999 times"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "guided_regex both"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "excludes structured output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(fields, param, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        structured_output(completion(**fields))
    assert refused.value.param == param


def test_chats_have_the_same_fields():
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    request = parse_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert structured_output(request) == StructuredOutput(kind="json_object")
    assert field_of_form(request) == "response_format"


async def test_the_gate_refuses_what_cannot_be_compiled_and_names_it(tmp_path):
    gate = GrammarGate(Tokenizer(resolve_model(str(write_json_model(tmp_path)), tmp_path)))
    try:
        await gate.check(None, None)
        await gate.check(of_schema(SCHEMA), "guided_json")
        with pytest.raises(InvalidRequest, match="uniqueItems") as refused:
            await gate.check(of_schema({"uniqueItems": True}), "guided_json")
        assert refused.value.param == "guided_json"
    finally:
        gate.close()


class SlowChecker:
    """Checks that wait for ``go``; the grammar ``busy`` gets no answer, ``bad`` is refused."""

    def __init__(self):
        self.go = threading.Event()
        self.asked = []
        self.kept = set()

    def check_kept(self, output):
        return output in self.kept

    def check(self, output):
        self.asked.append(output.value)
        assert self.go.wait(30)
        if output.value == "busy":
            raise Overloaded("busy")
        if output.value == "bad":
            raise InvalidRequest("bad")

    def close(self):
        self.go.set()


@pytest.fixture
def slow_gate():
    gate = GrammarGate(None)
    gate._checker = SlowChecker()
    yield gate
    gate.close()


def of_regex(pattern):
    return StructuredOutput(kind="regex", value=pattern)


@pytest.mark.parametrize("pattern", ["busy", "good"])
async def test_requests_of_one_grammar_share_its_trial(slow_gate, pattern):
    waiting = [asyncio.create_task(slow_gate.check(of_regex(pattern), "guided_regex")) for _ in range(30)]
    await asyncio.sleep(0)
    slow_gate._checker.go.set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert slow_gate._checker.asked == [pattern]
    assert {type(end) for end in ends} == {Overloaded if pattern == "busy" else type(None)}
    with pytest.raises(Overloaded):
        await slow_gate.check(of_regex("busy"), "guided_regex")
    assert len(slow_gate._checker.asked) == 2  # the first answer is not for later requests


class ListChecker(SlowChecker):
    """Finds that lists of calls cannot be compiled, and functions' own schemas can, but for those that have ``bad``."""

    def __init__(self, reason, ends_with_overload=False):
        super().__init__()
        self.reason, self.ends_with_overload = reason, ends_with_overload

    def check(self, output):
        self.asked.append(output.value)
        if "anyOf" in output.value or "bad" in output.value:
            raise InvalidRequest(f"json_schema {self.reason}")
        if self.ends_with_overload:
            raise Overloaded("busy")


@pytest.mark.parametrize(
    ("titles", "reason", "is_busy", "param", "num_trials"),
    [
        ("abc", "is not supported as it is: x", False, "tools", 4),
        (["a", "bad", "c"], "is not supported as it is: x", False, "tools[1]", 3),
        (["a", "bad"], "is not supported as it is: x", True, "tools", 2),
        (["a", "bad"], "is too complex: it takes long", False, "tools", 1),
        (["bad"], "is too complex: it takes long", False, "tools[0]", 1),
    ],
    ids=["together", "one", "busy", "too complex", "only one"],
)
async def test_the_function_at_fault_is_looked_for_within_bounds(slow_gate, titles, reason, is_busy, param, num_trials):
    checker = slow_gate._checker = ListChecker(reason, is_busy)
    tools = [{"type": "function", "function": {"name": f"f{title}", "parameters": {"title": title}}} for title in titles]
    request = ChatCompletionRequest(messages=[], tools=tools, tool_choice="required")
    with pytest.raises(InvalidRequest) as refused:
        await slow_gate.check_with_calls(None, None, tool_use(request), ())
    assert (refused.value.param, len(checker.asked)) == (param, num_trials)
    place = "the schema of calls is " if param == "tools" else f"{param}.function.parameters: "
    assert refused.value.message == place + reason.removeprefix("is ")


async def test_requests_that_share_a_refusal_each_get_their_field(slow_gate):
    fields = ["guided_regex", "structured_outputs"]
    waiting = [asyncio.create_task(slow_gate.check(of_regex("bad"), field)) for field in fields]
    await asyncio.sleep(0)
    slow_gate._checker.go.set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [end.param for end in ends] == fields


async def test_a_grammar_with_an_answer_does_not_wait_behind_others(slow_gate):
    slow_gate._checker.kept.add(of_regex("known"))
    first = asyncio.create_task(slow_gate.check(of_regex("good"), "guided_regex"))
    await asyncio.sleep(0)
    await asyncio.wait_for(slow_gate.check(of_regex("known"), "guided_regex"), 30)
    assert not first.done()
    slow_gate._checker.go.set()
    await first


async def test_a_grammar_whose_clients_have_left_is_not_checked(slow_gate):
    first = asyncio.create_task(slow_gate.check(of_regex("good"), "guided_regex"))
    left, stays = (asyncio.create_task(slow_gate.check(of_regex("left"), "guided_regex")) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait((left,))
    assert of_regex("left") in slow_gate._trials  # another still waits
    stays.cancel()
    await asyncio.wait((stays,))
    slow_gate._checker.go.set()
    await first
    await slow_gate.check(of_regex("next"), "guided_regex")
    assert slow_gate._checker.asked == ["good", "next"]


async def test_more_grammars_than_may_wait_are_refused_but_not_known_ones(slow_gate):
    slow_gate._checker.kept.add(of_regex("known"))
    waiting = [asyncio.create_task(slow_gate.check(of_regex(f"a{index}"), "guided_regex")) for index in range(MAX_TRIALS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"{MAX_TRIALS} grammars wait"):
        await slow_gate.check(of_regex("one more"), "guided_regex")
    shared = asyncio.create_task(slow_gate.check(of_regex("a5"), "guided_regex"))
    await slow_gate.check(of_regex("known"), "guided_regex")
    slow_gate._checker.go.set()
    await asyncio.gather(*waiting, shared)
    await slow_gate.check(of_regex("one more"), "guided_regex")


async def test_the_wait_for_other_grammars_is_bounded_but_not_its_own_check(slow_gate):
    slow_gate._max_wait_s = 0.2
    first = asyncio.create_task(slow_gate.check(of_regex("good"), "guided_regex"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="took too long"):
        await slow_gate.check(of_regex("behind"), "guided_regex")
    assert not first.done()
    slow_gate._checker.go.set()
    await first
    assert slow_gate._checker.asked == ["good"]


async def test_many_quick_grammars_at_once_are_all_checked(slow_gate):
    slow_gate._checker.go.set()
    await asyncio.gather(*(slow_gate.check(of_regex(f"a{index}"), "guided_regex") for index in range(64)))
    assert len(slow_gate._checker.asked) == 64


async def test_tenants_take_turns_with_their_grammars(slow_gate):
    asked = [("a1", 1), ("a2", 1), ("a3", 1), ("a4", 1), ("b1", 2), ("b2", 2), ("a4", 2), ("c1", 3)]
    waiting = [asyncio.create_task(slow_gate.check(of_regex(pattern), "guided_regex", tenant)) for pattern, tenant in asked]
    await asyncio.sleep(0)
    slow_gate._checker.go.set()
    await asyncio.gather(*waiting)
    assert slow_gate._checker.asked == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def flood(gate, tenant, num):
    waiting = [asyncio.create_task(gate.check(of_regex(f"{tenant} {index}"), "guided_regex", tenant)) for index in range(num)]
    await asyncio.sleep(0)
    return waiting


@pytest.mark.parametrize("nums", [(MAX_TRIALS,), (128, 85, 43)])
async def test_every_tenant_gets_its_share_of_a_full_room(slow_gate, nums):
    waiting = [await flood(slow_gate, tenant, num) for tenant, num in enumerate(nums, 1)]
    others = [task for tenant in (11, 12) for task in await flood(slow_gate, tenant, 1)]
    with pytest.raises(Overloaded, match=f"{MAX_TRIALS} grammars wait to be checked already, {nums[0] - 2} of this API key"):
        await slow_gate.check(of_regex("one more"), "guided_regex", 1)
    slow_gate._checker.go.set()
    first, *rest = [await asyncio.gather(*tasks, return_exceptions=True) for tasks in waiting]
    assert [type(end) for end in first] == [type(None)] * (nums[0] - 2) + [Overloaded] * 2  # the last ones have given way
    assert not any(any(ends) for ends in rest)
    await asyncio.gather(*others)


async def test_a_grammar_counts_for_a_tenant_that_still_waits_for_it(slow_gate):
    patterns = [of_regex(f"shared {index}") for index in range(MAX_TRIALS)]
    left, stay = (
        [asyncio.create_task(slow_gate.check(pattern, "guided_regex", tenant)) for pattern in patterns] for tenant in (1, 2)
    )
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    back = asyncio.create_task(slow_gate.check(of_regex("back"), "guided_regex", 1))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"{MAX_TRIALS - 1} of this API key"):
        await slow_gate.check(of_regex("one more"), "guided_regex", 2)
    slow_gate._checker.go.set()
    await back
    ends = await asyncio.gather(*stay, return_exceptions=True)
    assert [type(end) for end in ends] == [type(None)] * (MAX_TRIALS - 1) + [Overloaded]


@pytest.mark.parametrize("tenant", [0, 5])
async def test_in_a_room_of_one_tenant_no_grammar_gives_way_to_a_new_one(slow_gate, tenant):
    compiled, *waiting = await flood(slow_gate, tenant, MAX_TRIALS)
    await asyncio.sleep(0)
    compiled.cancel()  # its trial goes on, for nobody
    await asyncio.wait((compiled,))
    for pattern in ("new", "newer"):
        with pytest.raises(Overloaded, match=f"{MAX_TRIALS} grammars wait to be checked already"):
            await asyncio.wait_for(slow_gate.check(of_regex(pattern), "guided_regex", tenant), 20)
    slow_gate._checker.go.set()
    assert not any(await asyncio.gather(*waiting))


async def test_a_grammar_for_which_another_tenant_waits_does_not_give_way(slow_gate):
    first = await flood(slow_gate, 1, MAX_TRIALS)
    shared = asyncio.create_task(slow_gate.check(of_regex(f"1 {MAX_TRIALS - 1}"), "guided_regex", 2))
    await asyncio.sleep(0)
    others = await flood(slow_gate, 3, 1)
    slow_gate._checker.go.set()
    ends = await asyncio.gather(*first, return_exceptions=True)
    assert [index for index, end in enumerate(ends) if isinstance(end, Overloaded)] == [MAX_TRIALS - 2]
    await asyncio.gather(shared, *others)


async def test_in_a_room_of_grammars_that_tenants_share_a_new_one_is_refused(slow_gate):
    patterns = [of_regex(f"shared {index}") for index in range(MAX_TRIALS)]
    waiting = [
        asyncio.create_task(slow_gate.check(pattern, "guided_regex", tenant)) for tenant in (1, 2) for pattern in patterns
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="0 of this API key"):
        await asyncio.wait_for(slow_gate.check(of_regex("new"), "guided_regex", 3), 20)
    slow_gate._checker.go.set()
    assert not any(await asyncio.gather(*waiting))


async def test_a_pause_of_the_router_does_not_end_the_wait_for_other_grammars(slow_gate):
    pauses = [0.0]
    slow_gate._max_wait_s, slow_gate._paused_s = 0.05, lambda: pauses[0]
    tasks = [asyncio.create_task(slow_gate.check(of_regex(pattern), "guided_regex")) for pattern in ("first", "behind")]
    await asyncio.sleep(0)
    pauses[0] = 10.0
    await asyncio.sleep(0.1)
    slow_gate._checker.go.set()
    await asyncio.gather(*tasks)
    assert slow_gate._checker.asked == ["first", "behind"]


async def test_a_grammar_that_no_thread_takes_holds_up_no_other(slow_gate, monkeypatch):
    slow_gate._checker.go.set()
    start, full = threading.Thread.start, [True]

    def refuse_once(thread):
        if full:
            full.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    asked = [slow_gate.check(of_regex(pattern), "guided_regex") for pattern in ("first", "behind")]
    first, behind = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
    assert isinstance(first, Overloaded)
    assert behind is None
    assert slow_gate._checker.asked == ["behind"]


async def test_requests_whose_grammars_wait_end_with_the_gate(slow_gate):
    waiting = [asyncio.create_task(slow_gate.check(of_regex(pattern), "guided_regex")) for pattern in ("first", "behind")]
    await asyncio.sleep(0.05)
    slow_gate.close()
    _, behind = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert isinstance(behind, asyncio.CancelledError)
