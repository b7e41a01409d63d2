"""Reads bodies whose messages have fields that the router does not know.

Clients send back what other servers put into their answers: the next turn of a conversation then has fields that mean
nothing here. Inside messages and their parts such fields are removed; those that are neither null nor known to be harmless
are named, so that the answer can name them too. At the top of a body null is no value, whatever the field: typed clients send
fields that are newer than this so. All other unknown fields are errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import CollectionType, StructType, Type, UnionType, type_info

from core.errors import InvalidRequest
from router.openai.body_parser import convert, decode_fields, parse_body

LENIENT_FIELDS = ("messages", "input")
# Fields of messages and parts that change nothing in what a text model reads, whatever they hold.
HARMLESS = frozenset(
    {
        *("annotations", "cache_control", "citations", "created_at", "finish_reason", "id", "index", "logprobs", "metadata"),
        *("parsed", "phase", "provider_specific_fields", "reasoning", "reasoning_content", "reasoning_details", "refusal"),
        *("signature", "status", "thinking", "thinking_blocks", "timestamp", "token_ids"),
    }
)
_NAMED = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_NAMED = 8
MAX_ITEMS = 8192  # messages, parts and calls together; takes some ten milliseconds

Body = TypeVar("Body", bound=msgspec.Struct)


def parse_lenient_body(body: bytes, kind: type[Body]) -> tuple[Body, Sequence[str]]:
    """Decode a JSON body, and return it with the paths of the fields that were ignored and may have had a meaning.

    A body without unknown fields is decoded once.

    Raises:
        InvalidRequest: as ``parse_body``, except for unknown fields that are inside messages or null; or there are very many
            messages or parts.
    """
    try:
        return parse_body(body, kind), ()
    except InvalidRequest as error:
        if "unknown field" not in str(error):
            raise
    fields = decode_fields(body)  # decoding stopped at the first unknown field: what follows may be malformed
    types = {known.encode_name: known.type for known in _struct(kind).fields}
    fields = {name: value for name, value in fields.items() if value is not None or name in types}
    cleaner = _Cleaner()
    for name in LENIENT_FIELDS:
        if name in types and name in fields:
            fields[name] = cleaner.without_unknown(fields[name], types[name], name)
    return convert(fields, kind), cleaner.ignored


def ignored_header(paths: Sequence[str]) -> str:
    """Return the number of ignored fields, and the names of the first ones that can stand in a header."""
    named = list(dict.fromkeys(path for path in paths if _NAMED.fullmatch(path)))[:_MAX_NAMED]
    return f"{len(paths)}; {', '.join(named)}" if named else str(len(paths))


@cache
def _struct(kind: type[msgspec.Struct]) -> StructType:
    found = type_info(kind)
    assert isinstance(found, StructType)
    return found


@dataclass(slots=True)
class _Cleaner:
    """Removes fields that no struct has from the values of one body."""

    ignored: list[str] = field(default_factory=list)  # the paths of those that may have a meaning
    num_items: int = 0  # of lists

    def without_unknown(self, value: Any, kind: Type, path: str) -> Any:  # noqa: ANN401 - decoded JSON
        """Return the value without fields that no struct of ``kind`` has.

        Raises:
            InvalidRequest: the body has more than ``MAX_ITEMS``.
        """
        kinds = kind.types if isinstance(kind, UnionType) else (kind,)
        if isinstance(value, list):
            items = next((found.item_type for found in kinds if isinstance(found, CollectionType)), None)
            if items is None:
                return value
            self.num_items += len(value)
            if self.num_items > MAX_ITEMS:
                top = path.partition(".")[0]
                raise InvalidRequest(f"{top}: more than {MAX_ITEMS} items are not read beside unknown fields", param=top)
            return [self.without_unknown(item, items, path) for item in value]
        if not isinstance(value, dict):
            return value
        struct = _struct_of(value, kinds)
        if struct is None:
            return value
        types = {known.encode_name: known.type for known in struct.fields}
        kept = {}
        for name, content in value.items():
            if name in types:
                kept[name] = self.without_unknown(content, types[name], f"{path}.{name}")
                continue
            if name == struct.tag_field:
                kept[name] = content
            elif content is not None and name not in HARMLESS:
                self.ignored.append(f"{path}.{name}")
        return kept


def _struct_of(value: dict[str, Any], kinds: Sequence[Type]) -> StructType | None:
    """Return the struct that an object is decoded as, by its tag if there are several; None if that is not known."""
    structs = [kind for kind in kinds if isinstance(kind, StructType)]
    tagged = [kind for kind in structs if kind.tag_field is not None and value.get(kind.tag_field) == kind.tag]
    untagged = [kind for kind in structs if kind.tag_field is None]
    return next(iter([*tagged, *untagged]), None)
