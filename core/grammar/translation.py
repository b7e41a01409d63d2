"""From a form of output to the text that the grammar library compiles.

Owns the meaning of each kind. A schema keeps its meaning or is refused by the library, which names the keyword: nothing that
constrains is dropped. Only formats that JSON Schema does not define are, because they are annotations by definition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from core.errors import InvalidRequest
from core.grammar.limits import StructuralTag, check_limits, parse_choices, parse_schema, parse_tag
from core.grammar.references import without_identifiers
from core.grammar.schema_keywords import with_schemas
from core.wire.sampling import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between two tokens of JSON. Bounded: a weak model would emit spaces without end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_JSON_OPTIONS: JsonCompileOptions = {  # a schema's own "x-guidance" cannot change them
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"u',
    "json_allow_general_unicode_escapes": False,
}
_OPTIONS_LINE = "%llguidance {}\n"  # that the library puts before a structural tag; not allowed in a nested grammar
_GBNF_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_DEFINED_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)


def to_grammar(output: StructuredOutput, special_tokens: Collection[str] = ()) -> str:
    """Return what the library compiles; ``special_tokens`` are those of the vocabulary that are no text.

    Raises:
        InvalidRequest: a limit is exceeded, or the form is malformed.
    """
    check_limits(output)
    match output.kind:
        case "json_schema":
            return _from_schema(parse_schema(output.value))
        case "json_object":
            return _from_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(output.value)
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in parse_choices(output.value))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "structural_tag":
            return _from_tag(parse_tag(output.value), special_tokens)
        case "grammar":
            return _from_grammar(output.value)


def embedded_schema(schema: Mapping[str, Any] | bool) -> str:
    """Return a schema as a rule's right side in a Lark grammar. Raises InvalidRequest as ``to_grammar``."""
    return "%json " + json.dumps({**_prepared(schema), "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def embedded_form(output: StructuredOutput, special_tokens: Collection[str] = ()) -> str:
    """Return a form as a rule's right side in a Lark grammar. Raises InvalidRequest as ``to_grammar``."""
    check_limits(output)
    match output.kind:
        case "json_schema":
            return embedded_schema(parse_schema(output.value))
        case "json_object":
            return embedded_schema({"type": "object"})
        case "regex":
            (found,) = json.loads(LLMatcher.grammar_from_regex(output.value))["grammars"]
            lark = found["lark_grammar"]
        case "grammar":
            lark = _as_lark(output.value)
        case _:
            lark = to_grammar(output, special_tokens)
    return f"%lark {{\n{lark.removeprefix(_OPTIONS_LINE)}\n}}"


def _from_schema(schema: dict[str, Any] | bool) -> str:
    return LLMatcher.grammar_from_json_schema(_prepared(schema), overrides=_JSON_OPTIONS)


def _from_grammar(text: str) -> str:
    return LLMatcher.grammar_from_lark(_as_lark(text))


def _as_lark(text: str) -> str:
    if _GBNF_RULE.search(text):
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # the converter raises whatever its parsing runs into
            raise InvalidRequest(f"the GBNF grammar cannot be read: {error}") from None
    return text


def _from_tag(tag: StructuralTag, special_tokens: Collection[str]) -> str:
    tags = []
    for structure in tag.structures:
        trigger = next(trigger for trigger in tag.triggers if structure.begin.startswith(trigger))
        schema = {**_prepared(structure.schema), "x-guidance": _JSON_OPTIONS}
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    are_special = {found.trigger in special_tokens for found in tags}
    if len(are_special) > 1:
        raise InvalidRequest("structural_tag: either all triggers are special tokens of the model or none")
    return StructTag.to_grammar(tags, assume_special=True in are_special)


def _prepared(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """Return a schema of the same meaning that the library takes.

    Raises:
        InvalidRequest: the library would take it and not enforce it, or a reference leads to nothing.
    """
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    prepared: dict[str, Any] = _prepare(without_identifiers(schema))
    return prepared


def _prepare(schema: Any) -> Any:  # noqa: ANN401
    if isinstance(schema, list):
        return [_prepare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _check_min_properties(schema)
    found = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _DEFINED_FORMATS:
            continue
        found[key] = with_schemas(key, value, _prepare)
    return found


def _check_min_properties(schema: dict[str, Any]) -> None:
    """Refuse a minimum that repeated keys would satisfy: the library does not keep keys outside ``properties`` apart."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, num_required):
        raise InvalidRequest(
            f"minProperties = {least} is not supported: at most 1, or the number of names in required ({num_required})"
        )
