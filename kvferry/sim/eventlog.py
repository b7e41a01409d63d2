"""The event log of a simulation: one line per event, the same for the same seed to the last byte.

Values are abbreviated: long tuples by their length, identities by their first digits, defaults not at all. Costs nothing
unless the log is kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Set
from enum import Enum

import msgspec

_MAX_ITEMS = 6
_MAX_DIGITS = 8


class EventLog:
    """Lines of text with the time of each. ``is_kept`` False = nothing is written."""

    def __init__(self, now: Callable[[], float], *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self.lines: list[str] = []
        self._now = now

    def write(self, who: str, what: str, value: object = None) -> None:
        """Write a line."""
        if self.is_kept:
            text = f" {brief(value)}" if value is not None else ""
            self.lines.append(f"{self._now():10.6f} {who:<10} {what}{text}")


def brief(value: object) -> str:
    """Return a value as a short text that depends on nothing but the value."""
    if isinstance(value, bool | str | None.__class__):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 40 else f"{value:x}"[:_MAX_DIGITS]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return value.hex()[:_MAX_DIGITS]
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, msgspec.Struct):
        fields = {name: (getattr(value, name), default) for name, default in _struct_defaults(type(value))}
        return _named(type(value).__name__, fields)
    if dataclasses.is_dataclass(value):
        fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return _named(type(value).__name__, fields)
    return _brief_collection(value)


@functools.cache
def _struct_defaults(kind: type[msgspec.Struct]) -> list[tuple[str, object]]:
    return [(field.name, field.default) for field in msgspec.structs.fields(kind)]


def _named(name: str, fields: dict[str, tuple[object, object]]) -> str:
    shown = [
        f"{field}={brief(value)}" for field, (value, default) in fields.items() if value != default and value not in _EMPTY
    ]
    return f"{name}({' '.join(shown)})"


_EMPTY: tuple[object, ...] = (None, "", (), [], {})


def _brief_collection(value: object) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{brief(key)}:{brief(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Set):
        return "{" + " ".join(sorted(map(brief, value))) + "}"
    if isinstance(value, tuple | list):
        if len(value) > _MAX_ITEMS and isinstance(value[0], int | bytes):
            return f"<{len(value)}>"
        return "[" + " ".join(map(brief, value)) + "]"
    if isinstance(value, Exception):
        return f"{type(value).__name__}({value})"
    return type(value).__name__
