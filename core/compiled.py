"""Finds the libraries that were built from the C files of this repository when it was installed, if there was a compiler.

Each has another way in Python beside it, so whatever cannot be loaded is None. Owns their names, and what is said of those that
are missing; knows no function of any of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from typing import TypeVar

from core.log import event

logger = logging.getLogger(__name__)

_Library = TypeVar("_Library", bound=ctypes.CDLL)

LIBRARIES = (  # by their places in this package
    "_hash_chain",
    "_multilinear",
    "_stream_copy",
    "attention._paged_decode",
    "attention._paged_prefill",
    "attention._write_rows",
    "engine._allowed_tokens",
    "model._layer_ops",
)


def load_library(kind: type[_Library], name: str, package: str | None, *functions: str) -> _Library | None:
    """Return the library built from ``name.c`` of a package, with these functions; None if there is none for this machine.

    ``kind`` is ``ctypes.CDLL``, whose functions release the interpreter's lock, or ``ctypes.PyDLL``.
    """
    found = importlib.util.find_spec(f".{name}", package)
    if found is None or found.origin is None or sys.byteorder != "little":
        return None
    try:
        library = kind(found.origin)
        for function in functions:
            getattr(library, function)
    except (OSError, AttributeError):  # built for another system, or from another release
        return None
    return library


def missing_libraries() -> list[str]:
    """Return those of ``LIBRARIES`` that this process cannot load: what they are for takes several times as long."""
    return [name for name in LIBRARIES if load_library(ctypes.CDLL, name, __package__) is None]


def warn_unused(name: str, reason: str) -> None:
    """Log why a library that is there is not used."""
    logger.warning(event("compiled_library_off", library=name, reason=reason))
