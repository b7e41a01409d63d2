"""Tool-call parsers: what they find, and that no cut of the text changes it."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from router.tools.formats import (
    FUNCTIONARY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    REQUIRED,
    ToolFormat,
    has_known_calls,
    tool_format,
)
from router.tools.output import CallArguments, CallStart, Piece
from router.tools.reasoning import ReasoningParser
from tests.support.tool_pieces import join

OSLO = '{"city": "Oslo", "days": [1, {"two": "}]\\""}]}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'

LLAMA_CALL = '{"name": "f", "parameters": {}}'
MISTRAL_CALL = '{"name": "f", "arguments": {}}'


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, name), CallArguments(index, arguments)]


CASES: dict[str, tuple[ToolFormat, str, list[Piece]]] = {
    "plain text": (HERMES, "  It is < 5 \n", ["  It is < 5 \n"]),
    "one call": (HERMES, HERMES_CALL, call(0, "weather", OSLO)),
    "text, two calls, text": (
        HERMES,
        f"I look.\n{HERMES_CALL}\n{HERMES_CALL}\n\nDone",
        ["I look.", *call(0, "weather", OSLO), *call(1, "weather", OSLO), "\n\nDone"],
    ),
    "arguments before the name": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "id": "x", "name": "f"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    "null arguments": (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    "arguments as a string": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    "an empty string as arguments": (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', call(0, "f", "{}")),
    "a list as arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>',
        call(0, "f", "[1, 2]"),
    ),
    "a number as arguments": (HERMES, '<tool_call>{"arguments": 5, "name": "f"}</tool_call>', call(0, "f", "5")),
    "a word as arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "Oslo"}</tool_call>',
        call(0, "f", '"Oslo"'),
    ),
    "half a character in a name": (
        HERMES,
        r'<tool_call>{"name": "get\ud83d_x", "arguments": {}}</tool_call>',
        call(0, "get\ufffd_x", "{}"),
    ),
    "half a character in arguments as a string": (
        HERMES,
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
        call(0, "f", '{"a": "\ufffd"}'),
    ),
    "pythonic, halves of characters": (
        PYTHONIC,
        r"[f(a='\ud83d', b='\ud83d\ude00 \ude00', c={'\udc00': 1})]",
        call(0, "f", '{"a": "\ufffd", "b": "\U0001f600 \ufffd", "c": {"\ufffd": 1}}'),
    ),
    "no call in the tag": (HERMES, "<tool_call> it is called so", ["<tool_call> it is called so"]),
    "an end without a call": (HERMES, "a </tool_call> b", ["a </tool_call> b"]),
    "the start of a marker": (HERMES, "a <tool_", ["a <tool_"]),
    "a marker in a marker": (HERMES, "<tool_<tool_call>" + HERMES_CALL[11:], ["<tool_", *call(0, "weather", OSLO)]),
    "an open call": (HERMES, HERMES_CALL[:60], call(0, "weather", HERMES_CALL[HERMES_CALL.index(OSLO) : 60])),
    "an object that is no call": (HERMES, '<tool_call>{"a": 1}', ['<tool_call>{"a": 1}']),
    "brackets that do not match": (HERMES, '<tool_call>{"a": [}', ['<tool_call>{"a": [}']),
    "llama json": (LLAMA3_JSON, f'{{"name": "weather", "parameters": {OSLO}}}', call(0, "weather", OSLO)),
    "llama json, two": (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
        [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
    ),
    "llama answers with json": (LLAMA3_JSON, '{"name": "John", "age": 42}', ['{"name": "John", "age": 42}']),
    "llama text with json": (LLAMA3_JSON, 'So: {"name": "f", "parameters": {}}', ['So: {"name": "f", "parameters": {}}']),
    "pythonic": (
        PYTHONIC,
        "[weather(city='Os\\'lo', days=[1, 2], wet=True, at=null), time()]",
        [*call(0, "weather", '{"city": "Os\'lo", "days": [1, 2], "wet": true, "at": null}'), *call(1, "time", "{}")],
    ),
    "pythonic text": (PYTHONIC, "[1, 2] is a list", ["[1, 2] is a list"]),
    "pythonic expression": (PYTHONIC, "[f(a=open('x'))]", ["[f(a=open('x'))]"]),
    "pythonic by position": (PYTHONIC, "[f(1)]", ["[f(1)]"]),
    "mistral list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    "mistral name": (
        MISTRAL,
        'Yes.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{"b": 2}',
        ["Yes.", *call(0, "f", '{"a": 1}'), *call(1, "g", '{"b": 2}')],
    ),
    "mistral text": (MISTRAL, "[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
    "functionary": (
        FUNCTIONARY,
        f"<function=weather>{OSLO}</function>\n<function=time>{{}}</function>",
        [*call(0, "weather", OSLO), *call(1, "time", "{}")],
    ),
    "functionary text": (FUNCTIONARY, "<function=weather> is it", ["<function=weather> is it"]),
    "a marker in text after a call": (
        HERMES,
        f"{HERMES_CALL}Use <tool_call>tags next time",
        [*call(0, "weather", OSLO), "Use <tool_call>tags next time"],
    ),
    "a marker at the end after a call": (
        HERMES,
        f"{HERMES_CALL} and <tool_call>",
        [*call(0, "weather", OSLO), " and <tool_call>"],
    ),
    "a call after a marker that begins none": (
        HERMES,
        f"{HERMES_CALL}x <tool_call>{HERMES_CALL}",
        [*call(0, "weather", OSLO), "x <tool_call>", *call(1, "weather", OSLO)],
    ),
    "llama json, code after a call": (
        LLAMA3_JSON,
        f"<|python_tag|>{LLAMA_CALL} then <|python_tag|>print(1)",
        [*call(0, "f", "{}"), " then <|python_tag|>print(1)"],
    ),
    "llama json, a separator before text": (
        LLAMA3_JSON,
        f"{LLAMA_CALL}; and so on",
        [*call(0, "f", "{}"), "; and so on"],
    ),
    "llama json, a separator before no call": (
        LLAMA3_JSON,
        f'{LLAMA_CALL}; {{"a": 1}}',
        [*call(0, "f", "{}"), '; {"a": 1}'],
    ),
    "llama json, a separator at the end": (LLAMA3_JSON, f"{LLAMA_CALL}; ", call(0, "f", "{}")),
    "mistral, a list of no calls after a call": (
        MISTRAL,
        f"[TOOL_CALLS][{MISTRAL_CALL}] Then [TOOL_CALLS] [1,2] ok",
        [*call(0, "f", "{}"), " Then [TOOL_CALLS] [1,2] ok"],
    ),
    "mistral, an item that is no object": (
        MISTRAL,
        f"a [TOOL_CALLS] [{MISTRAL_CALL}, 5] rest",
        ["a", *call(0, "f", "{}"), ", 5] rest"],
    ),
    "mistral, an object that is no call": (
        MISTRAL,
        f'[TOOL_CALLS][{MISTRAL_CALL},{{"x":1}}] end',
        [*call(0, "f", "{}"), ',{"x":1}] end'],
    ),
    "mistral, cut between calls": (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL} ", call(0, "f", "{}")),
    "mistral, cut after a comma": (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL},", call(0, "f", "{}")),
    "mistral, cut after a comma and space": (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL}, ", call(0, "f", "{}")),
    "mistral, text after a comma": (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL}, x", [*call(0, "f", "{}"), ", x"]),
    "pythonic, cut after a comma": (PYTHONIC, "[f(x=1),", call(0, "f", '{"x": 1}')),
    "pythonic, a marker after calls": (
        PYTHONIC,
        "<|python_start|>[f(x=1)]<|python_end|> see <|python_start|>x",
        [*call(0, "f", '{"x": 1}'), " see <|python_start|>x"],
    ),
    "pythonic, a list after calls": (
        PYTHONIC,
        "[f(x=1)] <|python_start|>[] or <|python_start|>[, g()]",
        [*call(0, "f", '{"x": 1}'), " <|python_start|>[] or <|python_start|>[, g()]"],
    ),
    "pythonic, a marker before text": (PYTHONIC, "<|python_start|>x", ["<|python_start|>x"]),
    "pythonic, text in the list": (PYTHONIC, "[f(x=1), see below]", [*call(0, "f", '{"x": 1}'), ", see below]"]),
    "pythonic, a comma at the end": (PYTHONIC, "[f(x=1),]", call(0, "f", '{"x": 1}')),
    "required, cut in a name": (REQUIRED, '[{"name": "we', []),
    "required, cut between calls": (REQUIRED, '[{"name": "f", "arguments": {}}, {"na', call(0, "f", "{}")),
    "required, cut in arguments": (REQUIRED, '[{"name": "f", "arguments": {"a', call(0, "f", '{"a')),
    "required, and no list": (REQUIRED, "[1] no", ["[1] no"]),
    "required": (REQUIRED, f'[{{"name": "weather", "arguments": {OSLO}}} ]', call(0, "weather", OSLO)),
}


def parse(found: ToolFormat, *parts: str) -> list[Piece]:
    parser = found.parser()
    pieces = [piece for part in parts for piece in parser.push(part)]
    return join(pieces + parser.finish())


@pytest.mark.parametrize("name", CASES)
def test_finds_text_and_calls(name):
    found, text, expected = CASES[name]
    assert parse(found, text) == join(expected)


@pytest.mark.parametrize("name", CASES)
def test_no_cut_changes_the_result(name):
    found, text, _ = CASES[name]
    whole = parse(found, text)
    assert parse(found, *text) == whole
    for first in range(len(text)):
        assert parse(found, text[:first], text[first:]) == whole
    for first in range(0, len(text), 5):
        for second in range(first, len(text), 3):
            assert parse(found, text[:first], text[first:second], text[second:]) == whole


_FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<function=", "</function>", "<|python_tag|>", "[ARGS]", "\n", " ", ";"),
    *('{"name": "f", "arguments": {', '"a": 1', "}}", "}", "{", "[", "]", '"', "\\", ",", "f(", "a=1", ")", "'", ">", "<", "x"),
)


@pytest.mark.slow
@given(st.lists(st.sampled_from(_FRAGMENTS), max_size=12), st.sampled_from([case[0] for case in CASES.values()]), st.data())
@settings(max_examples=400, deadline=None)
def test_no_text_breaks_a_parser_and_no_cut_changes_it(fragments, found, data):
    text = "".join(fragments)
    cut = data.draw(st.integers(0, len(text)))
    whole = parse(found, text)
    assert parse(found, text[:cut], text[cut:]) == whole
    assert parse(found, *text) == whole
    if found is not REQUIRED and not any(isinstance(piece, CallStart) for piece in whole):
        assert "".join(piece for piece in whole if isinstance(piece, str)) == text
    indices = [piece.index for piece in whole if isinstance(piece, CallStart)]
    assert indices == list(range(len(indices)))


@given(
    call_text=st.sampled_from([(HERMES, HERMES_CALL), (LLAMA3_JSON, LLAMA_CALL), (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL}]")]),
    words=st.lists(
        st.sampled_from(
            ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", ",", ";", "{", '{"x":1}', " ", "a", "print(1)"]
        )
    ),
)
def test_what_follows_a_call_and_is_none_stays_text(call_text, words):
    found, text = call_text
    rest = "".join(words) + "."
    *_, after = parse(found, text + rest)
    assert after == rest


def test_arguments_are_sent_before_the_call_ends():
    parser = HERMES.parser()
    parser.push('<tool_call>{"name": "f", "arguments": {"a": ')
    assert parser.push("12") == [CallArguments(0, "12")]


def test_pieces_do_not_hold_a_letter_twice():
    long = json.dumps({"text": "words " * 1000})
    assert parse(HERMES, *f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>') == call(0, "f", long)


ADVERSARIAL = (
    *("<", " ", "\\", "[", "[,", "</", "[f(a=1),", "<tool_call>", "<tool_call>{", '<tool_call>{"a":', '<tool_call>{"name": "'),
    *('<tool_call>{"name":"f","arguments":{"a":[', "<function=f> ", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"),
    *('[TOOL_CALLS][{"name":"f","arguments":{}},', '{"name": "f", "parameters": {}};'),
)
PARSERS = [FUNCTIONARY.parser, HERMES.parser, LLAMA3_JSON.parser, MISTRAL.parser, PYTHONIC.parser, REQUIRED.parser]
PARSERS += [lambda: ReasoningParser(is_open=False), lambda: ReasoningParser(is_open=True)]


def num_steps(make: Callable[[], Any], text: str) -> int:
    """Return how many functions are called, or called from C, to parse a text in pieces: work that no clock measures."""
    count = 0

    def step(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    parser = make()
    sys.setprofile(step)
    try:
        for start in range(0, len(text), 13):
            parser.push(text[start : start + 13])
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("make", PARSERS)
@pytest.mark.parametrize("repeated", ADVERSARIAL)
def test_work_grows_with_the_length_of_the_text(make, repeated):
    short, long = ((repeated * length)[:length] for length in (1000, 4000))
    assert num_steps(make, long) < 4.5 * num_steps(make, short)


@pytest.mark.slow
@pytest.mark.parametrize("make", PARSERS)
def test_a_megabyte_is_read_to_its_end(make):
    parser = make()
    parser.push(("".join(ADVERSARIAL) * (1 << 13))[: 1 << 20])
    parser.finish()


def test_deep_arguments_are_no_call():
    text = '<tool_call>{"arguments": ' + "[" * 1000
    assert parse(HERMES, text) == [text]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (REQUIRED, '[{"name": "f", "arguments": %s}]'),
        (HERMES, '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        (MISTRAL, "[TOOL_CALLS]f%s"),
        (FUNCTIONARY, "<function=f>%s</function>"),
    ],
)
def test_arguments_that_are_passed_on_may_be_as_deep_as_a_grammar_lets_them(tool_format, text):
    deep = '{"a": ' * 500 + "{}" + "}" * 500
    assert parse(tool_format, text % deep) == call(0, "f", deep)


@pytest.mark.parametrize(
    ("template", "expected"),
    [("{{ '<tool_call>' }}", HERMES), ("[TOOL_CALLS]", MISTRAL), ("<|python_tag|>", LLAMA3_JSON), ("{{ messages }}", HERMES)],
)
def test_the_template_tells_the_format(template, expected):
    assert tool_format("auto", template) is expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", True),
        ("[TOOL_CALLS]", True),
        ("{{ tools | tojson }} Answer with a JSON list.", False),
        ("<tool_call>\n<function=f>\n<parameter=a>", False),
    ],
)
def test_a_template_whose_calls_no_format_reads_is_known(template, expected):
    assert has_known_calls(template) is expected


@pytest.mark.parametrize(("name", "expected"), [("pythonic", PYTHONIC), ("functionary", FUNCTIONARY)])
def test_a_format_is_found_by_its_entry_point(name, expected):
    assert tool_format(name) is expected


def test_the_automatic_choice_needs_no_entry_points(monkeypatch):
    monkeypatch.setattr("router.tools.formats.entry_points", lambda group: [])
    assert tool_format("auto", "[TOOL_CALLS]") is MISTRAL


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"auto, functionary, hermes"):
        tool_format("morse")
