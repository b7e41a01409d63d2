"""The digest of a block's bytes, which its seal contains and a reader computes from the bytes that have arrived.

Owns the definition and two ways to compute it: over host memory (with ``core.multilinear``), and with torch, on any device and
several blocks at a time. Both give the same 64 bits in every process. Finds corruption, not forgery: the keys are no secret.
Producers compute it when a block is sealed, consumers when its bytes have arrived.

A multilinear hash in two levels over the little-endian 64-bit words of the block, all arithmetic modulo 2**64:

    words   | w00 w01 ... w0C |      C = 512; the last row may be shorter
            | w10 w11 ...     |
    row     y[r] = sum over c of  a[c] * w[r,c]  +  b[c] * (w[r,c] >> 32)
    digest  = k * num_bytes  +  sum over r of  A[r] * y[r]  +  B[r] * (y[r] >> 32)

Two different blocks of one size collide with a probability of at most 2**-32 over the choice of the keys, for any
difference; most differences, one odd word among them is enough, with about 2**-60. Multiplied by a random key, a difference
that is 2**t times something odd is spread over the multiples of 2**t only, so upper bits of words count for little: two flipped
sign bits would cancel each other every second time. Hence the second term, in which the upper half of a word is a number below
2**32: one of the two differences is never a multiple of 2**32. Each level thus errs with at most 2**-33.

Sources: D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014 (multilinear); G. Steele, D. Lea and
C. Flood, "Fast splittable pseudorandom number generators", 2014 (the key stream).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core.multilinear import Sums, Words, fastest_sums

if TYPE_CHECKING:
    import torch

WORD_BYTES = 8
ROW_WORDS = 512  # so that the keys of a row stay in the first-level cache
SCRATCH_BYTES = 64 << 20  # of blocks at a time on a device; the intermediate results take three times as much

_MASK = (1 << 64) - 1
_HALF = 0xFFFF_FFFF
_STREAM = 0x6B76_6665_7272_7931  # the start of the key stream: "kvferry1"


class BlockDigester:
    """Digests of blocks of one size in host memory. Holds scratch memory, so each thread needs one of its own.

    ``sums`` computes the sums; None = the fastest implementation here.
    Raises: ValueError for blocks that are not a whole number of words.
    """

    def __init__(self, block_bytes: int, sums: type[Sums] | None = None) -> None:
        self.block_bytes = block_bytes
        self._sums = (sums or fastest_sums())(_row_keys(), _outer_keys(_num_rows(block_bytes)))
        self._length_term = _length_term(block_bytes)

    def digest(self, block: memoryview | npt.NDArray[np.uint8]) -> int:
        """Return the digest of a block: ``block_bytes`` contiguous bytes.

        Raises: ValueError for another size.
        """
        return (self._sums.of(self._words_of(block)) + self._length_term) & _MASK

    def copy(self, block: memoryview | npt.NDArray[np.uint8], target: memoryview | npt.NDArray[np.uint8]) -> int:
        """Copy a block and return the digest of the copy, whatever another process does to the block meanwhile.

        Both are ``block_bytes`` contiguous bytes and do not overlap.
        Raises: ValueError for another size, or a target that is read-only.
        """
        words = self._words_of(target)
        if not words.flags.writeable:
            raise ValueError("the target is read-only")
        return (self._sums.copy(self._words_of(block), words) + self._length_term) & _MASK

    def _words_of(self, block: memoryview | npt.NDArray[np.uint8]) -> Words:
        words = np.frombuffer(block, dtype="<u8")
        if words.nbytes != self.block_bytes:
            raise ValueError(f"a block of {words.nbytes} bytes, not {self.block_bytes}")
        return words


class TensorDigester:
    """Digests of the blocks of a tensor in the memory of any device. Holds the keys there, so each device needs one of its own.

    ``words`` [num_blocks, num_words] or [num_blocks, num_planes, num_words] int64 is the pool, in any strides. Work is
    submitted to the stream that is current at the call.
    Raises: ValueError for blocks without words.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        num_words = words[0].numel()
        self._split = num_words // ROW_WORDS * ROW_WORDS
        self._inner = words.new_tensor(_row_keys().view(np.int64))
        self._outer = words.new_tensor(_outer_keys(_num_rows(num_words * WORD_BYTES)).view(np.int64))
        self._length_term = _length_term(num_words * WORD_BYTES)
        self._max_blocks = max(1, SCRATCH_BYTES // (num_words * WORD_BYTES))

    def digests(self, block_ids: Sequence[int]) -> list[int]:
        """Return the digests of blocks, after computing them and copying them to the host; in parts that fit scratch memory."""
        found: list[int] = []
        for start in range(0, len(block_ids), self._max_blocks):
            chosen = self._words.new_tensor(block_ids[start : start + self._max_blocks])
            found += self._digest(self._words.index_select(0, chosen).flatten(1))
        return found

    def _digest(self, words: torch.Tensor) -> list[int]:
        num_blocks, num_words = words.shape
        rows = _multilinear(words[:, : self._split].reshape(num_blocks, -1, ROW_WORDS), self._inner)
        if self._split < num_words:
            tail = words[:, None, self._split :]
            rows = _concatenated(rows, _multilinear(tail, self._inner[:, : tail.shape[2]]))
        sums: list[int] = _multilinear(rows, self._outer).tolist()
        return [(value + self._length_term) & _MASK for value in sums]


def _multilinear(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Reduce the last dimension. ``keys`` [2, n]: for whole words, and for their upper halves."""
    upper = (words >> 32) & _HALF  # the shift of a signed number extends its sign
    return (words * keys[0]).sum(-1) + (upper * keys[1]).sum(-1)


def _concatenated(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return [num_blocks, n + 1] of [num_blocks, n] and [num_blocks, 1]."""
    both = first.new_empty((first.shape[0], first.shape[1] + second.shape[1]))
    both[:, : first.shape[1]] = first
    both[:, first.shape[1] :] = second
    return both


def _num_rows(block_bytes: int) -> int:
    if block_bytes <= 0 or block_bytes % WORD_BYTES:
        raise ValueError(f"a digest is made of whole words of {WORD_BYTES} bytes, not of {block_bytes} bytes")
    return -(-block_bytes // (ROW_WORDS * WORD_BYTES))


def _row_keys() -> Words:
    """Return the keys of a row, [2, ROW_WORDS]: for its words, and for their upper halves."""
    return _key_stream(1, 2 * ROW_WORDS).reshape(2, ROW_WORDS)


def _outer_keys(num_rows: int) -> Words:
    """Return the keys of the rows, [2, num_rows]. A row's keys do not depend on the number of rows."""
    keys = _key_stream(1 + 2 * ROW_WORDS, 2 * num_rows)
    return np.ascontiguousarray(keys.reshape(num_rows, 2).T)


def _length_term(num_bytes: int) -> int:
    return int(_key_stream(0, 1)[0]) * num_bytes & _MASK


def _key_stream(start: int, count: int) -> Words:
    """Return keys ``start`` to ``start + count - 1`` of the infinite stream: SplitMix64 of their numbers."""
    z = (np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    z += np.uint64(_STREAM)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))
