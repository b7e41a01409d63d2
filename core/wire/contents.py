"""The report of a worker about its prefix cache, by which routers know what it holds."""

from __future__ import annotations

from typing import Annotated

import msgspec

from core.wire.limits import Count, Name, Text, Unsigned64

KEY_BYTES = 8  # of a block's hash: enough to choose a worker, which compares whole hashes itself
MAX_KEYS = 8_192  # of one report: a router takes it in within some 20 ms, between other messages

Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * KEY_BYTES)]  # one after another


DEVICE, HOST, STORE = "device", "host", "store"  # where a block is: the worker's pool, its host memory, a store


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the sets of blocks that a worker reports. Routers ignore those of a medium that they do not know.

    Of a hybrid model each kind of layer has a part. A prefix is a hit if every part of the pool holds what the next token
    attends to: all blocks, or with a ``window`` those of the last ``window - 1`` tokens, or if it ``is_chunked`` those since
    the last multiple of ``window`` tokens.
    """

    medium: Text = DEVICE
    window: Count = 0
    is_chunked: bool = False
    connector: Text = ""  # that loads blocks of a tier into the pool
    num_blocks: Count = 0  # the most keys that it holds; 0 = as many as the pool has blocks
    store: Text = ""  # workers whose parts name the same store hold its blocks together; empty = the worker's own


class ContentReport(msgspec.Struct, frozen=True, kw_only=True, tag="cont", omit_defaults=True):
    """Blocks that became hits, and those that are none any more, since the report before; a snapshot replaces all of them.

    ``number`` counts this router's reports from 0 at its ``Registered``; a report with another number than the next one shows
    that one is lost. ``part`` is the place of the part in the worker's registration; a snapshot replaces all parts.
    """

    engine_id: Name
    incarnation: Unsigned64
    number: Count
    part: Count = 0
    is_snapshot: bool = False
    stored: Keys = b""
    removed: Keys = b""

    def __post_init__(self) -> None:
        """Raises: ValueError for keys that are not whole."""
        if len(self.stored) % KEY_BYTES or len(self.removed) % KEY_BYTES:
            raise ValueError(f"stored or removed is no whole number of keys of {KEY_BYTES} bytes")
