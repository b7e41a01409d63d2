"""What a form of output may hold before any work is done on it: bytes, depth, repetitions.

Pure and linear in the size of the text. The grammar library has limits of its own (``core.grammar.compiled``); these come first
because they name what is too large in the client's own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from core.errors import InvalidRequest
from core.grammar.schema_keywords import CONTAINERS, REFERENCES, may_lead_into_data, with_schemas
from core.struct_types import prepared
from core.wire.sampling import StructuredOutput

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32  # of objects and lists in each other
MAX_REGEX_BYTES = 4 << 10
MAX_REPETITIONS = 10_000  # of a part of a regex, those around it multiplied
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 64 << 10  # of all choices
MAX_GRAMMAR_BYTES = 64 << 10
ENDLESS = "refers to itself without end, or through too many references"  # a schema, of which the library finds it

_REGEX_PARTS = re.compile(  # an escape, a class, a bound, any other letter
    r"\\.?|\[\]?(?:\\.|[^\]\\])*\]?|\{(?P<bound>\s*\d+\s*(?:,(?:\s*\d+\s*)?)?)\}|.", re.DOTALL
)
_JSON_PARTS = re.compile(r'"(?:\\.|[^"\\])*"?|[][{}]', re.DOTALL)  # a text, a bracket


def check_limits(output: StructuredOutput) -> None:
    """Refuse what exceeds a limit or is malformed.

    Raises:
        InvalidRequest: names the limit, or what is wrong.
    """
    match output.kind:
        case "json_schema":
            parse_schema(output.value)
        case "regex":
            check_regex(output.value)
        case "choice":
            parse_choices(output.value)
        case "grammar":
            _check_bytes("the grammar", output.value, MAX_GRAMMAR_BYTES)
            if not output.value.strip():
                raise InvalidRequest("the grammar is empty")
        case "structural_tag":
            parse_tag(output.value)
        case "json_object":
            if output.value:
                raise InvalidRequest("json_object takes no value")


def parse_schema(text: str) -> dict[str, Any] | bool:
    """Return a JSON schema within the limits, its regexes included.

    Raises:
        InvalidRequest: it is too large or too deep, or is no schema.
    """
    schema = _parse_json("the JSON schema", text)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"a JSON schema is an object, got {_json_type(schema)}")
    _check_regexes(schema)
    return schema


def parse_choices(text: str) -> list[str]:
    """Return the choices.

    Raises:
        InvalidRequest: there are none or too many, or one is empty or no string.
    """
    _check_bytes("the list of choices", text, MAX_CHOICE_BYTES)
    try:
        choices = msgspec.json.decode(text.encode(), type=list[str])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"choice must be a list of strings: {error}") from None
    if not choices or not all(choices):
        raise InvalidRequest("choice needs at least one string, and none of them empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"choice has {len(choices)} strings, at most {MAX_CHOICES} are allowed")
    return list(dict.fromkeys(choices))


class TagStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text that begins with ``begin``, holds JSON of ``schema``, and ends with ``end``."""

    begin: str
    end: str
    schema: dict[str, Any] | bool = True


@prepared
class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Free text in which each occurrence of a trigger must continue as one of the structures that begin with it."""

    structures: list[TagStructure]
    triggers: list[str]
    type: str = "structural_tag"


def parse_tag(text: str) -> StructuralTag:
    """Return a structural tag.

    Raises:
        InvalidRequest: it is too large or too deep, has another form, or a structure begins with no trigger.
    """
    found = _parse_json("the structural tag", text)
    if isinstance(found, dict) and "format" in found:
        raise InvalidRequest("structural_tag.format is not supported: use structures and triggers")
    try:
        tag = msgspec.convert(found, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"structural_tag: {error}") from None
    if not tag.structures or not all(tag.triggers):
        raise InvalidRequest("structural_tag needs structures, and no trigger may be empty")
    for structure in tag.structures:
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise InvalidRequest(f"structural_tag: {structure.begin!r} begins with none of the triggers")
        _check_regexes(structure.schema)
    return tag


def check_regex(pattern: str) -> None:
    """Refuse a regex that is too long or repeats too often.

    Raises:
        InvalidRequest: names the limit.
    """
    _check_bytes("the regex", pattern, MAX_REGEX_BYTES)
    if not pattern:
        raise InvalidRequest("the regex is empty")
    most = _most_repetitions(pattern)
    if most > MAX_REPETITIONS:
        raise InvalidRequest(f"the regex repeats a part {most} times, at most {MAX_REPETITIONS} are allowed")


def _most_repetitions(pattern: str) -> int:
    """Return how often the most repeated part may occur: the upper bounds of nested ``{m,n}`` are multiplied.

    One number per open group is kept: the most of what it holds so far. An unbounded repetition counts as one.
    """
    groups, last = [1], 1  # of the open groups, and of the part that a bound would repeat
    for part in _REGEX_PARTS.finditer(pattern):
        match part[0][0]:
            case "(":
                groups.append(1)
            case ")" if len(groups) > 1:
                last = groups.pop()
                groups[-1] = max(groups[-1], last)
            case "{" if part["bound"] is not None:
                last *= _bound(part["bound"])
                groups[-1] = max(groups[-1], last)
            case _:
                last = 1
    return max(groups)


def _bound(text: str) -> int:
    """Return the upper bound of ``m``, ``m,`` or ``m,n``."""
    return max(1, *(int(number[:9]) for number in text.split(",") if number.strip()))


def _check_regexes(schema: object) -> None:
    """Check everything in a schema that may be a regex. Its depth is known to be bounded."""
    _check_regexes_of(schema, is_data_used=any(map(may_lead_into_data, _references(schema))))


def _references(value: object) -> Iterator[str]:
    """Return the references of a schema, also those in its data."""
    todo = [value]
    while todo:
        outer = todo.pop()
        if isinstance(outer, dict):
            yield from (outer[name] for name in REFERENCES if name in outer and isinstance(outer[name], str))
            outer = outer.values()
        elif not isinstance(outer, list):
            continue
        todo += [inner for inner in outer if inner and isinstance(inner, CONTAINERS)]


def _check_regexes_of(schema: object, *, is_data_used: bool) -> None:
    """Check a schema or a list of schemas. ``is_data_used``: what stands in data may be used as a schema."""
    check = partial(_check_regexes_of, is_data_used=is_data_used)
    if isinstance(schema, list):
        for item in schema:
            if item and isinstance(item, CONTAINERS):
                check(item)
    if not isinstance(schema, dict):
        return
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        check_regex(pattern or ".*")
    named = schema.get("patternProperties")
    for name in named if isinstance(named, dict) else ():
        check_regex(name or ".*")
    for keyword, value in schema.items():
        if not value or not isinstance(value, CONTAINERS):
            continue
        if is_data_used:
            check(value)
        else:
            with_schemas(keyword, value, check)


def _parse_json(what: str, text: str) -> Any:  # noqa: ANN401
    _check_bytes(what, text, MAX_SCHEMA_BYTES)
    _check_depth(what, text)
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from None


def _check_depth(what: str, text: str) -> None:
    """Refuse JSON that is too deep, before it is parsed; what is not valid is found by the parser."""
    depth = 0
    for part in _JSON_PARTS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(part[0], 0)
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"{what} is more than {MAX_SCHEMA_DEPTH} objects and lists deep")


def _check_bytes(what: str, text: str, most: int) -> None:
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > most:
        raise InvalidRequest(f"{what} has {num_bytes} bytes, at most {most} are allowed")


def _json_type(value: object) -> str:
    return {str: "a string", list: "a list", type(None): "null"}.get(type(value), "a number")
