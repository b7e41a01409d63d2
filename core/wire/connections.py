"""What the monitors of ZeroMQ's sockets tell of connections, and what they do not tell.

Owns the events that may be asked for, and two conclusions that take several: that ZeroMQ tries no more, and that a connection
ended before its handshake.

``EVENT_HANDSHAKE_FAILED_PROTOCOL`` is none of those events. libzmq 4.3.5 sends it for every frame that it cannot decrypt, and
sending it overwrites the ``errno`` that says so. The engine then takes the frame for one that has to wait: the connection stays
and is deaf. If its other end closes before the next heartbeat, libzmq aborts the process ("Assertion failed: !_io_error",
stream_engine_base.cpp). Without the event such a frame ends the connection at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import zmq

from core.wire.sockets import AnySocket

HANDSHAKE_FAILED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# The connection has ended, or none was made.
LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED_EVENTS

ANNOUNCED_WITHIN_S = 0.5  # ZeroMQ announces the next try to connect in the moment in which it gives up the last one
_AWAY_S = 10.0
_MAX_UNREAD = 100_000  # events of a monitor, of some 100 bytes each
_numbers = itertools.count()
_HANDSHAKE_LIMIT_S = 60.0  # twice what ZeroMQ gives a handshake: an older connection has had one


def is_refusal(monitor_event: Mapping[str, Any]) -> bool:
    """Return True if a monitor's message reports a handshake that the other side ended, as one with another key does."""
    return bool(int(monitor_event["event"]) & HANDSHAKE_FAILED_EVENTS)


def monitor_of(target: AnySocket, events: int) -> AnySocket:
    """Return a socket that receives a socket's events. Stop them by ``target.monitor(None, 0)`` before it is closed.

    It keeps very many of them: ZeroMQ's thread reports an event by a blocking send, under a lock that stopping takes, too.
    """
    address = f"inproc://monitor-{id(target):x}-{next(_numbers)}"
    target.monitor(address, events)
    found: AnySocket = target.context.socket(zmq.PAIR)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
    found.connect(address)
    return found


class ClientConnections:
    """The connections of a DEALER, one for each key: whether one is good, and whether ZeroMQ goes on trying.

    It does not after an error of the protocol: a damaged or an oversized frame, or a peer that has a key where this side has
    none, or the reverse. No event says so, but each further try is announced. Nor does one say which connection has had its
    handshake: one of those that were open then. The monitor must ask for ``EVENTS``. Times are seconds of one clock.

    With several keys an announcement of another connection may hide the end of the good one: one that does not come back is
    taken for given up, too.
    """

    EVENTS = (
        zmq.EVENT_CONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_CLOSED  # a try to connect has failed
        | zmq.EVENT_CONNECT_RETRIED
    )

    def __init__(self) -> None:
        self._open: set[int] = set()  # file descriptors
        self._maybe_good: set[int] = set()
        self._num_ends = 0  # that no announcement has followed
        self._since: float | None = None  # when that was first seen
        self.was_good = False  # at any time
        self._away_since: float | None = None  # when that was first seen not to be so any more

    @property
    def is_good(self) -> bool:
        """True from a handshake on until its connection ends."""
        return bool(self._maybe_good)

    @property
    def may_have_given_up(self) -> bool:
        """True while no connection is good and an announcement is awaited."""
        return self._num_ends > 0 and not self._maybe_good

    def note(self, monitor_event: Mapping[str, Any]) -> None:
        """Note an event of the monitor; others than ``EVENTS`` are ignored."""
        event, descriptor = int(monitor_event["event"]), int(monitor_event["value"])
        match event:
            case zmq.EVENT_CONNECTED:
                self._open.add(descriptor)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._maybe_good = set(self._open)
                self.was_good = True
            case zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                self._maybe_good.discard(descriptor)
                self._num_ends += 1
            case zmq.EVENT_CLOSED:
                self._num_ends += 1
            case zmq.EVENT_CONNECT_RETRIED:
                self._num_ends = max(0, self._num_ends - 1)

    def has_given_up(self, now: float) -> bool:
        """Return True if no connection is good and one is tried no more. It takes two calls, ``ANNOUNCED_WITHIN_S`` apart.

        All events should have been noted before each.
        """
        self._since = _first_seen(self.may_have_given_up, self._since, now)
        self._away_since = _first_seen(self.was_good and not self.is_good, self._away_since, now)
        has_ended = self._since is not None and now - self._since >= ANNOUNCED_WITHIN_S
        return has_ended or (self._away_since is not None and now - self._away_since >= _AWAY_S)


def _first_seen(is_so: bool, before: float | None, now: float) -> float | None:
    return (now if before is None else before) if is_so else None


class ServerConnections:
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
