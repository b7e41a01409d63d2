from __future__ import annotations

import json

import pytest

from core.errors import InvalidRequest
from core.grammar.limits import MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, check_limits
from core.wire.sampling import StructuredOutput


def nested(depth):
    return '{"properties":{"a":' * (depth // 2) + "true" + "}}" * (depth // 2)


def tag(**changes):
    whole = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"], **changes}
    return json.dumps(whole)


REFUSED = [
    ("json_schema", '{"title":"' + "a" * MAX_SCHEMA_BYTES + '"}', "at most 65536"),
    ("json_schema", nested(34), "more than 32"),
    ("json_schema", "[" * 60_000, "more than 32"),
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", "[]", "got a list"),
    ("json_schema", '{"pattern":"' + "a" * (MAX_REGEX_BYTES + 1) + '"}', "at most 4096"),
    ("json_schema", '{"patternProperties":{"(a{1,200}){200}":{}}}', "40000 times"),
    ("json_schema", '{"properties":{"const":{"pattern":"a{20000}"}}}', "20000 times"),
    ("json_schema", '{"properties":{"x":{"$ref":"#/default"}},"default":{"pattern":"a{20000}"}}', "20000 times"),
    ("json_schema", '{"items":{"$ref":"#/%65num/0"},"enum":[{"pattern":"a{20001}"}]}', "20001 times"),
    ("json_schema", '{"$id":"x:y","items":{"$ref":"x:y#/const"},"const":{"pattern":"a{20002}"}}', "20002 times"),
    ("regex", "", "empty"),
    ("regex", "a" * (MAX_REGEX_BYTES + 1), "at most 4096"),
    ("regex", "a{1,10001}", "10001 times"),
    ("regex", "((a{100}){100}b){2}", "20000 times"),
    ("regex", "(a{1,101}|b){0,100}x{3}", "10100 times"),
    ("choice", "[]", "at least one"),
    ("choice", '["a",""]', "none of them empty"),
    ("choice", '["a",1]', "list of strings"),
    ("choice", json.dumps([str(number) for number in range(1025)]), "at most 1024"),
    ("grammar", " ", "empty"),
    ("grammar", "a" * (64 << 10) + "a", "at most 65536"),
    ("structural_tag", tag(triggers=["x"]), "begins with none"),
    ("structural_tag", tag(triggers=[""]), "may be empty"),
    ("structural_tag", tag(structures=[]), "needs structures"),
    ("structural_tag", json.dumps({"type": "structural_tag", "format": {}}), "format is not supported"),
    ("structural_tag", tag(other=1), "unknown field"),
    ("json_object", "{}", "takes no value"),
]


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED, ids=[f"{kind}-{why}" for kind, _, why in REFUSED])
def test_refuses_what_exceeds_a_limit_or_is_malformed(kind, value, message):
    with pytest.raises(InvalidRequest, match=message):
        check_limits(StructuredOutput(kind=kind, value=value))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", nested(32)),
        ("json_schema", '{"const":"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\"[["}'),
        ("json_schema", "true"),
        ("json_schema", '{"properties":{"a":{"const":{"pattern":"a{20000}"},"examples":[{"pattern":"a{20000}"}]}}}'),
        ("json_schema", '{"properties":{"patternProperties":{"a{20000}":{}}}}'),
        ("regex", r"[{]{3}\{99999\}[]{99999}]a{x}(a{100}|b{100}){100}a{99,}"),
        ("regex", "a{1,100}" * 300),
        ("choice", '["a","b","a"]'),
        ("structural_tag", tag()),
        ("json_object", ""),
    ],
)
def test_accepts_what_is_within_the_limits(kind, value):
    check_limits(StructuredOutput(kind=kind, value=value))
