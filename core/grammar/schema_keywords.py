"""Where the schemas stand in a JSON schema, and where data does that may look like one. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
CONTAINERS = (dict, list)  # of other values; most values are none, and none of a schema's is looked into in vain
DATA = frozenset(("enum", "const", "default", "examples", "example"))
APPLIED = frozenset(  # a schema below them is needed wherever the one around it is
    (
        *("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems"),
        *("anyOf", "oneOf", "allOf"),
    )
)
SCHEMAS = APPLIED | SCHEMAS_BY_NAME  # below other keywords may stand anything
SCHEMAS |= {"not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}


def with_schemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the value of ``keyword`` with ``change`` done to each schema, or list of schemas, that it holds."""
    if keyword in DATA:
        return value
    if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: change(schema) for name, schema in value.items()}
    return change(value)


def may_lead_into_data(reference: str) -> bool:
    """Return True if a reference may use data as a schema: a part of its path is a keyword of data, or a name like one."""
    return not DATA.isdisjoint(unquote(reference).split("/"))
