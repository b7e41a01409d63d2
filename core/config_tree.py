"""From a configuration file and assignments by dotted path to a tree of settings, and from its faults to errors that name them.

Owns how a setting is spelled. Knows no setting: ``core.config`` owns these, and passes the type of the whole.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from core.errors import ConfigError

STDIN = Path("/dev/stdin")  # as a configuration file, it holds JSON; how a supervisor tells its children


def read_file(path: Path) -> dict[str, Any]:
    """Return what a YAML, TOML or JSON file holds. Raises ConfigError if it cannot be read, or is no mapping."""
    try:
        text = path.read_text()
        if path.suffix == ".json" or path == STDIN:
            tree = msgspec.json.decode(text)
        else:
            tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read configuration file {path}: {error}", param=str(path)) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file {path}: expected a mapping of sections", param=str(path))
    return tree


def kind_of(kind: Any, path: str) -> Any:  # noqa: ANN401 - any type annotation
    """Return the type of the setting at a dotted path; None where there is none, or below a free mapping."""
    for part in path.split("."):
        kind = get_type_hints(kind).get(part) if hasattr(kind, "__struct_fields__") else None
    return kind


def parse_value(text: str, kind: Any) -> Any:  # noqa: ANN401 - any configuration value
    """Read the text of an assignment as the kind of its setting asks (see ``core.config.load_config``)."""
    if kind is str or get_origin(kind) is Literal:  # YAML takes on and off for true and false
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def put(tree: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - any configuration value
    """Set the value at a dotted path. Raises ConfigError if a part of it is no section."""
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{key}: {parent} is a value, not a section", param=key)
    node[leaf] = value


def check_keys(tree: Mapping[str, Any], section: type[msgspec.Struct], prefix: str = "") -> None:
    """Refuse unknown keys with their path and the nearest known one."""
    hints = get_type_hints(section)
    known = section.__struct_fields__
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ConfigError(f"unknown configuration key {path}: {hint}known keys: {', '.join(known)}", param=path)
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{path} is a section, expected a mapping, got {value!r}", param=path)
            check_keys(value, kind, f"{path}.")


def explain(error: msgspec.ValidationError, root: type[msgspec.Struct]) -> ConfigError:
    """Turn msgspec's message into one with the dotted path and the allowed values."""
    what, _, where = str(error).partition(" - at `$.")
    path = where.rstrip("`")
    kind = kind_of(root, path.partition("[")[0])
    allowed = f"; allowed: {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else ""
    return ConfigError(f"{path}: {what[0].lower()}{what[1:]}{allowed}", param=path)
