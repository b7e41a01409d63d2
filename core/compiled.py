"""Finds the libraries that were built from the C files of this repository when it was installed, if there was a compiler.

Each has another way in Python beside it, so whatever cannot be loaded is None. Knows no function of any of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import TypeVar

_Library = TypeVar("_Library", bound=ctypes.CDLL)


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
