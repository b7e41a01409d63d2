"""What the monitors of ZeroMQ's sockets tell of connections, and what they do not tell.

Owns the events that may be asked for, and two conclusions that take several: that ZeroMQ tries no more, and that a connection
ended before its handshake.

``EVENT_HANDSHAKE_FAILED_PROTOCOL`` is none of those events. libzmq 4.3.5 sends it for every frame that it cannot decrypt, and
sending it overwrites the ``errno`` that says so. The engine then takes the frame for one that has to wait: the connection stays
and is deaf. If its other end closes before the next heartbeat, libzmq aborts the process ("Assertion failed: !_io_error",
stream_engine_base.cpp). Without the event such a frame ends the connection at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zmq

HANDSHAKE_FAILED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# The connection has ended, or none was made.
LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED_EVENTS

ANNOUNCED_WITHIN_S = 0.5  # ZeroMQ announces the next try to connect in the moment in which it gives up the last one
_HANDSHAKE_LIMIT_S = 60.0  # twice what ZeroMQ gives a handshake: an older connection has had one


def is_refusal(monitor_event: Mapping[str, Any]) -> bool:
    """Return True if a monitor's message reports a handshake that the other side ended, as one with another key does."""
    return bool(int(monitor_event["event"]) & HANDSHAKE_FAILED_EVENTS)


class GivenUp:
    """Whether ZeroMQ tries no more to connect a DEALER: so it does after an error of the protocol.

    That is a damaged or an oversized frame, or a peer that has a key where this side has none, or the reverse. No event says
    so, but each further try is announced. The monitor must ask for ``EVENTS``. Times are seconds of one clock.
    """

    EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED

    def __init__(self) -> None:
        self._num_ends = 0  # that no announcement has followed
        self._since: float | None = None  # when that was first seen

    @property
    def is_possible(self) -> bool:
        """True while an announcement is awaited."""
        return self._num_ends > 0

    def note(self, event: int) -> None:
        """Note an event of the monitor; others than ``EVENTS`` are ignored."""
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self._num_ends += 1
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._num_ends = max(0, self._num_ends - 1)

    def look(self, now: float) -> bool:
        """Return True if ZeroMQ tries no more. It takes two looks; all events should have been noted before each."""
        if not self._num_ends:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= ANNOUNCED_WITHIN_S


class Handshakes:
    """Counts the connections of a ROUTER that end before their handshake: those of strangers.

    No event names the connection whose handshake has succeeded. One that ends is taken for a stranger if any young connection
    has had no handshake: it may be another one's, but the number is right. Times are seconds of one clock.
    """

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

    def __init__(self) -> None:
        self._accepted_at: dict[int, float] = {}  # of open connections, by file descriptor
        self._num_unfinished = 0

    def note(self, monitor_event: Mapping[str, Any], now: float) -> bool:
        """Note an event of the monitor; return True if it is the end of a connection that had no handshake."""
        event, descriptor = int(monitor_event["event"]), int(monitor_event["value"])
        if event == zmq.EVENT_ACCEPTED:
            self._accepted_at[descriptor] = now
            self._num_unfinished += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_unfinished = max(0, self._num_unfinished - 1)
        return event == zmq.EVENT_DISCONNECTED and self._end(descriptor, now)

    def _end(self, descriptor: int, now: float) -> bool:
        accepted_at = self._accepted_at.pop(descriptor, None)
        if not self._num_unfinished or accepted_at is None or now > accepted_at + _HANDSHAKE_LIMIT_S:
            return False
        self._num_unfinished -= 1
        return True
