"""The chain of the hashes of consecutive blocks without extra keys, by compiled C.

``core/_hash_chain.c`` is built when kvferry is installed, if there is a C compiler; otherwise there is no compiled chain, and
``core.kv.hashing``, which defines the hashes, computes them with hashlib, more slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from functools import cache

from core.compiled import load_library, warn_unused

HASH_BYTES = 16

_PERSON_BYTES = 16
_STATE_BYTES = 64
_NO_EXTRA = bytes(4)


class CompiledChain:
    """The chain of one key. Holds the interpreter's lock while it computes: 10,000 tokens take about 0.1 ms.

    ``key`` has 1 to 64 bytes and ``person``, the domain, at most 16.
    """

    def __init__(self, key: bytes, person: bytes, library: ctypes.PyDLL | None = None) -> None:
        library = library or compiled_library()
        assert library is not None, "the caller has looked"
        state = ctypes.create_string_buffer(_STATE_BYTES)
        library.kvferry_hash_chain_start(key, len(key), person.ljust(_PERSON_BYTES, b"\0"), state)
        self._function, self._keyed = library.kvferry_hash_chain, state.raw

    def hashes(self, parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
        """Return the hash of each whole block of ``tokens``, little-endian int32; ``parent`` is the hash before the first."""
        num_blocks = len(tokens) // block_bytes
        values = ctypes.create_string_buffer(num_blocks * HASH_BYTES)
        self._function(self._keyed, parent, tokens, block_bytes, num_blocks, values)
        # Not ``struct.unpack``, which keeps the last formats: there is one for each length of a prompt.
        return list(struct.Struct(f"{HASH_BYTES}s" * num_blocks).unpack(values))


@cache
def compiled_library() -> ctypes.PyDLL | None:
    """Return the library built from ``core/_hash_chain.c``; None if there is none, or none with the right hashes here."""
    library = load_library(ctypes.PyDLL, "_hash_chain", __package__, "kvferry_hash_chain_start", "kvferry_hash_chain")
    if library is None:
        return None
    start, function = library.kvferry_hash_chain_start, library.kvferry_hash_chain
    text, size = ctypes.c_char_p, ctypes.c_size_t
    start.restype = function.restype = None
    start.argtypes = [text, size, text, text]
    function.argtypes = [text, text, text, size, size, text]
    if not _is_right(library):
        warn_unused("_hash_chain", "its results are wrong")
        return None
    return library


def _is_right(library: ctypes.PyDLL) -> bool:
    """Compare with hashlib: a library that was not rebuilt after a change of its file computes other hashes."""
    key, person, tokens = b"key", b"person", bytes(range(200)) * 2
    parent, expected = bytes(range(HASH_BYTES)), []
    for start in (0, len(tokens) // 2):
        text = parent + _NO_EXTRA + tokens[start : start + len(tokens) // 2]
        parent = hashlib.blake2b(text, digest_size=HASH_BYTES, key=key, person=person).digest()
        expected.append(parent)
    return CompiledChain(key, person, library).hashes(bytes(range(HASH_BYTES)), tokens, len(tokens) // 2) == expected
