"""Writes pieces of a streamed answer straight to its connection, without waking the task that serves the request.

Owns when that is allowed: the answer has begun, its body is sent in chunks, and the client reads fast enough. Otherwise the
task sends, and waits for the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_STATE_KEY = "kvferry_writer"


class DirectWriter:
    """The body of one answer in progress."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_open(self) -> bool:
        """True if a piece can be written now."""
        cycle = self._cycle
        is_busy = self._flow.write_paused or cycle.disconnected or cycle.response_complete
        return not is_busy and cycle.chunked_encoding is True

    def write(self, piece: bytes) -> None:
        """Write a piece of the body, not empty; only while ``is_open``."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer_writer(cycle: RequestResponseCycle) -> None:
    """Make the writer of an answer known to the application that is about to serve it."""
    state: dict[str, Any] = cycle.scope.setdefault("state", {})
    state[_STATE_KEY] = DirectWriter(cycle)


def writer_of(scope: Scope) -> DirectWriter | None:
    """Return the writer of an answer; None if the server has none."""
    state: Mapping[str, Any] = scope.get("state") or {}
    return state.get(_STATE_KEY)
