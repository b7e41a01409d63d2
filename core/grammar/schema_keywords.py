"""Where the schemas stand in a JSON schema, and where data does that may look like one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("enum", "const", "default", "examples", "example"))


def with_schemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the value of ``keyword`` with ``change`` done to each schema, or list of schemas, that it holds."""
    if keyword in _DATA:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: change(schema) for name, schema in value.items()}
    return change(value)


def inner_schemas(keyword: str, value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - JSON
    """Yield what ``with_schemas`` changes, without the lists, and the steps of the pointer that leads there."""
    if keyword in _DATA:
        return
    found: list[tuple[tuple[str, ...], Any]] = [((keyword,), value)]
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        found = [((keyword, name), schema) for name, schema in value.items()]
    while found:
        steps, inner = found.pop()
        if isinstance(inner, list):
            found += [((*steps, str(index)), item) for index, item in enumerate(inner)]
        else:
            yield steps, inner


def may_lead_into_data(reference: str) -> bool:
    """Return True if a reference may use data as a schema: a part of its path is a keyword of data, or a name like one."""
    return not _DATA.isdisjoint(unquote(reference).split("/"))
