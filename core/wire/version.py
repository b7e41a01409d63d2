"""The one frame that every wire version understands: the refusal of a frame of another version.

A frame of another version cannot be decoded, so the answer to it must not depend on a version either. Its bytes are frozen::

    offset 0   00              no wire version has this number
           1   4B 46 56 52     "KFVR"
           5   version         that the sender speaks, 1 to 255
           6   version         of the frame that it refuses

Readers ignore the bytes after byte 6. Only the side that binds a socket sends it, at most once per peer and interval; a refusal
is never answered. The side that connects backs off. So two versions exchange a bounded number of frames, whichever is newer.
"""

from __future__ import annotations

from collections.abc import Hashable

from core.errors import VersionMismatch
from core.rate_limit import RateLimit

REFUSAL_INTERVAL_S = 5.0  # per peer
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0

_MAGIC = b"\x00KFVR"
_REFUSAL_BYTES = len(_MAGIC) + 2


def encode_refusal(spoken: int, refused: int) -> bytes:
    """Return the refusal of a frame of version ``refused`` by a process that speaks ``spoken``."""
    return _MAGIC + bytes((spoken, refused))


def check_version(frame: bytes | memoryview, spoken: int) -> None:
    """Check that a frame, which has a byte at least, is of the version that this process speaks.

    Raises:
        VersionMismatch: it is of another version, or the refusal of a frame of ours.
    """
    if frame[0] == spoken:
        return
    head = bytes(frame[:_REFUSAL_BYTES])
    if len(head) == _REFUSAL_BYTES and head.startswith(_MAGIC):
        raise VersionMismatch(ours=spoken, theirs=head[-2], is_refusal=True)
    raise VersionMismatch(ours=spoken, theirs=frame[0])


class VersionRefuser:
    """Answers frames of other versions, for the side that binds a socket."""

    def __init__(self, interval_s: float = REFUSAL_INTERVAL_S) -> None:
        self._limit = RateLimit(interval_s)

    def answer(self, peer: Hashable, error: VersionMismatch, now: float) -> bytes | None:
        """Return the refusal to send, None if this frame is not answered: it is a refusal itself, or exceeds the rate."""
        if error.is_refusal or self._limit.admit(peer, now) is None:
            return None
        return encode_refusal(error.ours, error.theirs)


class RetryBackoff:
    """When the connecting side retries a peer of another version: after ``FIRST_RETRY_S``, doubling to ``MAX_RETRY_S``."""

    def __init__(self) -> None:
        self.is_active = False
        self._next_s = FIRST_RETRY_S

    def start(self) -> bool:
        """The peer speaks another version; returns True if this was not known."""
        is_news, self.is_active = not self.is_active, True
        return is_news

    def next_delay_s(self) -> float:
        """Return the delay after the present try."""
        delay_s, self._next_s = self._next_s, min(MAX_RETRY_S, 2 * self._next_s)
        return delay_s

    def end(self) -> bool:
        """The peer has sent a frame in our version; returns True if it did not before."""
        was_active, self.is_active = self.is_active, False
        self._next_s = FIRST_RETRY_S
        return was_active
