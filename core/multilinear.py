"""The sums that a block's digest consists of, over words in host memory: in one pass by compiled C, or in three by numpy.

Owns both implementations and the choice between them. ``core/_multilinear.c`` is built when kvferry is installed, if there is
a C compiler; otherwise numpy computes the same sums, more slowly. ``core.digest`` defines the meaning of the sums and the keys.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.compiled import load_library, warn_unused

CHUNK_ROWS = 256  # 1 MiB of rows of 512 words: few calls for a block, and little scratch memory

Words = npt.NDArray[np.uint64]


class Sums(Protocol):
    """Both levels of the hash, for blocks with as many rows as there are outer keys, modulo 2**64."""

    def __init__(self, row_keys: Words, outer_keys: Words) -> None:
        """``row_keys`` [2, row_words] and ``outer_keys`` [2, num_rows]: those for whole words, and for their upper halves."""

    def of(self, words: Words) -> int:
        """Return the sum over the rows of a block [num_words]; the last row may be shorter."""

    def copy(self, words: Words, target: Words) -> int:
        """Copy a block and return the sum of the copy: also if the words change meanwhile, as in memory of another process."""


class CompiledSums:
    """One pass in C, without the interpreter's lock. Any thread."""

    def __init__(self, row_keys: Words, outer_keys: Words, library: ctypes.CDLL | None = None) -> None:
        library = library or compiled_library()
        assert library is not None, "the caller has looked"
        self._function = library.kvferry_digest_sums
        self._row_keys, self._outer_keys = np.ascontiguousarray(row_keys), np.ascontiguousarray(outer_keys)
        self._arguments = (
            self._row_keys.ctypes.data,
            row_keys.shape[1],
            self._outer_keys.ctypes.data,
            outer_keys.shape[1],
        )

    def of(self, words: Words) -> int:
        """Return the sum over the rows of a block."""
        digest: int = self._function(words.ctypes.data, len(words), *self._arguments, None)
        return digest

    def copy(self, words: Words, target: Words) -> int:
        """Copy a block and return the sum of the copy, in the same pass."""
        digest: int = self._function(words.ctypes.data, len(words), *self._arguments, target.ctypes.data)
        return digest


class NumpySums:
    """Three passes over pieces that fit a cache. Holds scratch memory, so each thread needs one of its own."""

    def __init__(self, row_keys: Words, outer_keys: Words) -> None:
        self._low_keys, self._high_keys = row_keys
        self._outer = outer_keys
        self._row_words = row_keys.shape[1]
        num_rows = outer_keys.shape[1]
        self._rows = np.empty((2, num_rows), dtype=np.uint64)
        self._upper = np.empty((min(CHUNK_ROWS, num_rows), self._row_words), dtype=np.uint64)

    def of(self, words: Words) -> int:
        """Return the sum over the rows of a block."""
        num_full = len(words) // self._row_words
        full = words[: num_full * self._row_words].reshape(num_full, self._row_words)
        for start in range(0, num_full, CHUNK_ROWS):
            self._reduce(full[start : start + CHUNK_ROWS], start)
        if num_full < self._rows.shape[1]:
            self._reduce(words[num_full * self._row_words :].reshape(1, -1), num_full)
        low, high = self._rows
        low += high
        np.right_shift(low, np.uint64(32), out=high)
        return int(np.einsum("lr,lr->", self._outer, self._rows))

    def copy(self, words: Words, target: Words) -> int:
        """Copy a block and return the sum of the copy."""
        np.copyto(target, words)
        return self.of(target)

    def _reduce(self, rows: Words, start: int) -> None:
        """Compute both sums of these rows, the first of which is row ``start`` of the block."""
        num_rows, num_words = rows.shape
        out = slice(start, start + num_rows)
        np.einsum("rc,c->r", rows, self._low_keys[:num_words], out=self._rows[0, out])
        upper = self._upper[:num_rows, :num_words]
        np.right_shift(rows, np.uint64(32), out=upper)
        np.einsum("rc,c->r", upper, self._high_keys[:num_words], out=self._rows[1, out])


def fastest_sums() -> type[Sums]:
    """Return the compiled implementation if it was built here, else numpy's."""
    return NumpySums if compiled_library() is None else CompiledSums


@cache
def compiled_library() -> ctypes.CDLL | None:
    """Return the library built from ``core/_multilinear.c``; None if there is none, or none with the right sums here."""
    library = load_library(ctypes.CDLL, "_multilinear", __package__, "kvferry_digest_sums")
    if library is None:
        return None
    library.kvferry_digest_sums.restype = ctypes.c_uint64
    array = ctypes.c_void_p, ctypes.c_size_t
    library.kvferry_digest_sums.argtypes = [*array, *array, *array, ctypes.c_void_p]
    if not _is_right(library):
        warn_unused("_multilinear", "its results are wrong")
        return None
    return library


def _is_right(library: ctypes.CDLL) -> bool:
    """Compare with numpy: a library that was not rebuilt after a change of this file computes other sums."""
    row_keys, outer_keys, words = (_some_words(shape) for shape in ((2, 16), (2, 3), (41,)))
    compiled, expected, copy = CompiledSums(row_keys, outer_keys, library), NumpySums(row_keys, outer_keys).of(words), words * 0
    return compiled.of(words) == compiled.copy(words, copy) == expected and np.array_equal(words, copy)


def _some_words(shape: tuple[int, ...]) -> Words:
    return np.random.default_rng(1).integers(0, 1 << 64, shape, np.uint64)
