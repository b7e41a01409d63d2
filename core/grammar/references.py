"""What the references of a JSON schema refer to, as pointers into its document. Pure.

A schema keeps its meaning where it stands below others, and the grammar library follows a pointer into a part with an ``$id``
as the specification says: without this it takes that part's own ``#`` for that of the document around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from core.errors import InvalidRequest
from core.grammar.schema_keywords import REFERENCES, inner_schemas

_NO_ID = "json-schema:///"  # the library's URI of a document without an ``$id``
_OLD_DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7}  # ``$ref`` hides what is beside it, and ``$id`` may be an anchor
_IDENTIFIERS = ("$id", "id", "$anchor")


def has_identifiers(schema: Mapping[str, Any]) -> bool:
    """Return True if a part of a schema may be referred to by another name than its pointer."""
    parts = [part.schema for part in _parts(schema)]
    return any(isinstance(part.get(name), str) for part in parts for name in _IDENTIFIERS)


def as_pointers(schema: Mapping[str, Any], base: str = "#") -> dict[str, Any]:
    """Return a schema of the same meaning at the pointer ``base``: its references are pointers, and no part has an ``$id``.

    A pointer to nothing stays one, and so does the URI of another document; the library tells of them.

    Raises:
        InvalidRequest: a reference leads to nothing, to one of several parts, or to data that refers to something.
    """
    copied: dict[str, Any] = _copied(dict(schema))
    parts = list(_parts(copied))
    places = _Places(copied, parts)
    for part in parts:
        for name in _IDENTIFIERS:
            if isinstance(part.schema.get(name), str) and (name != "id" or part.draft == 4):
                del part.schema[name]
        reference = part.schema.get("$ref")
        if isinstance(reference, str):
            part.schema["$ref"] = places.found(reference, part.uri, base)
    return copied


@dataclass(frozen=True, slots=True)
class _Part:
    """A schema in a document: its pointer, as a fragment, and the URI that its references are relative to."""

    schema: dict[str, Any]
    pointer: str
    uri: str
    draft: int
    anchors: tuple[str, ...]
    is_named: bool  # it has an ``$id`` of its own


class _Places:
    """Where the parts of a document are, by their URIs; found before the parts change."""

    def __init__(self, document: Mapping[str, Any], parts: Sequence[_Part]) -> None:
        self._document = document
        self._pointers = {part.pointer for part in parts}
        self._has_references_in_data = _num_references(_all_values(document)) > _num_references(part.schema for part in parts)
        self._by_uri: dict[str, list[_Part]] = {}
        for part in parts:
            uris = [f"{part.uri}#{anchor}" for anchor in part.anchors] + [part.uri] * (part.is_named or not part.pointer)
            for uri in uris:
                self._by_uri.setdefault(uri, []).append(part)
        several = {uri: found for uri, found in self._by_uri.items() if len(found) > 1}
        self._ambiguous = {uri for uri, found in several.items() if any(part.schema != found[0].schema for part in found)}

    def found(self, reference: str, uri: str, base: str) -> str:
        """Return what a reference in the part ``uri`` is in a document that has this one at ``base``."""
        whole, _, fragment = _joined(uri, reference).partition("#")
        is_anchor = bool(fragment) and not fragment.startswith("/")
        name = f"{whole}#{fragment}" if is_anchor else whole
        parts = self._by_uri.get(name, [])
        if not parts and (whole.lower().startswith("json-schema:") or (is_anchor and whole in self._by_uri)):
            raise InvalidRequest(f"$ref {reference!r} leads to nothing in the schema: correct it, or put what it means there")
        if not parts:
            return f"{whole}#{fragment}" if fragment else whole
        if name in self._ambiguous:
            raise InvalidRequest(f"$ref {reference!r} may mean several parts of the schema: give each its own $id or $anchor")
        pointer = parts[0].pointer + ("" if is_anchor else fragment)
        if base != "#" and self._has_references_in_data and self._is_data(pointer):
            raise InvalidRequest(f"$ref {reference!r} leads to data that has references: put the schema below $defs")
        return base + pointer

    def _is_data(self, pointer: str) -> bool:
        """Return True if what stands there is not a schema of the document."""
        if pointer in self._pointers or _normal(pointer) in self._pointers:
            return False
        value: Any = self._document
        for step in unquote(pointer).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                return False
        return isinstance(value, dict | list)


def _copied(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _num_references(values: Iterable[Any]) -> int:
    return sum(isinstance(value, dict) and any(isinstance(value.get(name), str) for name in REFERENCES) for value in values)


def _all_values(document: Mapping[str, Any]) -> Iterator[Any]:
    values: list[Any] = [document]
    while values:
        value = values.pop()
        yield value
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _parts(document: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the schemas of a document, each before those in it."""
    todo: list[tuple[Any, str, str, int]] = [(document, "", _NO_ID, 0)]
    while todo:
        schema, pointer, uri, draft = todo.pop()
        if not isinstance(schema, dict):
            continue
        part = _part(schema, pointer, uri, draft)
        yield part
        for keyword, value in schema.items():
            for steps, inner in inner_schemas(keyword, value):
                todo.append((inner, pointer + "".join(f"/{_step(step)}" for step in steps), part.uri, part.draft))


def _part(schema: dict[str, Any], pointer: str, uri: str, draft: int) -> _Part:
    version = schema.get("$schema")
    if isinstance(version, str):
        draft = next((number for name, number in _OLD_DRAFTS.items() if f"/{name}/" in version), 0)
    identifier, anchor = schema.get("id" if draft == 4 else "$id"), schema.get("$anchor")
    anchors = (anchor,) if isinstance(anchor, str) else ()
    if not isinstance(identifier, str) or (draft and "$ref" in schema):
        return _Part(schema, pointer, uri, draft, anchors, False)
    whole, _, fragment = identifier.partition("#")
    if fragment and draft:
        anchors = (*anchors, fragment)
    return _Part(schema, pointer, _joined(uri, whole), draft, anchors, bool(whole))


def _joined(uri: str, reference: str) -> str:
    """Return the URI of a reference that is relative to another URI, of any scheme."""
    if not reference or reference.startswith("#"):
        return uri + reference
    try:
        scheme = urlsplit(reference).scheme
        if scheme:
            return reference
        own, _, rest = uri.partition(":")
        return f"{own}:{urljoin('http:' + rest, reference).removeprefix('http:')}"
    except ValueError:
        raise InvalidRequest(f"{reference!r} in a schema is no URI: correct it") from None


def _step(name: str) -> str:
    if name.isalnum() and name.isascii():
        return name
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


def _normal(pointer: str) -> str:
    return "/".join(quote(unquote(step), safe="~$") for step in pointer.split("/"))
