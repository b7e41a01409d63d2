"""Reads the metadata of a GGUF's architecture, checked: counts, numbers, and fields that must have the value assumed here.

Owns the checks and their errors; what a field means is ``core.model.gguf``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one architecture, by name without it: ``block_count`` is the metadata's ``llama.block_count``."""

    architecture: str
    metadata: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def key(self, name: str) -> str:
        """Return the key of a field in the metadata."""
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - what the file says
        """Return a field as it is; its default where the file lacks it.

        Raises:
            ConfigError: the file lacks it, and it has no default.
        """
        value = self.metadata.get(self.key(name), default)
        if value is None:
            raise ConfigError(f"GGUF metadata lacks {self.key(name)}", param=self.key(name))
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. An array, llama.cpp's form for layers that differ, is none.

        Raises:
            ConfigError: it is something else, or as ``get``.
        """
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.unsupported(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a real number, with the fewest digits that are the same float32.

        Raises:
            ConfigError: it is something else, or as ``get``.
        """
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.unsupported(name, "a number")
        return shortest(value)

    def require(self, name: str, *supported: object) -> None:
        """Check a field that the file may lack.

        Raises:
            ConfigError: the file has it with another value than the supported ones.
        """
        if name in self and self.get(name) not in supported:
            raise self.unsupported(name, ", ".join(str(value) for value in supported))

    def unsupported(self, name: str, supported: str) -> ConfigError:
        """Return the error that names a field, its value and what is supported."""
        key = self.key(name)
        return ConfigError(f"GGUF {key}={self.metadata.get(key)!r} is not supported; supported: {supported}", param=key)


def shortest(value: float) -> float:
    """Undo the widening of a float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
