"""Bounds the number of values in a JSON body before it is decoded.

Decoding holds the interpreter's lock until it ends, so a count of separators refuses bodies that would take too long.
Every value except the first follows a comma or an opening bracket, and a colon follows each key. Characters inside strings do
not count, because a string is one value of any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequest

_UNCHECKED_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20
_MOST = {",": 600_000, "[": 50_000, "{": 50_000, ":": 50_000}  # about ten milliseconds each
_QUOTE, _BACKSLASH = b'"\\'

_Octets = npt.NDArray[np.uint8]


def check_num_values(body: bytes) -> None:
    """Refuse a body of too many values.

    Raises:
        InvalidRequest: names the character that occurs too often.
    """
    if len(body) <= _UNCHECKED_BYTES:
        return
    suspects = [character for character, most in _MOST.items() if _num_occurrences(body, character) > most]
    if not suspects:
        return
    for found in separators_outside_texts(body, suspects):
        for character, num_found in found.items():
            if num_found > _MOST[character]:
                raise InvalidRequest(
                    f"the body has more than {_MOST[character]} times {character!r} outside of strings, the most taken: "
                    "send less at once"
                )


def separators_outside_texts(
    body: bytes, characters: Sequence[str] = tuple(_MOST), piece_bytes: int = _PIECE_BYTES
) -> Iterator[dict[str, int]]:
    """Count the separators of values; yield the counts so far after each piece of ``piece_bytes``, which bounds the memory."""
    found, texts = dict.fromkeys(characters, 0), _Texts()
    for piece in _pieces(body, piece_bytes):
        is_outside = texts.are_outside(piece)
        for character in characters:
            found[character] += int(np.count_nonzero((piece == ord(character)) & is_outside))
        yield found


def _num_occurrences(body: bytes, character: str) -> int:
    """Count a character, in strings and outside."""
    return sum(int(np.count_nonzero(piece == ord(character))) for piece in _pieces(body, _PIECE_BYTES))


def _pieces(body: bytes, piece_bytes: int) -> Iterator[_Octets]:
    octets = np.frombuffer(body, np.uint8)
    return (octets[start : start + piece_bytes] for start in range(0, len(octets), piece_bytes))


class _Texts:
    """Finds the strings of a body, piece by piece."""

    def __init__(self) -> None:
        self._is_open = False  # a string reaches beyond the last piece
        self._is_escaping = False  # the last piece ends with a backslash that escapes what follows

    def are_outside(self, piece: _Octets) -> npt.NDArray[np.bool_]:
        """Return which octets are in no string; a string begins with its first quotation mark and ends before its last."""
        is_end = piece == _QUOTE
        is_backslash = piece == _BACKSLASH
        if self._is_escaping:
            is_end[0] = is_backslash[0] = False
        self._is_escaping = False
        if is_backslash.any():
            # A backslash escapes the next octet unless it is escaped itself: "the last one does" < "this is a backslash".
            escapes = np.less.accumulate(is_backslash)
            is_end[1:] &= ~escapes[:-1]
            self._is_escaping = bool(escapes[-1])
        is_end[0] ^= self._is_open
        is_inside = np.logical_xor.accumulate(is_end)
        self._is_open = bool(is_inside[-1])
        return ~is_inside
