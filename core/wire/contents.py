"""The report of a worker about its prefix cache, by which routers know what it holds."""

from __future__ import annotations

from typing import Annotated

import msgspec

from core.wire.limits import Count, Name, Unsigned64

KEY_BYTES = 8  # of a block's hash: enough to choose a worker, which compares whole hashes itself
MAX_KEYS = 8_192  # of one report: a router takes it in within some 20 ms, between other messages

Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * KEY_BYTES)]  # one after another


class ContentReport(msgspec.Struct, frozen=True, kw_only=True, tag="cont", omit_defaults=True):
    """Blocks that became hits, and those that are none any more, since the report before; a snapshot replaces all of them.

    ``number`` counts this router's reports from 0 at its ``Registered``; a report with another number than the next one shows
    that one is lost.
    """

    engine_id: Name
    incarnation: Unsigned64
    number: Count
    is_snapshot: bool = False
    stored: Keys = b""
    removed: Keys = b""

    def __post_init__(self) -> None:
        """Raises: ValueError for keys that are not whole."""
        if len(self.stored) % KEY_BYTES or len(self.removed) % KEY_BYTES:
            raise ValueError(f"stored or removed is no whole number of keys of {KEY_BYTES} bytes")
