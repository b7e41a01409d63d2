"""Prepares types that msgspec reads values into, for types that several threads may read.

msgspec collects what it knows of a type at its first use. Two threads that use one for the first time at once end the process
by SIGSEGV, so such types are prepared where they are defined, at import.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

StructT = TypeVar("StructT", bound=type[msgspec.Struct])


def prepared(kind: StructT) -> StructT:
    """Let msgspec collect what it knows of a type now; a decorator. The types of its fields must be defined before it."""
    msgspec.msgpack.Decoder(kind)
    return kind
