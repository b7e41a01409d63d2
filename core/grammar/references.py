"""What the references of a JSON schema refer to, as pointers into its document. Pure.

A schema keeps its meaning where it stands below others, and the grammar library follows a pointer into a part with an ``$id``
as the specification says: without this it takes that part's own ``#`` for that of the document around it.

It is done on the router's event loop, for schemas that anyone sends: one walk, which keeps only the parts that refer or are
named, URIs of bounded length and number, and a result within the limit of schemas while it grows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote, urljoin

import msgspec

from core.errors import InvalidRequest
from core.grammar.limits import MAX_SCHEMA_BYTES
from core.grammar.schema_keywords import APPLIED, CONTAINERS, DATA, REFERENCES, SCHEMAS, SCHEMAS_BY_NAME

MAX_URIS = 64  # of parts that have one, if there are references by URI
MAX_URI_CHARACTERS = 1000
TOO_LARGE = (
    f"the JSON schema has more than {MAX_SCHEMA_BYTES} bytes once its references are pointers: use fewer of them, or shorter "
    "names of what they lead to"
)
_NO_ID = "json-schema:///"  # the library's URI of a document without an ``$id``
_SPECIFICATION = "//json-schema.org/"  # whose documents the library has
_OLD_DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7}  # ``$ref`` hides what is beside it, and ``$id`` may be an anchor
_DRAFT = re.compile("|".join(f"/({name})/" for name in _OLD_DRAFTS))
_NO_SIGNS = str.maketrans("", "", "+-.")
_AUTHORITY = re.compile(r"//[^/?]*")
_MAX_TOLD = 100  # characters of a reference in a text

_Node = tuple[Any, str | int] | None  # where a value stands: the node around it, and its name there; None = the document


def without_identifiers(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as it is, or as ``as_pointers`` has it if a part may be referred to by another name than its pointer.

    Raises: as ``as_pointers``.
    """
    document = _Document(schema)
    return _resolved(document, "#") if any(part.identifiers for part in document.parts) else dict(schema)


def as_pointers(schema: Mapping[str, Any], base: str = "#") -> dict[str, Any]:
    """Return a schema of the same meaning at the pointer ``base``: its references are pointers, and no part has an ``$id``.

    A pointer to nothing stays one, and so does the URI of another document; the library tells of them. What cannot be
    resolved where the schema may not need it becomes a pointer to nothing.

    Raises:
        InvalidRequest: a reference that is needed leads to nothing, to one of several parts, or to data that refers to
            something, or has a URI that exceeds a limit; or the pointers make the schema too large.
    """
    return _resolved(_Document(schema), base)


def _resolved(document: _Document, base: str) -> dict[str, Any]:
    references = _References(document, base)
    for part in document.parts:
        reference = part.schema.get("$ref")
        if isinstance(reference, str):
            part.schema["$ref"] = references.found(reference, part)
    for part in document.parts:
        for name in part.identifiers:
            del part.schema[name]
    return document.root


@dataclass(slots=True, eq=False)
class _Resource:
    """A part with an ``$id`` of its own, or the document. The parts in it are relative to it."""

    around: _Resource | None
    identifier: str
    schema: dict[str, Any]
    node: _Node
    is_known: bool  # not below a keyword that nobody knows, where an ``$id`` may be anything
    anchors: dict[str, list[_Node]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Part:
    """A schema in the document that refers to another, or may be referred to by a name."""

    schema: dict[str, Any]
    resource: _Resource
    is_applied: bool  # wherever the document is
    identifiers: list[str]


class _Document:
    """A copy of a schema, except for its data, and its parts; found in one walk."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = dict(schema)
        self.parts: list[_Part] = []
        self.resources = [_Resource(None, _NO_ID, self.root, None, True)]
        self.num_visited = 0
        self._data: list[Any] = []
        self._walk()

    @cached_property
    def has_references_in_data(self) -> bool:
        todo = list(self._data)
        while todo:
            value = todo.pop()
            if isinstance(value, dict) and any(isinstance(value.get(name), str) for name in REFERENCES):
                return True
            inner = value.values() if isinstance(value, dict) else value
            todo += [each for each in inner if isinstance(each, CONTAINERS)]
        return False

    def _walk(self) -> None:
        todo: list[tuple[Any, _Node, _Resource, int, bool, bool]] = [(self.root, None, self.resources[0], 0, True, True)]
        while todo:
            value, node, resource, draft, is_known, is_applied = todo.pop()
            self.num_visited += 1
            if isinstance(value, list):
                for index in [index for index, inner in enumerate(value) if inner and isinstance(inner, CONTAINERS)]:
                    copied = value[index] = value[index].copy()
                    todo.append((copied, (node, index), resource, draft, is_known, is_applied))
                continue
            resource, draft = self._part(value, node, resource, draft, is_known, is_applied)
            for keyword, inner in value.items():
                if not inner or not isinstance(inner, CONTAINERS):
                    continue
                if keyword in DATA:
                    self._data.append(inner)
                    continue
                copied = value[keyword] = inner.copy()
                below = (node, keyword)
                known, applied = is_known and keyword in SCHEMAS, is_applied and keyword in APPLIED
                if keyword not in SCHEMAS_BY_NAME or isinstance(copied, list):
                    todo.append((copied, below, resource, draft, known, applied))
                    continue
                for name in [name for name, schema in copied.items() if schema and isinstance(schema, CONTAINERS)]:
                    named = copied[name] = copied[name].copy()
                    todo.append((named, (below, name), resource, draft, known, applied))

    def _part(
        self, schema: dict[str, Any], node: _Node, resource: _Resource, draft: int, is_known: bool, is_applied: bool
    ) -> tuple[_Resource, int]:
        """Keep a schema if it refers or is named; return what those in it are relative to, and their draft."""
        version = schema.get("$schema")
        if isinstance(version, str):
            draft = _draft(version)
        key = "id" if draft == 4 else "$id"
        identifiers = [name for name in ("$id", "$anchor", "id") if isinstance(schema.get(name), str)]
        if draft != 4 and "id" in identifiers:
            identifiers.remove("id")
        anchors = [schema["$anchor"]] if "$anchor" in identifiers else []
        if key in identifiers and not (draft and "$ref" in schema):
            whole, _, fragment = schema[key].partition("#")
            if whole:
                resource = _Resource(resource, whole, schema, node, is_known)
                if node is None:
                    self.resources.clear()
                self.resources.append(resource)
            if fragment and draft:
                anchors.append(fragment)
        if is_known:
            for anchor in anchors:
                resource.anchors.setdefault(anchor, []).append(node)
        if identifiers or isinstance(schema.get("$ref"), str):
            self.parts.append(_Part(schema, resource, is_applied, identifiers))
        return resource, draft


class _Unresolved(Exception):
    """Why a reference means nothing; the text goes on after the reference."""


class _References:
    """What references mean at ``base``."""

    def __init__(self, document: _Document, base: str) -> None:
        self._document = document
        self._base = base
        self._room: int | None = None
        self._num_known = sum(resource.is_known for resource in document.resources)
        self._uris: dict[tuple[_Resource, str], tuple[str, str]] = {}  # by what they are relative to; or why there is none
        self._pointers: dict[_Node, str] = {}
        self._nothing = "nothing:"
        while self._nothing in document.root:
            self._nothing += ":"

    def found(self, reference: str, part: _Part) -> str:
        """Return what a reference of a part is in a document that has this one at ``base``."""
        try:
            pointer = self._meant(reference, part)
        except _Unresolved as error:
            if part.is_applied:
                told = repr(reference[:_MAX_TOLD]) + "…" * (len(reference) > _MAX_TOLD)
                raise InvalidRequest(f"$ref {told} {error}") from None
            pointer = f"{self._base}/{self._nothing}/{quote(reference[:_MAX_TOLD], safe=':/', errors='replace')}"
        self._take_room(len(pointer) - len(reference))
        return pointer

    def _meant(self, reference: str, part: _Part) -> str:
        whole, _, fragment = reference.partition("#")
        resource = part.resource
        if whole:
            found = self._of_uri(whole, resource)
            if found is None and not part.is_applied and _SPECIFICATION not in whole:
                raise _Unresolved("is the URI of another document")  # the library looks for them also where nothing needs them
            if found is None:
                return reference
            resource = found
        if fragment and not fragment.startswith("/"):
            nodes = resource.anchors.get(unquote(fragment), ())
            if not nodes:
                raise _Unresolved("leads to nothing in the schema: correct it, or put what it means there")
            if len(nodes) > 1:
                raise _Unresolved("may mean several parts of the schema: give each its own $anchor")
            return self._pointer(nodes[0])
        if fragment and self._document.has_references_in_data and _is_data(resource.schema, fragment):
            raise _Unresolved("leads to data that has references: put the schema below $defs")
        return self._pointer(resource.node) + fragment

    def _of_uri(self, whole: str, resource: _Resource) -> _Resource | None:
        """Return the resource of a URI, None if it is another document's."""
        if len(whole) > MAX_URI_CHARACTERS:
            raise _Unresolved(f"has a URI of more than {MAX_URI_CHARACTERS} characters: shorten it")
        if self._num_known > MAX_URIS:
            raise _Unresolved(f"is by a URI, and more than {MAX_URIS} parts have an $id: use pointers, as #/$defs/...")
        uri = _normal(whole) if _is_absolute(whole) else self._uri(resource, whole)
        found = self._by_uri.get(uri, ())
        if len(found) == 1:
            return found[0]
        if found:
            raise _Unresolved("may mean several parts of the schema: give each its own $id")
        if uri.startswith("json-schema:") or not _is_absolute(whole):
            raise _Unresolved("leads to nothing in the schema: correct it, or put what it means there")
        return None

    @cached_property
    def _by_uri(self) -> dict[str, list[_Resource]]:
        found: dict[str, list[_Resource]] = {}
        for resource in self._document.resources:
            try:
                if resource.is_known:
                    found.setdefault(self._uri(resource), []).append(resource)
            except _Unresolved:  # no reference has such a URI
                continue
        return found

    def _uri(self, resource: _Resource, reference: str = "") -> str:
        """Return the URI of a resource, or of a reference that is relative to it; each is made once, or its error."""
        known = self._uris.get((resource, reference))
        if known is None:
            if len(self._uris) >= 2 * MAX_URIS:
                raise _Unresolved("is one of too many relative URIs in the schema: use pointers, as #/$defs/...")
            try:
                known = (self._made_uri(resource, reference), "")
            except _Unresolved as error:
                known = ("", str(error))
            self._uris[resource, reference] = known
        uri, why_not = known
        if why_not:
            raise _Unresolved(why_not)
        return uri

    def _made_uri(self, resource: _Resource, reference: str) -> str:
        if reference:
            return _joined(self._uri(resource), reference)
        if resource.around is None:
            return _NO_ID
        if len(resource.identifier) > MAX_URI_CHARACTERS:
            raise _Unresolved(f"is relative to an $id of more than {MAX_URI_CHARACTERS} characters: shorten it")
        return _joined(self._uri(resource.around), resource.identifier)

    def _pointer(self, node: _Node) -> str:
        """Return the pointer to a part, once made: most are never referred to."""
        known = self._pointers.get(node)
        if known is None:
            steps: list[str] = []
            at = node
            while at is not None:
                at, step = at
                steps.append(_step(str(step)))
            known = self._pointers[node] = "/".join([self._base, *reversed(steps)])
        return known

    def _take_room(self, num_more: int) -> None:
        if self._room is None:
            size = len(msgspec.json.encode(self._document.root))
            self._room = max(0, MAX_SCHEMA_BYTES - size)
        self._room -= num_more
        if num_more > 0 and self._room < 0:
            raise InvalidRequest(TOO_LARGE)


def _is_data(schema: Mapping[str, Any], fragment: str) -> bool:
    """Return True if a pointer leads from a schema into what is not one."""
    value: Any = schema
    has_names = False
    is_data = False
    for step in unquote(fragment).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not (name.isdecimal() and name.isascii() and len(name) < 9 and int(name) < len(value)):
                return False
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
            is_data = is_data or (not has_names and name in DATA)
            has_names = not has_names and name in SCHEMAS_BY_NAME and isinstance(value, dict)
        else:
            return False
    return isinstance(value, dict | list) and (is_data or has_names or isinstance(value, list))


def _draft(version: str) -> int:
    found = _DRAFT.search(version)
    return _OLD_DRAFTS[found[0][1:-1]] if found else 0


def _is_absolute(uri: str) -> bool:
    scheme, colon, _ = uri.partition(":")
    return bool(colon) and scheme[:1].isalpha() and scheme.isascii() and scheme.translate(_NO_SIGNS).isalnum()


def _joined(uri: str, reference: str) -> str:
    """Return the URI of a reference that is relative to another URI, of any scheme that has paths."""
    if _is_absolute(reference):
        return _normal(reference)
    own, _, rest = uri.partition(":")
    try:
        found = _normal(f"{own}:{urljoin('http:' + rest, reference).removeprefix('http:')}")
    except ValueError:
        raise _Unresolved("is no URI: correct it") from None
    if not rest.startswith("/"):
        raise _Unresolved("is relative to an $id that has no path: use pointers, as #/$defs/...")
    if len(found) > MAX_URI_CHARACTERS:
        raise _Unresolved(f"has a URI of more than {MAX_URI_CHARACTERS} characters: shorten it, or the $id of its schema")
    return found


def _normal(uri: str) -> str:
    """Return a URI as it is compared: the case of scheme and host tells nothing."""
    scheme, _, rest = uri.partition(":")
    authority = _AUTHORITY.match(rest)
    if authority is None:
        return f"{scheme.lower()}:{rest}"
    if authority[0].count("[") != authority[0].count("]"):
        raise _Unresolved("is no URI: correct it")
    user, at, host = authority[0].rpartition("@")
    return f"{scheme.lower()}:{user}{at}{host.lower()}{rest[authority.end() :]}"


def _step(name: str) -> str:
    if name.isalnum() and name.isascii():
        return name
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$", errors="replace")
