"""Forms of the output together with tools: the grammar allows both, and the parser tells them apart."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.errors import InvalidRequest
from core.grammar import tool_calls
from core.grammar.tool_calls import CallSyntax, form_or_calls
from core.wire.sampling import StructuredOutput
from router.openai.requests import ChatCompletionRequest, ChatMessage
from router.openai.tool_choice import form_or_free_calls, tool_use
from router.tools.form_or_calls import FormOrCallsParser
from router.tools.formats import FUNCTIONARY, HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, ToolFormat
from router.tools.output import CallArguments, CallStart
from tests.support.grammar_check import text_checker
from tests.support.json_model import write_json_tokenizer
from tests.support.tool_pieces import join

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Bonn"]}},
}
SCHEMAS = {"weather": WEATHER, "time": {"type": "object"}}
OSLO, ANY = '{"city": "Oslo"}', '{"at": [1, {"x": "}<tool_call>"}]}'
SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
CALLS = {  # of each format: texts of the calls weather(OSLO), and weather(OSLO) and time(ANY)
    "hermes": (
        HERMES,
        [f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'],
        [
            f'<tool_call>{{"name":"weather","arguments":{OSLO}}}</tool_call>'
            f'\n<tool_call>{{"name": "time", "arguments": {ANY}}}</tool_call>'
        ],
    ),
    "llama3_json": (
        LLAMA3_JSON,
        [
            f'{{"name": "weather", "parameters": {OSLO}}}',
            f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}',
            f'{{\n "name": "weather",\n "parameters":{OSLO}}}',
        ],
        [f'{{"name": "weather", "parameters": {OSLO}}}; {{"name": "time", "parameters": {ANY}}}'],
    ),
    "mistral": (
        MISTRAL,
        [
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]',
            f"[TOOL_CALLS]weather[ARGS]{OSLO}",
            f"[TOOL_CALLS]weather{OSLO}",
        ],
        [
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}, {{"name": "time", "arguments": {ANY}}}]',
            f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]time[ARGS]{ANY}",
        ],
    ),
    "functionary": (
        FUNCTIONARY,
        [f"<function=weather>{OSLO}</function>"],
        [f"<function=weather>{OSLO}</function><function=time>{ANY}</function>"],
    ),
}
FORMS = {  # a form, and a text that it allows
    "json_object": (StructuredOutput(kind="json_object"), '{"name": "other", "is": "<tool_call>{}</tool_call>"}'),
    "json_schema": (
        StructuredOutput(kind="json_schema", value='{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}'),
        '{"n": 1}',
    ),
    "regex": (StructuredOutput(kind="regex", value=r"a/b\d{1,3}"), "a/b17"),
    "choice": (StructuredOutput(kind="choice", value='["yes", "no \\"2\\""]'), 'no "2"'),
    "lark": (StructuredOutput(kind="grammar", value='start: A+ call\nA: "{"\ncall: "x" # calls: }'), "{{x"),
    "gbnf": (StructuredOutput(kind="grammar", value='root ::= "a" b\nb ::= [0-9]'), "a7"),
    "structural_tag": (
        StructuredOutput(
            kind="structural_tag",
            value='{"structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], "triggers": ["<a"]}',
        ),
        "so <a>17</a>",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_json_tokenizer(folder)
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.add_special_tokens(SPECIAL)
    return found


@pytest.fixture(scope="module")
def accepts(tokenizer):
    """Return whether a whole text follows a form."""
    return text_checker(tokenizer)


def both(form, tool_format: ToolFormat, tokenizer, *, is_parallel=True):
    special = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return form_or_calls(form, tool_format.syntaxes, SCHEMAS, special, is_parallel=is_parallel)


def parser(tool_format: ToolFormat) -> FormOrCallsParser:
    openings = [opening for syntax in tool_format.syntaxes for opening in syntax.openings(list(SCHEMAS))]
    return FormOrCallsParser(openings, tool_format.parser())


def pieces(tool_format: ToolFormat, parts):
    found, reader = [], parser(tool_format)
    for part in parts:
        found += reader.push(part)
    return join(found + reader.finish())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_the_grammar_allows_the_form_and_calls_and_the_parser_reads_them(accepts, tokenizer, name, form):
    tool_format, single, several = CALLS[name]
    output, text = FORMS[form]
    grammar = both(output, tool_format, tokenizer)
    assert accepts(grammar, text)
    assert pieces(tool_format, text) == [text]
    weather = [CallStart(0, "weather"), CallArguments(0, OSLO)]
    for calls in single:
        assert accepts(grammar, calls), calls
        assert pieces(tool_format, calls) == weather
    for calls in several:
        assert accepts(grammar, calls), calls
        assert pieces(tool_format, calls) == [*weather, CallStart(1, "time"), CallArguments(1, ANY)]
        if form != "structural_tag":  # its text is free
            assert not accepts(both(output, tool_format, tokenizer, is_parallel=False), calls)


@pytest.mark.parametrize("name", CALLS)
def test_the_grammar_allows_nothing_else(accepts, tokenizer, name):
    tool_format, (call, *_), (two, *_) = CALLS[name]
    output, text = FORMS["json_schema"]
    grammar = both(output, tool_format, tokenizer)
    wrong = [call.replace("Oslo", "Rome"), call.replace("weather", "snow"), call[:-1], call + text, text + call, two + "x", ""]
    assert [found for found in (*wrong, "free text", "{}") if accepts(grammar, found)] == []


@settings(max_examples=60)
@given(data=st.data())
def test_no_cut_of_the_text_changes_what_is_found(data):
    tool_format, single, several = CALLS[data.draw(st.sampled_from(sorted(CALLS)))]
    text = data.draw(st.sampled_from([*single, *several, *(text for _, text in FORMS.values()), "<tool_", "{", '{"name": "ti']))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert pieces(tool_format, parts) == pieces(tool_format, [text])


def test_text_is_passed_on_as_soon_as_it_can_be_no_call():
    reader = parser(LLAMA3_JSON)
    assert reader.push('{"na') == []
    assert reader.push('me": "we') == []
    assert reader.push('st"') == ['{"name": "west"']
    assert reader.push(": 1}") == [": 1}"]


CHOICES = StructuredOutput(kind="choice", value='["a", "<b", "[TOOL"]')


@pytest.mark.parametrize(
    ("tool_format", "text", "form", "is_text"),
    [
        (HERMES, "<tool_", "json_schema", False),
        (MISTRAL, "[TOOL", "json_schema", False),
        (MISTRAL, "[", "json_schema", True),
        (MISTRAL, "[", "json_object", False),
        (LLAMA3_JSON, '{"name": "wea', "json_schema", True),
        (LLAMA3_JSON, '{"name": "wea', "json_object", True),
        (LLAMA3_JSON, "<|python", "json_object", False),
        (HERMES, " ", "json_schema", True),
        (HERMES, "<tool_", "choice", False),
        (HERMES, "<", "choice", True),
        (MISTRAL, "[TOOL", "choice", True),
        (MISTRAL, "[TOOL_", "choice", False),
        (LLAMA3_JSON, '{"name": "weather", "parameters": ', "choice", False),
        (FUNCTIONARY, "<function", "choice", False),
        (HERMES, "<tool_", "regex", True),
        (HERMES, "<tool_", "lark", True),
        (HERMES, "<tool_", "structural_tag", True),
    ],
)
def test_a_cut_beginning_of_a_call_is_text_only_where_the_form_may_begin_so(tool_format, text, form, is_text):
    openings = [opening for syntax in tool_format.syntaxes for opening in syntax.openings(list(SCHEMAS))]
    reader = FormOrCallsParser(openings, tool_format.parser(), form=CHOICES if form == "choice" else FORMS[form][0])
    assert reader.push(text) + reader.finish() == ([text] if is_text else [])
    assert pieces(tool_format, text) == [text]


def use_of(schemas):
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    return tool_use(ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")], tools=tools))


def test_a_format_that_no_grammar_has_is_refused():
    with pytest.raises(InvalidRequest, match="no grammar has its format of calls") as refused:
        form_or_free_calls(FORMS["json_object"][0], "response_format", use_of(SCHEMAS), PYTHONIC.syntaxes, {})
    assert refused.value.param == "response_format"


def test_a_form_and_tools_that_are_too_large_together_are_refused():
    large = StructuredOutput(kind="json_schema", value=json.dumps({"enum": ["x" * 60_000]}))
    schemas = {"f": {"type": "object", "properties": {"y" * 30_000: {}}}}
    with pytest.raises(InvalidRequest, match="bytes together") as refused:
        form_or_free_calls(large, "guided_json", use_of(schemas), HERMES.syntaxes, {})
    assert refused.value.param == "guided_json"


def test_a_text_with_much_space_is_no_call_and_is_not_held():
    parser = FormOrCallsParser(list(CallSyntax().openings(["f", "g"])), LLAMA3_JSON.parser())
    assert parser.push("{" + " " * 32) == []
    assert parser.push(" ") == ["{" + " " * 33]
    assert parser.push("x") == ["x"]


@pytest.mark.parametrize(("tool_format", "num_schemas"), [(LLAMA3_JSON, 1), (MISTRAL, 1 + len(SCHEMAS))])
def test_the_schemas_of_calls_are_written_once_for_all_syntaxes(monkeypatch, tool_format, num_schemas):
    written = []
    write = tool_calls.embedded_schema
    monkeypatch.setattr(tool_calls, "embedded_schema", lambda schema: (written.append(schema), write(schema))[1])
    form_or_calls(StructuredOutput(kind="json_object"), tool_format.syntaxes, SCHEMAS, {}, is_parallel=True)
    assert len(written) == num_schemas
