import json

import jsonschema
import pytest

from core.errors import InvalidRequest
from core.grammar.limits import MAX_SCHEMA_BYTES
from router.openai import tool_choice
from router.openai.requests import ChatCompletionRequest, ChatMessage
from router.openai.tool_choice import earlier_calls, tool_use

CITY = {"$ref": "#/$defs/city"}
WEATHER = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "$defs": {"city": {"enum": ["Oslo"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def use(**fields):
    return tool_use(ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")], **fields))


def test_auto_has_no_form_and_none_has_no_tools():
    found = use(tools=TOOLS)
    assert (found.choice, found.form, found.is_parallel, found.definitions) == ("auto", None, True, TOOLS)
    assert use(tools=TOOLS, tool_choice="none") is None
    assert use(tools=[], tool_choice="auto") is None


def test_a_named_call_is_bound_by_the_function_s_parameters():
    assert json.loads(use(tools=TOOLS, tool_choice=NAMED).form.value) == WEATHER


def test_required_calls_are_bound_by_all_functions_with_their_references():
    schema = json.loads(use(tools=TOOLS, tool_choice="required").form.value)
    check = jsonschema.Draft202012Validator(schema)
    oslo, time = {"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": {}}
    assert check.is_valid([oslo, time])
    for wrong in ([], [{"name": "weather", "arguments": {"city": "Bonn"}}], [{"name": "other", "arguments": {}}]):
        assert not check.is_valid(wrong)
    single = use(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).form.value
    assert not jsonschema.Draft202012Validator(json.loads(single)).is_valid([oslo, time])


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "$ref"])
def test_references_are_kept_whatever_a_parameter_is_named(name):
    colour = {"type": "object", "properties": {name: {"$ref": "#/$defs/Color"}}, "required": [name]}
    paint = {"name": "paint", "parameters": {**colour, "$defs": {"Color": {"enum": ["red"]}}}}
    tools = [{"type": "function", "function": found} for found in (paint, {"name": "Color"})]
    check = jsonschema.Draft202012Validator(json.loads(use(tools=tools, tool_choice="required").form.value))
    assert check.is_valid([{"name": "paint", "arguments": {name: "red"}}])
    assert not check.is_valid([{"name": "paint", "arguments": {name: {}}}])


@pytest.mark.parametrize("keyword", ["default", "const", "enum", "examples"])
def test_references_in_what_is_no_schema_are_text(keyword):
    values = [{"$ref": "#/a"}]
    parameters = {"type": "object", "properties": {"a": {keyword: values}}}
    schema = json.loads(
        use(
            tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}], tool_choice="required"
        ).form.value
    )
    assert schema["$defs"]["f"] == parameters


def test_forced_call_replaces_a_form_of_the_output():
    form = {"type": "json_object"}
    assert use(tools=TOOLS, tool_choice=NAMED, response_format=form).form == use(tools=TOOLS, tool_choice=NAMED).form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "x"}}]}, "tools[0].function.strict"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_malformed_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        use(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("choice", ["weather", {"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}])
def test_a_choice_of_another_api_is_told_how_to_name_a_function(choice):
    with pytest.raises(InvalidRequest) as refused:
        use(tools=TOOLS, tool_choice=choice)
    assert '{"type": "function", "function": {"name": ...}}' in refused.value.message


def named(**schemas):
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]


DEEP = json.loads('{"properties": {"a": ' * 15 + '{"items": {}}' + "}}" * 15)  # alone, but not in a list of calls
OF_OTHERS = {"$id": "https://x/y", "properties": {"a": {"$ref": "json-schema:///#/$defs/weather"}}}
OF_B = {"properties": {"a": {"$ref": "#b"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a{20000}"}}}, "the regex repeats a part 20000 times"),
        ({"title": "a" * MAX_SCHEMA_BYTES}, "the JSON schema has 6"),
        (DEEP, "the JSON schema is more than 32"),
        (OF_OTHERS, "$ref 'json-schema:///#/$defs/weather' leads to nothing"),
        (OF_B, "$ref '#b' leads to nothing"),
        ({"properties": {"a": {"$ref": "http://[x"}}}, "$ref 'http://[x' is no URI"),
    ],
    ids=["regex", "bytes", "depth", "other function", "anchor", "no URI"],
)
def test_what_no_call_of_several_may_have_is_told_with_its_function(schema, reason):
    with pytest.raises(InvalidRequest) as refused:
        use(tools=[*TOOLS, *named(bad=schema)], tool_choice="required")
    assert refused.value.param == "tools[2]"
    assert refused.value.message.startswith(f"tools[2].function.parameters: {reason}")


def test_a_limit_of_a_named_function_is_told_with_its_place():
    choice = {"type": "function", "function": {"name": "bad"}}
    with pytest.raises(InvalidRequest, match=r"^tools\[2\].function.parameters: the JSON schema has") as refused:
        use(tools=[*TOOLS, *named(bad={"title": "a" * MAX_SCHEMA_BYTES})], tool_choice=choice)
    assert refused.value.param == "tools[2]"


def test_functions_that_are_too_large_together_are_told_so():
    half = {"title": "a" * (MAX_SCHEMA_BYTES // 2)}
    with pytest.raises(InvalidRequest, match=r"^the schema of calls has 6.* bytes, at most 65536") as refused:
        use(tools=named(f=half, g=half), tool_choice="required")
    assert refused.value.param == "tools"


def test_functions_whose_pointers_are_too_large_together_are_told_so():
    schema = {"$defs": {"n" * 1000: {"$anchor": "a"}}, "properties": {str(index): {"$ref": "#a"} for index in range(20)}}
    with pytest.raises(InvalidRequest, match=r"^the schema of calls has more than 65536 bytes once") as refused:
        use(tools=named(**{f"f{index}": schema for index in range(30)}), tool_choice="required")
    assert refused.value.param == "tools"


@pytest.mark.parametrize("title", ["a" * 1000, "a" * MAX_SCHEMA_BYTES])
def test_functions_that_are_too_large_are_not_walked(monkeypatch, title):
    monkeypatch.setattr(tool_choice, "check_limits", None)
    monkeypatch.setattr(tool_choice, "calls_schema", None)
    tools = named(**{f"f{index}": {"title": title} for index in range(100)})
    with pytest.raises(InvalidRequest, match=r" bytes, at most 65536 are allowed$"):
        use(tools=tools, tool_choice="required")


def test_each_function_is_walked_at_most_once_to_find_the_one_at_fault(monkeypatch):
    walked = []
    check = tool_choice.check_limits

    def counted(form):
        walked.append(list(json.loads(form.value)["$defs"]))
        check(form)

    monkeypatch.setattr(tool_choice, "check_limits", counted)
    tools = named(f={}, bad={"properties": {"a": {"pattern": "a{20000}"}}}, g={})
    with pytest.raises(InvalidRequest):
        use(tools=tools, tool_choice="required")
    assert walked == [["f"], ["bad"]]


def test_an_index_of_many_digits_leads_to_nothing():
    schema = {"default": [{"$ref": "#"}], "properties": {"a": {"$ref": "#/default/" + "9" * 5000}}}
    assert "9" * 5000 in use(tools=named(f=schema), tool_choice="required").form.value


def test_the_name_of_a_chosen_function_is_told_in_short():
    with pytest.raises(InvalidRequest) as refused:
        use(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x" * 60_000}})
    assert len(refused.value.message) < 300


def test_fields_of_a_tool_that_nobody_knows_stay_for_the_template():
    function = {"name": "f", "description": None, "strict": True, "foo": 1}
    tools = [{"type": "function", "function": function, "bar": 2}]
    assert use(tools=tools).definitions == tools


def test_earlier_calls_have_their_arguments_as_objects():
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert earlier_calls(calls, "p")[0] == {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": {"x": 1}},
    }


@pytest.mark.parametrize("written", ["[1]", '{"a": tru', "null", "rain", '"rain"', "[" * 5000])
def test_earlier_arguments_that_are_no_object_stay_the_text_that_they_are(written):
    calls = [{"type": "function", "function": {"name": "f", "arguments": written}}]
    assert earlier_calls(calls, "p")[0]["function"]["arguments"] == written


@pytest.mark.parametrize("wrong", [{}, [1], [{"function": {}}], [{"function": {"name": "f", "arguments": [1]}}]])
def test_malformed_earlier_calls_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        earlier_calls(wrong, "messages[0].tool_calls")
