"""Finds the libraries that were built from the C files of this repository when it was installed, if there was a compiler.

Each has a fallback in Python, so a library that cannot be loaded is None. Owns their names and the messages about missing ones;
knows none of their functions.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import TypeVar

from core.log import event

logger = logging.getLogger(__name__)

_Library = TypeVar("_Library", bound=ctypes.CDLL)

DIGEST_SYMBOL = "kvferry_sources"  # a string in each library: the digest of what it was built from

LIBRARIES = (  # by their places in this package
    "_hash_chain",
    "_multilinear",
    "_stream_copy",
    "attention._paged_decode",
    "attention._paged_prefill",
    "attention._write_rows",
    "engine._allowed_tokens",
    "model._few_rows",
    "model._layer_chain",
    "model._layer_ops",
)


def load_library(kind: type[_Library], name: str, package: str | None, *functions: str) -> _Library | None:
    """Return the library built from ``name.c`` of a package, with these functions; None if there is none for this machine.

    ``kind`` is ``ctypes.CDLL``, whose functions release the interpreter's lock, or ``ctypes.PyDLL``. None of them may be called
    if the library is older or newer than the sources in its folder: what the caller passes may have another form.
    """
    library, reason = _load(kind, name, package, functions)
    if reason is not None:
        warn_unused(f"{package}.{name}".removeprefix(f"{__package__}."), reason)
    return library


def _load(
    kind: type[_Library], name: str, package: str | None, functions: tuple[str, ...] = ()
) -> tuple[_Library | None, str | None]:
    """Return the library, or None with the reason if it is there for this machine and must not be used."""
    found = importlib.util.find_spec(f".{name}", package)
    if found is None or found.origin is None or sys.byteorder != "little":
        return None, None
    try:
        library = kind(found.origin)
        for function in functions:
            getattr(library, function)
    except (OSError, AttributeError):  # built for another system, or from another release
        return None, None
    wanted = sources_digest(Path(found.origin).with_name(f"{name.rpartition('.')[2]}.c"))
    if wanted is not None and wanted != _digest_of(library):
        return None, "its sources have changed since it was built"
    own = sources_digest(_folder_of(package).joinpath(*name.split(".")).with_suffix(".c"))
    if None not in (wanted, own) and wanted != own:  # an editable installation gives it to every checkout
        return None, f"it is that of another checkout, {found.origin}"
    return library, None


def _folder_of(package: str | None) -> Path:
    file = sys.modules[package or ""].__file__
    assert file is not None, "a package with an __init__.py, in which the caller is"
    return Path(file).parent


def sources_digest(source: Path) -> str | None:
    """Return a digest of a C file and of the files that it includes by name; None if any of them is not there."""
    digest = hashlib.blake2b(digest_size=16)
    waiting, seen = [source], set()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_bytes()
        except OSError:
            return None
        digest.update(hashlib.blake2b(text).digest())
        waiting += [path.parent / name.decode() for name in re.findall(rb'^#include "(.+)"', text, re.MULTILINE)]
    return digest.hexdigest()


def _digest_of(library: ctypes.CDLL) -> str | None:
    try:
        return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, DIGEST_SYMBOL))).decode()
    except ValueError:  # it has no such symbol
        return None


def missing_libraries() -> list[str]:
    """Return those of ``LIBRARIES`` that this process must do without: what they are for takes longer.

    Why one that is there is not used is logged where it would have been.
    """
    return [name for name in LIBRARIES if _load(ctypes.CDLL, name, __package__)[0] is None]


def warn_unused(name: str, reason: str) -> None:
    """Log why one of ``LIBRARIES`` that is there is not used."""
    logger.warning(event("compiled_library_off", library=name, reason=reason))
