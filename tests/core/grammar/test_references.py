"""References of schemas: a schema allows the same alone and as one call of several, as the specification says."""

import json
from urllib.parse import urljoin

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.grammar import references
from core.grammar.compiled import CompiledGrammar
from core.grammar.limits import MAX_SCHEMA_BYTES
from core.grammar.references import MAX_URI_CHARACTERS, MAX_URIS, _Document, as_pointers
from core.grammar.tool_calls import calls_schema
from core.grammar.translation import to_grammar
from core.wire.sampling import StructuredOutput
from tests.support.grammar_check import text_checker

DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
ONE, TWO = {"enum": ["one"]}, {"enum": ["two"]}


def taking(schema, **beside):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **beside}


def inner(*, identifier="https://x/in"):
    return {"$id": identifier, "$defs": {"Z": ONE, "W": {"$ref": "#/$defs/Z"}}, "$ref": "#/$defs/W"}


# Schemas in which "a" is "one" and nothing else; "two" is what a part at another place allows.
SCHEMAS = {
    "pointer": taking({"$ref": "#/$defs/Z"}, **{"$defs": {"Z": ONE}}),
    "pointer that is escaped": taking({"$ref": "#/$defs/a~1b%25"}, **{"$defs": {"a/b%": ONE}}),
    "id": taking({"$ref": "#/$defs/Z"}, **{"$id": "https://x/y", "$defs": {"Z": ONE}}),
    "own id": taking({"$ref": "args#/$defs/Z"}, **{"$id": "args", "$defs": {"Z": ONE}}),
    "id that is an anchor": taking({"$ref": "#/$defs/Z"}, **{"$id": "#args", "$defs": {"Z": ONE}}),
    "id of draft 4": taking(
        {"$ref": "https://x/y#/definitions/Z"}, **{"$schema": DRAFT_4, "id": "https://x/y", "definitions": {"Z": ONE}}
    ),
    "anchor": taking({"$ref": "#z"}, **{"$defs": {"Z": {"$anchor": "z", **ONE}}}),
    "anchor of draft 7": taking({"$ref": "#z"}, **{"$schema": DRAFT_7, "definitions": {"Z": {"$id": "#z", **ONE}}}),
    "id in it": taking(inner(), **{"$defs": {"Z": TWO, "W": TWO}}),
    "id in it by its URI": taking({"$ref": "in"}, **{"$id": "https://x/y", "$defs": {"In": inner(), "Z": TWO, "W": TWO}}),
    "id in it by a pointer": taking({"$ref": "#/$defs/In"}, **{"$defs": {"In": inner(), "Z": TWO, "W": TWO}}),
    "pointer into it": taking({"$ref": "#/$defs/In/$defs/W"}, **{"$defs": {"In": inner(), "Z": TWO, "W": TWO}}),
    "URI into it": taking({"$ref": "https://x/in#/$defs/W"}, **{"$defs": {"In": inner(), "Z": TWO, "W": TWO}}),
    "id beside itself": taking({"anyOf": [inner(), inner()]}, **{"$defs": {"Z": TWO, "W": TWO}}),
    "properties named so": taking({"$ref": "#/$defs/$id"}, **{"$defs": {"$id": ONE, "$anchor": {"$ref": "#/$defs/$id"}}}),
    "data that looks so": taking({"$ref": "#/$defs/Z"}, **{"$defs": {"Z": ONE}, "default": {"$id": "https://q/", "$ref": "#"}}),
    "draft": taking(ONE, **{"$schema": DRAFT_7, "dependentRequired": {"a": ["b"]}}),
    "reference of an annotation": taking({**ONE, "x-see": {"$ref": "Other.json"}}),
    "annotation that looks so": taking(ONE, **{"$id": "T", "x-labels": {"$ref": "The reference", "$id": "T"}}),
    "id of an annotation": taking(
        {"$ref": "https://x/y#/$defs/Z"}, **{"$id": "https://x/y", "$defs": {"Z": ONE}, "x-of": {"$id": "https://x/y"}}
    ),
    "pointer into an annotation": taking({"$ref": "#/x/Z"}, **{"x": {"Z": {"$ref": "#/x/Y"}, "Y": ONE}}),
    "dangling where nothing is used": taking(
        ONE, **{"$id": "https://x/y", "$defs": {"U": {"$ref": "#gone"}, "V": {"$ref": "https://q/"}, "W": {"$ref": "q"}}}
    ),
    "anchor that is escaped": taking({"$ref": "#%7A"}, **{"$defs": {"Z": {"$anchor": "z", **ONE}}}),
    "host of another case": taking({"$ref": "http://x/y#/$defs/Z"}, **{"$id": "HTTP://X/y", "$defs": {"Z": ONE}}),
    "index of many digits": taking(ONE, **{"default": [{"$ref": "#"}], "$defs": {"Y": {"$ref": "#/default/" + "9" * 5000}}}),
    "root": {
        **taking({"anyOf": [ONE, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1}]}),
        "$id": "https://x/root",
    },
}


@pytest.fixture(scope="module")
def accepts(vocabulary, tokenizer):
    """Return whether a whole text follows a schema."""
    follows = text_checker(tokenizer, vocabulary)
    return lambda schema, text: follows(StructuredOutput(kind="json_schema", value=json.dumps(schema)), text)


def call(name, value):
    return json.dumps({"name": name, "arguments": {"a": value}})


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_allows_the_same_alone_and_as_a_call_of_several(accepts, schema):
    other = json.loads(json.dumps(schema).replace('"two"', '"three"').replace('"one"', '"two"'))
    calls = calls_schema({"f": schema, "g": other})
    for value, is_allowed in (("one", True), ("two", False)):
        assert accepts(schema, json.dumps({"a": value})) is is_allowed
        assert accepts(calls, call("f", value)) is is_allowed
        assert accepts(calls, call("g", value)) is not is_allowed


@settings(max_examples=60)
@given(
    pair=st.lists(st.sampled_from(list(SCHEMAS)), min_size=2, max_size=2),
    value=st.sampled_from(["one", "two", [], [{"a": "one"}]]),
)
def test_calls_of_any_two_functions_allow_what_each_schema_alone_does(accepts, pair, value):
    first, second = (SCHEMAS[name] for name in pair)
    calls = calls_schema({"f": first, "g": second})
    for name, schema in (("f", first), ("g", second)):
        assert accepts(calls, call(name, value)) == accepts(schema, json.dumps({"a": value}))


NOT_IN_JSONSCHEMA = {"id of draft 4", "id that is an anchor", "anchor that is escaped", "host of another case"}


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in NOT_IN_JSONSCHEMA])
def test_pointers_mean_what_the_references_did(name):
    schema = SCHEMAS[name]
    kind = jsonschema.validators.validator_for(schema)
    before, after = kind(schema), kind(as_pointers(schema))
    for value in ("one", "two", [], [{"a": "one"}]):
        assert after.is_valid({"a": value}) == before.is_valid({"a": value})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (taking({"$ref": "#nothing"}), "leads to nothing"),
        (taking({"$ref": "other"}), "leads to nothing"),
        (taking({"$ref": "json-schema:///#/$defs/g"}, **{"$id": "https://x/y"}), "leads to nothing"),
        (taking({"$ref": "../g"}), "leads to nothing"),
        (taking({"$ref": "JSON-schema:///#/$defs/g"}, **{"$id": "https://x/y"}), "leads to nothing"),
        (taking({"$ref": "http://[x"}), "is no URI"),
        (taking({"$ref": "#/default"}, default={"$ref": "#/$defs/g"}), "leads to data that has references"),
        (
            taking({"$ref": "https://q/"}, **{"$defs": {"A": {"$id": "https://q/", **ONE}, "B": {"$id": "https://q/", **TWO}}}),
            "may mean several parts",
        ),
        (
            taking({"$ref": "Q"}, **{"$defs": {"A": {"$id": "Q", "const": 1}, "B": {"$id": "Q", "const": True}}}),
            "may mean several parts",
        ),
        (
            taking({"$ref": "#z"}, **{"$defs": {"A": {"$anchor": "z", **ONE}, "B": {"$anchor": "z", **TWO}}}),
            "give each its own",
        ),
        (taking({"$ref": "in"}, **{"$id": "urn:x:1", "$defs": {"A": {"$id": "in", **ONE}}}), "no path"),
        (taking({"$ref": "b" * (MAX_URI_CHARACTERS + 1)}), "more than 1000 characters"),
        (taking({"$ref": "b"}, **{"$id": "https://x/" + "a/" * MAX_URI_CHARACTERS}), "more than 1000 characters"),
        (
            taking({"$ref": "1"}, **{"$defs": {str(index): {"$id": str(index)} for index in range(MAX_URIS + 1)}}),
            "more than 64 parts have an",
        ),
        (taking({"anyOf": [{"$ref": f"?{index}"} for index in range(9 * MAX_URIS)]}), "leads to nothing"),
    ],
)
def test_a_reference_that_has_no_meaning_in_its_own_schema_finds_none_among_calls(schema, message):
    with pytest.raises(InvalidRequest, match=message):
        calls_schema({"f": schema, "g": taking(ONE)})


def test_the_schema_of_another_function_cannot_be_reached(vocabulary):
    for reference in ("#/$defs/g", "https://x/g", "https://x/g#/$defs/Z"):
        calls = calls_schema({"f": taking({"$ref": reference}), "g": {"$id": "https://x/g", **taking(ONE)}})
        with pytest.raises(InvalidRequest, match=r"does not exist|not present"):
            CompiledGrammar(StructuredOutput(kind="json_schema", value=json.dumps(calls)), vocabulary)


def test_schemas_of_the_specification_stay_known(accepts):
    number = {"$ref": f"{DRAFT_7}/definitions/nonNegativeInteger"}
    calls = calls_schema({"f": taking(number, **{"$id": "https://x/y"})})
    assert accepts(calls, call("f", 1))
    assert not accepts(calls, call("f", -1))


def test_a_reference_that_was_not_resolved_has_no_meaning_if_it_is_needed(vocabulary):
    schema = taking({"$ref": "#/$defs/U"}, **{"$id": "https://x/y/z", "nothing:": ONE, "$defs": {"U": {"$ref": "."}}})
    for form in (schema, calls_schema({"f": schema})):
        with pytest.raises(InvalidRequest, match=r"nothing::/\.' does not exist"):
            CompiledGrammar(StructuredOutput(kind="json_schema", value=json.dumps(form)), vocabulary)


def test_a_schema_is_left_as_it_is_where_it_needs_no_change():
    schema = taking({"$ref": "#/$defs/Z"}, **{"$defs": {"Z": ONE, "U": {"$ref": "#gone"}}})
    before = json.dumps(schema)
    form = json.loads(to_grammar(StructuredOutput(kind="json_schema", value=before)))["grammars"][0]["json_schema"]
    assert {name: form[name] for name in schema} == schema
    calls_schema({"f": {**schema, "$id": "T"}})
    assert json.dumps(schema) == before


def test_the_text_of_a_refused_reference_is_short():
    with pytest.raises(InvalidRequest) as refused:
        as_pointers(taking({"$ref": "#" + "z" * 60_000}))
    assert len(refused.value.message) < 300


LONG = " " * 20_000
GROWING = {  # schemas within the limits that would be much larger with pointers
    "anchor below a long name": {"$defs": {LONG: {"$anchor": "a"}}, "anyOf": [{"$ref": "#a"}] * 2000},
    "id below a long name": {"$defs": {LONG: {"$id": "a"}}, "anyOf": [{"$ref": "a"}] * 2000},
    "where nothing is used": {"x": {LONG: {"$id": "a", "x": [{"$ref": "#"}] * 2000}}},
}


@pytest.mark.parametrize("schema", GROWING.values(), ids=GROWING)
def test_pointers_never_exceed_the_limit_of_schemas(monkeypatch, schema):
    made = []
    take_room = references._References._take_room
    monkeypatch.setattr(references._References, "_take_room", lambda self, more: (made.append(more), take_room(self, more)))
    with pytest.raises(InvalidRequest, match=f"more than {MAX_SCHEMA_BYTES} bytes once its references are pointers"):
        as_pointers(schema)
    assert sum(made[:-1]) <= MAX_SCHEMA_BYTES


def test_pointers_of_all_functions_together_never_exceed_the_limit_of_schemas():
    schema = {"$defs": {"n" * 1000: {"$anchor": "a"}}, "anyOf": [{"$ref": "#a"}] * 20}
    with pytest.raises(InvalidRequest, match="once its references are pointers") as refused:
        calls_schema({f"f{index}": schema for index in range(30)})
    assert refused.value.param is None
    assert calls_schema({f"f{index}": schema for index in range(2)})


def test_each_part_of_a_schema_is_visited_once():
    schema = taking({"anyOf": [{"not": {"a": [{"b": 1}]}}, [], {}]}, **{"$defs": {"A": {"enum": [[{"c": {"d": 1}}]]}, "B": {}}})
    assert _Document(schema).num_visited == 9


def test_few_uris_are_joined_however_many_references_there_are(monkeypatch):
    joined = []
    monkeypatch.setattr(references, "urljoin", lambda base, reference: (joined.append(reference), urljoin(base, reference))[1])
    base = "https://x/" + "a/" * 400
    ids = {str(index): {"$id": str(index)} for index in range(MAX_URIS - 1)}
    unused = [{"$ref": str(index)} for index in range(2000)] * 2
    as_pointers({"$id": base, "$defs": ids, "x": unused[: MAX_URIS * 4]})
    assert MAX_URIS < len(joined) <= 2 * MAX_URIS


def test_ids_that_nothing_refers_to_are_no_work(monkeypatch):
    monkeypatch.setattr(references, "urljoin", None)
    schema = {"$id": "https://x/" + "a/" * 9000, "properties": {str(index): {"$id": str(index)} for index in range(1000)}}
    assert as_pointers(schema) == {"properties": {str(index): {} for index in range(1000)}}
