"""A look at a body before it is decoded: how many values it can hold.

Decoding holds the interpreter's lock to its end, so what would take long is refused by what it looks like from outside. Each
value but the first follows a comma or an opening bracket, each key is followed by a colon. Those inside texts count too: a
text with so many is far beyond any model's context.
"""

from __future__ import annotations

import numpy as np

from core.errors import InvalidRequest

_UNCHECKED_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20
_MOST = {",": 500_000, "[": 50_000, "{": 50_000, ":": 50_000}  # some ten milliseconds each


def check_num_values(body: bytes) -> None:
    """Refuse a body of too many values.

    Raises:
        InvalidRequest: names the character that is there too often.
    """
    if len(body) <= _UNCHECKED_BYTES:
        return
    octets = np.frombuffer(body, np.uint8)
    for character, most in _MOST.items():
        wanted = ord(character)
        pieces = range(0, len(octets), _PIECE_BYTES)
        found = sum(int(np.count_nonzero(octets[start : start + _PIECE_BYTES] == wanted)) for start in pieces)
        if found > most:
            raise InvalidRequest(f"the body has {found} times {character!r}, at most {most} are taken: send less at once")
