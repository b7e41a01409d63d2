"""The grammar of an output that has a form or calls tools. Pure.

Owns how families of models write calls, as far as a grammar can say it. ``router.tools`` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidRequest
from core.grammar.limits import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES
from core.grammar.references import TOO_LARGE, as_pointers
from core.grammar.translation import WHITESPACE, embedded_form, embedded_schema
from core.wire.sampling import StructuredOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """One way to write calls. A marker that is a special token of the model is that token.

    ``first`` and ``last`` stand around all calls, ``before`` and ``after`` around each, ``between`` between two. A call is a
    JSON object with its name and ``arguments_key``, or, with ``name_end``, its name, that text, and its arguments' object.
    """

    first: str = ""
    before: str = ""
    name_end: str | None = None
    arguments_key: str = "arguments"
    after: str = ""
    between: str = ""
    last: str = ""

    def openings(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the texts that begin calls of these functions: parts, with space between them if the model likes."""
        marker = self.first + self.before
        if marker:
            yield (marker,)
            return
        for name in names:
            if self.name_end is not None:
                yield (name + self.name_end,)
            else:
                yield ("{", '"name"', ":", f'"{name}"', ",", f'"{self.arguments_key}"', ":", "{")


def form_or_calls(
    form: StructuredOutput,
    syntaxes: Sequence[CallSyntax],
    schemas: Mapping[str, Mapping[str, Any]],
    special_tokens: Mapping[str, int],
    *,
    is_parallel: bool,
) -> StructuredOutput:
    """Return the form of an output that is of ``form``, or that calls functions as one of ``syntaxes`` says.

    ``schemas`` are the parameters of the functions by name, ``special_tokens`` the ids of the tokens that are no text. With
    ``is_parallel`` there may be several calls.

    Raises:
        InvalidRequest: both together are too large, or one is malformed.
    """
    writer = _CallsWriter(schemas, special_tokens, is_parallel)
    ways = [writer.way(syntax) for syntax in syntaxes]
    rules = [
        "start: form | calls",
        f"form: {embedded_form(form, special_tokens)}",
        f"calls: {' | '.join(ways)}",
        *writer.rules,
        f"ws: /{WHITESPACE}/",
    ]
    text = "\n".join(rules) + "\n"
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the form of the output and the tools have {num_bytes} bytes together, at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    return StructuredOutput(kind="grammar", value=text)


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], arguments_key: str = "arguments") -> dict[str, Any]:
    """Return the schema of one call as an object; each function's references mean what they do in its own schema.

    Raises:
        InvalidRequest: a reference cannot be told to, as ``as_pointers`` says, and ``param`` is the name of its function; or
            all together become too large.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments_key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    moved: dict[str, dict[str, Any]] = {}
    num_bytes = 0
    for name, schema in schemas.items():
        try:
            moved[name] = as_pointers(schema, f"#/$defs/{name}")
        except InvalidRequest as error:
            error.param = name
            raise
        num_bytes += len(msgspec.json.encode(moved[name]))
        if num_bytes > MAX_SCHEMA_BYTES:
            raise InvalidRequest(TOO_LARGE)
    return {"anyOf": calls, "$defs": moved}


class _CallsWriter:
    """Writes the rules of calls, each schema once."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], special_tokens: Mapping[str, int], is_parallel: bool) -> None:
        self.rules: list[str] = []
        self._schemas = schemas
        self._special_tokens = special_tokens
        self._is_parallel = is_parallel
        self._names: dict[str, str] = {}  # of rules, by what they are
        self._written: dict[tuple[str, str], str] = {}  # rules of schemas, by kind and name: several syntaxes have the same

    def way(self, syntax: CallSyntax) -> str:
        """Return one way to write all calls; its rules are added."""
        call = self._rule("call", self._call(syntax))
        between = f"ws? {self._text(syntax.between)} ws?" if syntax.between else "ws?"
        more = f"({between} {call})*" if self._is_parallel else ""
        return " ".join(filter(None, [self._text(syntax.first), call, more, self._text(syntax.last)]))

    def _call(self, syntax: CallSyntax) -> str:
        before, after = self._text(syntax.before), self._text(syntax.after)
        if syntax.name_end is None:
            body = self._schema_rule("object", syntax.arguments_key)
            before += " ws?" if before else ""
        else:
            end = self._text(syntax.name_end)
            rules = ((name, self._schema_rule("arguments", name)) for name in self._schemas)
            body = f"({' | '.join(f'{json.dumps(name)} {end} ws? {rule}' for name, rule in rules)})"
        return " ".join(filter(None, [before, body, f"ws? {after}" if after else ""]))

    def _schema_rule(self, kind: str, name: str) -> str:
        """Return the name of the rule of all calls whose arguments have this key, or of one function's arguments."""
        found = self._written.get((kind, name))
        if found is None:
            schema = calls_schema(self._schemas, name) if kind == "object" else self._schemas[name]
            found = self._written[kind, name] = self._rule(kind, embedded_schema(schema))
        return found

    def _rule(self, kind: str, body: str) -> str:
        """Return the name of the rule that is ``body``."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"{kind}_{len(self._names)}"
            self.rules.append(f"{name}: {body}")
        return name

    def _text(self, text: str) -> str:
        """Return a literal text; special tokens in it are written by their ids."""
        if not text:
            return ""
        known = [re.escape(token) for token in sorted(self._special_tokens, key=len, reverse=True) if token in text]
        parts = re.split(f"({'|'.join(known)})", text) if known else [text]
        ids = self._special_tokens
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts if part)
