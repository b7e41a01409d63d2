from __future__ import annotations

import json
import random

import numpy as np
import pytest

from core.errors import InvalidRequest, KVFerryError
from core.grammar.compiled import CompiledGrammar, Vocabulary
from core.wire.sampling import StructuredOutput
from tests.support.json_model import CALL, EOS_TOKEN_IDS

PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}, {"begin": "<f=b>", "schema": True, "end": "</f>"}],
    "triggers": ["<f="],
}
CALL_TAG = {"structures": [{"begin": CALL, "schema": PERSON, "end": "."}], "triggers": [CALL]}


def form(kind, value=""):
    return StructuredOutput(kind=kind, value=value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


@pytest.fixture
def accepts(vocabulary, tokenizer):
    """Return whether a whole text follows a form: every token is allowed in its place, and the end after the last."""

    def check(output, text):
        matcher = CompiledGrammar(output, vocabulary).start()
        for token_id in tokenizer.encode(text).ids:
            allowed = matcher.allowed()
            if allowed is None or not allowed[token_id]:
                return False
            matcher.accept([token_id])
        allowed = matcher.allowed()
        return allowed is not None and bool(allowed[list(EOS_TOKEN_IDS)].all())

    return check


CASES = [
    (form("json_object"), '{"a": [1, {"b": null}],\n  "c": "d"}', "[1]"),
    (form("json_schema", PERSON), '{"a":1}', '{"a":1.5}'),
    (form("json_schema", PERSON), '{ "a": 1 }', '{"a": 1, "b": 2}'),
    (form("json_schema", PERSON), '{"a":' + " " * 32 + "1}", '{"a":' + " " * 33 + "1}"),
    (form("json_schema", "true"), "[1]", "x"),
    (form("json_schema", {"type": "string", "format": "slug"}), '"any"', "1"),
    (form("json_schema", {"x-guidance": {"item_separator": ";"}, "type": "array"}), "[1,2]", "[1;2]"),
    (
        form("json_schema", {"properties": {"format": {"type": "integer"}}, "required": ["format"]}),
        '{"format":1}',
        '{"format":""}',
    ),
    (form("regex", r"[a-c]{2,3}\d"), "abc1", "abcd1"),
    (form("regex", "^ab$"), "ab", "xab"),
    (form("choice", ["yes", 'no "2"\n', "smile 😀"]), "smile 😀", "smile"),
    (form("choice", ["yes", 'no "2"\n']), 'no "2"\n', "no"),
    (form("grammar", 'start: "a" b+\nb: "b" | "::="'), "ab::=", "a"),
    (form("grammar", 'root ::= "a" b+\nb ::= "b" | "c"'), "abc", "ac d"),
    (form("structural_tag", TAG), 'so <f=a>{"a":1}</f> and <f=b>[]</f>.', 'so <f=a>{"b":1}</f>'),
    (form("structural_tag", TAG), "only text", "text <f=c>"),
    (form("structural_tag", CALL_TAG), f'text {CALL}{{"a":1}}.', f"text {CALL} x"),
]


@pytest.mark.parametrize(("output", "good", "bad"), CASES, ids=[f"{case[0].kind}-{place}" for place, case in enumerate(CASES)])
def test_allows_what_follows_the_form_and_nothing_else(accepts, output, good, bad):
    assert accepts(output, good)
    assert not accepts(output, bad)


UNSUPPORTED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"type": "string", "format": "uri-reference"}, "uri-reference"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"properties": {"a": {"type": "object", "minProperties": 3, "required": ["x"]}}}, "minProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"$ref": "https://example.com/schema"}, "example.com"),
    ({"type": "string", "pattern": "(?=a)a"}, "look-around"),
    ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
    ("false", "Unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "name"), UNSUPPORTED, ids=[name for _, name in UNSUPPORTED])
def test_names_what_it_does_not_support(vocabulary, schema, name):
    with pytest.raises(InvalidRequest, match=name):
        CompiledGrammar(form("json_schema", schema), vocabulary)


def test_a_refusal_does_not_advise_an_option_that_is_not_there(vocabulary):
    with pytest.raises(InvalidRequest) as refused:
        CompiledGrammar(form("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}), vocabulary)
    assert "coerce_one_of" not in refused.value.message


@pytest.mark.parametrize("value", ["start: (", "start: other", 'root ::= ("a"'])
def test_refuses_malformed_grammars(vocabulary, value):
    with pytest.raises(InvalidRequest):
        CompiledGrammar(form("grammar", value), vocabulary)


def test_an_unfinished_output_cannot_end(vocabulary, tokenizer):
    matcher = CompiledGrammar(form("regex", "ab"), vocabulary).start(tokenizer.encode("a").ids)
    assert not matcher.allowed()[list(EOS_TOKEN_IDS)].any()


def test_a_place_is_rebuilt_from_the_tokens_so_far(vocabulary, tokenizer):
    grammar = CompiledGrammar(form("json_schema", PERSON), vocabulary)
    ids = tokenizer.encode('{"a": 12}').ids
    kept = grammar.start()
    for count, token_id in enumerate(ids, start=1):
        kept.accept([token_id])
        assert np.array_equal(kept.allowed(), grammar.start(ids[:count]).allowed())


def test_requests_of_one_grammar_do_not_move_each_other(vocabulary, tokenizer):
    grammar = CompiledGrammar(form("regex", "ab|cd"), vocabulary)
    first, second = grammar.start(), grammar.start()
    first.accept(tokenizer.encode("a").ids)
    assert np.array_equal(second.allowed(), grammar.start().allowed())


def test_a_token_that_does_not_follow_is_an_error_that_stays(vocabulary, tokenizer):
    matcher = CompiledGrammar(form("regex", "ab"), vocabulary).start(tokenizer.encode("x").ids)
    assert isinstance(matcher.error, KVFerryError)
    assert matcher.allowed() is None
    matcher.accept(tokenizer.encode("ab").ids)
    assert matcher.error is not None


def test_after_the_end_nothing_follows_and_nothing_is_wrong(vocabulary, tokenizer):
    grammar = CompiledGrammar(form("regex", "ab"), vocabulary)
    matcher = grammar.start([*tokenizer.encode("ab").ids, EOS_TOKEN_IDS[1]])
    assert matcher.allowed() is None
    matcher.accept([EOS_TOKEN_IDS[0]])
    assert matcher.error is None
    assert not grammar.is_broken


@pytest.mark.parametrize("pattern", ["ab", "ab*"])
@pytest.mark.parametrize("eos_token_id", EOS_TOKEN_IDS)
def test_a_regular_end_after_a_mask_is_no_error(vocabulary, tokenizer, pattern, eos_token_id):
    matcher = CompiledGrammar(form("regex", pattern), vocabulary).start(tokenizer.encode("ab").ids)
    matcher.allowed()
    matcher.accept([eos_token_id])
    assert matcher.error is None
    assert matcher.allowed() is None


def test_an_end_that_the_grammar_itself_names_is_no_error(vocabulary, tokenizer):
    matcher = CompiledGrammar(form("grammar", 'start: text\ntext[stop=""]: /[a-z]+/'), vocabulary).start(
        tokenizer.encode("ab").ids
    )
    assert matcher.allowed()[EOS_TOKEN_IDS[0]]
    matcher.accept([EOS_TOKEN_IDS[0]])
    assert matcher.error is None


def test_an_end_before_the_output_is_complete_is_an_error(vocabulary, tokenizer):
    grammar = CompiledGrammar(form("regex", "ab"), vocabulary)
    matcher = grammar.start([*tokenizer.encode("a").ids, EOS_TOKEN_IDS[0]])
    assert "does not follow the grammar" in matcher.error.message
    assert not grammar.is_broken


def test_a_token_that_does_not_follow_leaves_the_grammar_to_others(vocabulary, tokenizer):
    grammar = CompiledGrammar(form("regex", "ab"), vocabulary)
    assert grammar.start(tokenizer.encode("x").ids).error is not None
    assert not grammar.is_broken


def test_a_full_grammar_says_so_to_all_and_a_new_one_goes_on(vocabulary, tokenizer, monkeypatch):
    monkeypatch.setattr("core.grammar.compiled.MAX_LEXER_STATES", 300)
    output, letters = form("regex", "(a|b)*a(a|b){14}c"), tokenizer.encode("ab").ids
    grammar, choose = CompiledGrammar(output, vocabulary), random.Random(1).choice
    other = grammar.start(letters)
    assert other.allowed() is not None
    first = grammar.start()
    while first.allowed() is not None:
        first.accept([choose(letters)])
    assert grammar.is_broken
    other.accept(letters)
    for matcher in (first, other, grammar.start(letters)):
        assert "too complex to go on" in matcher.error.message
    assert CompiledGrammar(output, vocabulary).start(letters + letters).allowed() is not None


def test_special_and_padding_tokens_are_never_text(vocabulary, tokenizer):
    allowed = CompiledGrammar(form("regex", r"(.|\n)*"), vocabulary).start().allowed()
    special = [tokenizer.token_to_id(token) for token in ("<pad>", "<s>", CALL)]
    assert not allowed[special].any()
    assert not allowed[tokenizer.get_vocab_size() :].any()


def test_a_model_without_an_end_of_text_has_no_structured_output(setup):
    with pytest.raises(InvalidRequest, match="no end-of-text"):
        Vocabulary(setup.tokenizer_json, setup.vocab_size, ())


def test_an_unknown_tokenizer_is_refused(setup):
    with pytest.raises(InvalidRequest, match="tokenizer"):
        Vocabulary("{}", setup.vocab_size, setup.eos_token_ids)
