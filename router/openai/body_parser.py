"""Decodes the JSON of bodies as typed structs; its errors name the field and the fix."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import CollectionType, StructType, Type, UnionType, type_info

from core.errors import InvalidRequest
from router.http.body_checks import check_num_values

_UNKNOWN_FIELD = re.compile(r"unknown field `(.+?)`")
_MISSING_FIELD = re.compile(r"missing required field `(.+?)`")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_WRONG_TYPE = re.compile(r"Expected `(.+?)`, got `(.+?)`")
_UNLISTED_VALUE = re.compile(r"Invalid enum value (.+)")
_UNKNOWN_TAG = re.compile(r"Invalid value (.+)")
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}

_FLOAT_FOR_INT = re.compile(r"Expected `int[^`]*`, got `float`")
_STEP = re.compile(r"\[|\w+(?![\w\]])")  # of a place: into a list, or to a field
_EXACT = 2**53  # from here on a float may stand for another integer
# A pair of surrogates, a surrogate alone (the group), or another escape.
_ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
_SEARCHED_BYTES = 256 << 10  # takes milliseconds

Body = TypeVar("Body", bound=msgspec.Struct)
Decoded = TypeVar("Decoded")


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body.

    Raises:
        InvalidRequest: the JSON is malformed or has too many values, or a field is unknown, missing or of a wrong type;
            ``param`` names the field.
    """
    check_num_values(body)
    try:
        return decode_json(body, kind)
    except msgspec.ValidationError as error:
        if not _FLOAT_FOR_INT.match(str(error)):
            raise explain(str(error), kind) from None
    return convert(decode_fields(body), kind)


def convert(fields: dict[str, Any], kind: type[Body]) -> Body:
    """Return decoded fields as a body; whole numbers may be written as floats, as clients without integers do.

    Raises:
        InvalidRequest: as ``parse_body``.
    """
    try:
        return msgspec.convert({name: _as_int(value) for name, value in fields.items()}, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind) from None


def _as_int(value: Any) -> Any:  # noqa: ANN401 - decoded JSON
    """Return the integer that a float is; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


def decode_fields(body: bytes) -> dict[str, Any]:
    """Decode a JSON object whose fields are of any type. Raises: InvalidRequest."""
    try:
        return decode_json(body, dict)
    except msgspec.ValidationError as error:  # it is none, or a number in it is out of range
        raise explain(str(error)) from None


def decode_json(body: bytes, kind: type[Decoded]) -> Decoded:
    """Decode JSON.

    Raises:
        InvalidRequest: it is malformed.
        msgspec.ValidationError: it is no ``kind``.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = _half_character(body)
        what = f"it has half a character, {half}: a surrogate needs its other half" if half else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {what}") from None


def _half_character(body: bytes) -> str:
    """Return the first escape of a surrogate without its other half, empty if there is none."""
    found = (match[1] for match in _ESCAPE.finditer(body, 0, _SEARCHED_BYTES) if match[1])
    return next(found, b"").decode()


def explain(message: str, kind: type[msgspec.Struct] | None = None) -> InvalidRequest:
    """Return the message of a ``msgspec.ValidationError`` as an error that names the field. ``kind``: of the whole body."""
    path = _PATH.search(message)
    place = path.group(1) if path else ""
    what = message[: path.start()] if path else message
    unknown, missing = _UNKNOWN_FIELD.search(what), _MISSING_FIELD.search(what)
    named = unknown or missing
    if named is not None:
        place = f"{place}.{named.group(1)}" if place else named.group(1)
        what = "unknown field: leave it out" if unknown else "this field is required"
    unlisted = _UNLISTED_VALUE.fullmatch(what)
    if unlisted is not None:
        what = f"{unlisted.group(1)} is none of its values, which /openapi.json lists"
    unknown_tag = _UNKNOWN_TAG.fullmatch(what)
    allowed = _tags_at(type_info(kind), place) if unknown_tag is not None and kind is not None else []
    if unknown_tag is not None and allowed:
        what = f"{unknown_tag.group(1)} is none of {', '.join(allowed)}"
    wrong_type = _WRONG_TYPE.fullmatch(what)
    if wrong_type is not None:
        what = _name_the_fix(wrong_type.group(1).split(" | "), wrong_type.group(2))
    text = f"{place}: {what[0].lower()}{what[1:]}" if place else f"the body is not a valid request: {what}"
    return InvalidRequest(text, param=place or None)


def _tags_at(kind: Type, place: str) -> list[str]:
    """Return the tags that an object may have; ``place`` is that of its tag, in a value of ``kind``.

    An object without fields is known only so that an error can name it.
    """
    kinds = [kind]
    for step in _STEP.findall(place)[:-1]:
        kinds = [one for outer in kinds for one in (outer.types if isinstance(outer, UnionType) else (outer,))]
        if step == "[":
            kinds = [outer.item_type for outer in kinds if isinstance(outer, CollectionType)]
        else:
            fields = [field for outer in kinds if isinstance(outer, StructType) for field in outer.fields]
            kinds = [field.type for field in fields if field.encode_name == step]
    kinds = [one for outer in kinds for one in (outer.types if isinstance(outer, UnionType) else (outer,))]
    return [str(one.tag) for one in kinds if isinstance(one, StructType) and one.tag is not None and one.fields]


def _name_the_fix(expected: list[str], got: str) -> str:
    """Return the type that a value must have, and how to correct the value that was sent."""
    allowed = " or ".join(_TYPES.get(name, name) for name in expected if name != "null")
    text = f"must be {allowed}, not {_TYPES.get(got, got)}"
    if got == "str" and "bool" in expected:
        return f"{text}: true and false go without quotes"
    if got == "str" and not {"int", "float"}.isdisjoint(expected):
        return f"{text}: numbers go without quotes"
    if got in ("int", "float", "bool") and "str" in expected:
        return f"{text}: texts go in quotes"
    return f"{text}: correct it, or leave it out" if "null" in expected else f"{text}: correct it"
