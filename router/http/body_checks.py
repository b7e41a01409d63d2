"""Bounds the number of values in a JSON body before it is decoded.

Decoding holds the interpreter's lock until it ends, so a count of separators refuses bodies that would take too long.
Every value except the first follows a comma or an opening bracket, and a colon follows each key. Characters inside strings do
not count, because a string is one value of any length.
"""

from __future__ import annotations

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
    found = separators_outside_texts(body)
    for character, most in _MOST.items():
        if found[character] > most:
            raise InvalidRequest(
                f"the body has {found[character]} times {character!r}, at most {most} are taken: send less at once"
            )


def separators_outside_texts(body: bytes, piece_bytes: int = _PIECE_BYTES) -> dict[str, int]:
    """Count the separators of values. The body is read in pieces of ``piece_bytes``, which bounds the memory used."""
    found = dict.fromkeys(_MOST, 0)
    octets, texts = np.frombuffer(body, np.uint8), _Texts()
    for start in range(0, len(octets), piece_bytes):
        piece = octets[start : start + piece_bytes]
        ends = texts.ends_in(piece)
        for character in _MOST:
            positions = np.flatnonzero(piece == ord(character))
            # After an even number of quotation marks no string is open.
            found[character] += int(np.count_nonzero((np.searchsorted(ends, positions) + texts.num_before) % 2 == 0))
        texts.num_before += len(ends)
    return found


class _Texts:
    """Finds where the strings of a body begin and end, piece by piece."""

    def __init__(self) -> None:
        self.num_before = 0  # quotation marks in earlier pieces
        self._num_backslashes = 0  # consecutive ones at the end of the last piece

    def ends_in(self, piece: _Octets) -> npt.NDArray[np.intp]:
        """Return the positions of the quotation marks that are not escaped by a backslash."""
        quotes = np.flatnonzero(piece == _QUOTE)
        is_other = piece != _BACKSLASH
        if self._num_backslashes == 0 and is_other.all():
            return quotes
        last_other = np.maximum.accumulate(np.where(is_other, np.arange(len(piece)), -1))
        before = np.where(quotes > 0, last_other[quotes - 1], -1)  # the last character before the mark that is no backslash
        num_backslashes = quotes - 1 - before + np.where(before < 0, self._num_backslashes, 0)
        in_a_row = len(piece) - 1 - int(last_other[-1])
        self._num_backslashes = in_a_row + (self._num_backslashes if in_a_row == len(piece) else 0)
        unescaped: npt.NDArray[np.intp] = quotes[num_backslashes % 2 == 0]
        return unescaped
