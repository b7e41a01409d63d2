"""Reads configuration files and assignments by dotted path into a tree of settings; errors name the path.

Owns the spelling of settings. Knows no setting: ``core.config`` owns these, and passes the type of the whole.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from core.errors import ConfigError

STDIN = Path("/dev/stdin")  # as a configuration file, it holds JSON: so a supervisor passes settings to its children

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kMGT]|[KMGT]i)?B?")
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_SECRETS = frozenset({"api_key", "cluster_key", "other_cluster_keys", "redis_password"})
_MAY_HOLD_SECRETS = frozenset({"redis_url", "endpoint", "vllm_arguments", "extra"})  # among other words
_WORD = re.compile(r"[\w.-]+")
_MERGE = "tag:yaml.org,2002:merge"
_QUOTED = re.compile(r"\b(alias|anchor|tag|tag handle) (['\"]).*\2")  # what PyYAML quotes of a file's text
_WORDS: Mapping[Any, str] = {bool: "true or false", str: "text", dict: "a mapping"}
_FOUND: Mapping[type, str] = {str: "text", list: "a list", int: "a number", float: "a number"}


class _KeyTwice(yaml.MarkedYAMLError):
    """A mapping has a key twice."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: PyYAML takes the last one, and what stands below the first is lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - as the stubs have it
        """Look at the keys as they are written, before those of ``<<`` come to them, which may be overridden."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:  # of several <<, all are taken
                continue
            written, line = (key.tag, key.value), key.start_mark.line + 1
            if written in lines:
                where = f"at lines {lines[written]} and {line}"
                raise _KeyTwice(problem=f"{_shown_key(key.value)} is written twice, {where}: write it once")
            lines[written] = line
        return node


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a YAML, TOML or JSON file.

    Raises:
        ConfigError: it cannot be read, is not a mapping, or has a key twice.
    """
    try:
        text = path.read_text()
        if path.suffix == ".json" or path == STDIN:
            tree = msgspec.json.decode(text)
            json.loads(text, object_pairs_hook=_refuse_twice)  # msgspec takes the last one
        else:
            tree = tomllib.loads(text) if path.suffix == ".toml" else _read_yaml(text)
    except (OSError, ValueError, yaml.YAMLError, msgspec.DecodeError) as error:
        why = _without_text(error) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"cannot read configuration file {path}: {why}", param=str(path)) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file {path}: expected a mapping of sections", param=str(path))
    return tree


def _read_yaml(text: str) -> Any:  # noqa: ANN401 - any YAML
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    except (ValueError, LookupError, AttributeError):  # PyYAML's own, with the value in it
        raise ValueError("a value with a tag (!!) is none of its type") from None


def _refuse_twice(pairs: Sequence[tuple[str, Any]]) -> None:
    """Refuse an object of a JSON file that has a key twice."""
    keys = [key for key, _ in pairs]
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise ValueError(f"{_shown_key(twice)} is written twice: write it once")


def _shown_key(key: str) -> str:
    """Return a key for messages, up to its first blank or colon: what follows may be a secret."""
    word = _WORD.match(key)
    return f"key {word[0]}" if word is not None else "a key"


def _without_text(error: yaml.MarkedYAMLError) -> str:
    """Return an error's problem and place, without the file's text, which may be a secret."""
    said = ": ".join(part for part in (error.context, error.problem) if part)
    mark = error.problem_mark
    return _QUOTED.sub(r"\1", said) + (f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else "")


def kind_of(kind: Any, path: str) -> Any:  # noqa: ANN401 - any type annotation
    """Return the type of the setting at a dotted path; None if there is none, or below a free mapping."""
    for part in path.split("."):
        kind = get_type_hints(kind).get(part) if hasattr(kind, "__struct_fields__") else None
    return kind


def parse_value(text: str, kind: Any) -> Any:  # noqa: ANN401 - any configuration value
    """Parse the text of an assignment for the type of its setting (see ``core.config.load_config``)."""
    if kind is str or get_origin(kind) is Literal:  # YAML reads on and off as true and false
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return yaml.load(text, Loader=_Loader)
    except _KeyTwice as error:
        raise ConfigError(f"a value of --set: {error.problem}") from None
    except yaml.YAMLError:
        return text


def parse_size(text: str) -> int | None:
    """Return the number that a size such as ``1GiB``, ``512MiB`` or ``64k`` stands for; None for other text.

    ``k``, ``M``, ``G``, ``T`` are powers of 1000, ``Ki``, ``Mi``, ``Gi``, ``Ti`` of 1024; a ``B`` may follow.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    value = float(found["number"]) * _UNITS.get(found["unit"] or "", 1)
    return int(value) if value.is_integer() else None


def is_size(path: str) -> bool:
    """Return True if a setting counts bytes or tokens, and so may be given as a size."""
    return path.endswith(("_bytes", "_tokens", "max_model_len"))


def read_values(tree: Mapping[str, Any], section: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the tree as it is meant; ``check_keys`` has accepted its keys.

    Sizes become numbers, a section or mapping without content an empty one, and YAML's true and false the words ``on`` and
    ``off`` where a setting is a choice that has them.
    """
    hints = get_type_hints(section)
    return {key: _as_meant(key, value, hints[key]) for key, value in tree.items()}


def _as_meant(key: str, value: Any, kind: Any) -> Any:  # noqa: ANN401 - any configuration value
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return read_values(value or {}, kind)
    if value is None and get_origin(kind) is dict:
        return {}
    if isinstance(value, bool) and get_origin(kind) is Literal:
        word = "on" if value else "off"
        return word if word in get_args(kind) else value
    if isinstance(value, str) and is_size(key):
        size = parse_size(value)
        return value if size is None else size
    return value


def put(tree: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - any configuration value
    """Set the value at a dotted path. Raises ConfigError if a part of it is not a section."""
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"{key}: {parent} is a value, not a section", param=key)
    node[leaf] = value


def check_text(tree: Mapping[str, Any] | msgspec.Struct) -> None:
    """Refuse text that UTF-8 cannot hold: bytes of a command line or variable that are none, or half a character of a file.

    Raises:
        ConfigError: names the path, not the text, which may be a secret.
    """
    for path, text in _texts(tree):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = path.encode(errors="backslashreplace").decode()
            raise ConfigError(
                f"{shown}: character {error.start + 1} of the text is a byte that is not UTF-8, or half a character; "
                "write it in UTF-8",
                param=shown,
            ) from None


def _texts(tree: Mapping[str, Any] | msgspec.Struct) -> Iterator[tuple[str, str]]:
    """Return every text of a tree with its path, keys included. A file's aliases may lead to one value by several paths."""
    found: list[tuple[str, Any]] = [("", tree)]
    seen: set[int] = set()
    for path, value in found:  # grows during the loop
        if isinstance(value, str):
            yield path, value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping | msgspec.Struct):
            fields = value if isinstance(value, Mapping) else msgspec.structs.asdict(value)
            for key, below in fields.items():
                inner = f"{path}.{key}" if path else str(key)
                found += [(inner, key), (inner, below)]
        elif isinstance(value, list | tuple):
            found += [(path, below) for below in value]


def check_keys(tree: Mapping[str, Any], section: type[msgspec.Struct], prefix: str = "") -> None:
    """Refuse unknown keys with their path and the nearest known one."""
    hints = get_type_hints(section)
    known = section.__struct_fields__
    for key, value in tree.items():
        path = f"{prefix}{key}"
        word = _WORD.match(str(key))
        if word is None or word.end() < len(str(key)):  # what follows the word may be a secret
            path = f"{prefix}{word[0] if word is not None else ''}"
            hint = "a space is missing after its colon" if str(key)[len(path) - len(prefix) :].startswith(":") else "no key"
            raise ConfigError(f"unknown configuration key {path}...: {hint}, write it as KEY: VALUE", param=path)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ConfigError(f"unknown configuration key {path}: {hint}known keys: {', '.join(known)}", param=path)
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict | None):
                found = _FOUND.get(type(value), type(value).__name__)
                raise ConfigError(f"{path} is a section: expected a mapping, got {found}", param=path)
            check_keys(value or {}, kind, f"{path}.")


def explain(error: msgspec.ValidationError, root: type[msgspec.Struct], tree: Mapping[str, Any]) -> ConfigError:
    """Turn msgspec's message into one with the dotted path, the value and what is allowed."""
    _, _, where = str(error).partition(" - at `$.")
    path = where.rstrip("`").partition("[")[0]
    value: Any = tree
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    shown = "(not shown)" if path.rpartition(".")[2] in _SECRETS | _MAY_HOLD_SECRETS else repr(value)
    return ConfigError(f"{path} = {shown}: expected {_allowed(root, path)}", param=path)


def _allowed(root: type[msgspec.Struct], path: str) -> str:
    """Return the values of a setting in words."""
    *parents, name = path.split(".")
    section = kind_of(root, ".".join(parents)) if parents else root
    kind = get_type_hints(section, include_extras=True).get(name) if hasattr(section, "__struct_fields__") else None
    choices = [choice for choice in get_args(kind) if choice is not NoneType]
    if get_origin(kind) in (Union, UnionType) and len(choices) == 1:
        return f"{_allowed_kind(name, choices[0])}, or null"
    return _allowed_kind(name, kind)


def _allowed_kind(name: str, kind: Any) -> str:  # noqa: ANN401 - any type annotation
    metas: tuple[Any, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *metas_found = get_args(kind)
        metas = tuple(metas_found)
    if get_origin(kind) is Literal:
        return f"one of: {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "a list of texts, such as [a, b]"
    if kind in (int, float):
        return _allowed_numbers(name, kind, metas)
    pattern = next((f" of the form {meta.pattern}" for meta in metas if meta.pattern), "")
    if any(meta.min_length for meta in metas):
        pattern += " that is not empty"
    return _WORDS.get(get_origin(kind) or kind, "another kind of value") + pattern


def _allowed_numbers(name: str, kind: type, metas: Sequence[msgspec.Meta]) -> str:
    words = "a whole number" if kind is int else "a number"
    if kind is float and name.endswith("_s"):
        words += " of seconds"
    bounds = {bound: getattr(meta, bound) for meta in metas for bound in ("ge", "gt", "le", "lt")}
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{names[bound]} {value:.15g}" if kind is float else f"{names[bound]} {value}"
        for bound, value in bounds.items()
        if value is not None
    ]
    words += f", {' and '.join(limits)}" if limits else ""
    return words + (", or a size such as 1GiB, 512MiB or 64k" if is_size(name) else "")
