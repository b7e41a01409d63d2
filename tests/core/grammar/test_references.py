"""References of schemas: a schema allows the same alone and as one call of several, as the specification says."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.grammar.compiled import CompiledGrammar
from core.grammar.references import as_pointers
from core.grammar.tool_calls import calls_schema
from core.wire.sampling import StructuredOutput
from tests.support.json_model import EOS_TOKEN_IDS

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
    "root": {
        **taking({"anyOf": [ONE, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1}]}),
        "$id": "https://x/root",
    },
}


@pytest.fixture(scope="module")
def accepts(vocabulary, tokenizer):
    """Return whether a whole text follows a schema."""
    compiled = {}

    def check(schema, text):
        output = StructuredOutput(kind="json_schema", value=json.dumps(schema))
        if output not in compiled:
            compiled[output] = CompiledGrammar(output, vocabulary)
        matcher = compiled[output].start()
        matcher.accept(tokenizer.encode(text).ids)
        allowed = matcher.allowed()
        return allowed is not None and bool(allowed[list(EOS_TOKEN_IDS)].all())

    return check


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


@pytest.mark.parametrize("name", [name for name in SCHEMAS if "draft 4" not in name and "is an anchor" not in name])
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
