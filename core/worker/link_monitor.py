"""What ZeroMQ tells of a link to a router: whether it is connected, and why not.

Owns the socket of its monitor, which is read only when somebody asks, without waiting: ``note_events`` has to be called now and
then, because ZeroMQ's thread waits once the events of many tries to connect are unread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from core.wire.connections import HANDSHAKE_FAILED_EVENTS, GivenUp, is_refusal
from core.wire.sockets import AsyncSocket

SILENT = "it does not answer"
AWAY = "no connection: no router is there, or a firewall or NetworkPolicy is in between"
# A try to connect that fails ends by EVENT_CLOSED.
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED_EVENTS | GivenUp.EVENTS


class LinkMonitor:
    """The monitor of one DEALER; make it before the socket connects, and close it before the socket."""

    def __init__(self, socket: AsyncSocket, *, has_key: bool) -> None:
        self._socket = socket
        self._has_key = has_key
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._is_connected = False  # with a handshake
        self._is_open = False
        self._was_refused = False  # by the last event
        self._refusal = ""
        self._was_connected = False
        self._given_up = GivenUp()
        self._has_given_up = False

    def has_given_up(self) -> bool:
        """Return True if ZeroMQ tries no more. That is known half a second after its last try, from the second call on."""
        self.note_events()
        return self._has_given_up

    def has_broken(self) -> bool:
        """Return True if ZeroMQ tries no more after a connection that was good, as after a damaged frame."""
        return self.has_given_up() and self._was_connected

    def why_unusable(self) -> str:
        """Return why there is no connection, empty if there is one."""
        self.note_events()
        return "" if self._is_connected else self._refusal or (SILENT if self._is_open else AWAY)

    def note_events(self) -> None:
        """Read what ZeroMQ has told since the last call."""
        while self._events.poll(0):
            self._note(parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK)))
        self._has_given_up = self._given_up.look(time.monotonic()) and not self._is_connected
        if self._has_given_up and not self._was_connected:
            self._refusal = self._reason_of_end()

    def _note(self, found: Mapping[str, Any]) -> None:
        """Note one event. With several keys a DEALER has a connection for each, of which all but one are refused for good."""
        kind, was_refused = int(found["event"]), self._was_refused
        self._given_up.note(kind)
        if kind == zmq.EVENT_CONNECT_RETRIED:
            return
        self._is_open = kind in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if kind == zmq.EVENT_CONNECTED:
            return
        self._was_refused = is_refusal(found)
        if self._was_refused:
            self._refusal = self._reason_of_refusal()
            return
        match kind:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected, self._was_connected, self._refusal = True, True, ""
            case zmq.EVENT_CLOSED:
                self._refusal = ""
            case _ if not was_refused:  # else it is the end of a connection that never was
                self._is_connected = False

    def _reason_of_refusal(self) -> str:
        """Return why the router ended a handshake."""
        if self._has_key:
            return "it ended the handshake: most likely it has another cluster key, or no workers connect to that port"
        return "it ended the handshake: no workers connect to that port"

    def _reason_of_end(self) -> str:
        """Return why this side has ended all handshakes: the other one speaks otherwise."""
        if self._has_key:
            return "it has no cluster key, and this worker has one (security.cluster_key), or no workers connect to that port"
        return "it has a cluster key, and this worker has none: set $KVFERRY_CLUSTER_KEY; or no workers connect to that port"

    def close(self) -> None:
        """Stop monitoring. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
