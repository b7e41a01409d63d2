"""What ZeroMQ tells of a link to a router: whether it is connected, and why not.

Owns the socket of its monitor, which is read only when somebody asks, without waiting: ``note_events`` has to be called now and
then, because events add up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from core.wire.connections import HANDSHAKE_FAILED_EVENTS, ClientConnections, is_refusal, monitor_of
from core.wire.sockets import AsyncSocket

SILENT = "it does not answer"
AWAY = "no connection: no router is there, or a firewall or NetworkPolicy is in between"


class LinkMonitor:
    """The monitor of one DEALER; make it before the socket connects, and close it before the socket."""

    def __init__(self, socket: AsyncSocket, *, has_key: bool) -> None:
        self._socket = socket
        self._has_key = has_key
        self._monitor = monitor_of(socket, ClientConnections.EVENTS | HANDSHAKE_FAILED_EVENTS)
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._connections = ClientConnections()
        self._is_open = False  # by the last event
        self._refusal = ""
        self._has_given_up = False

    def has_given_up(self) -> bool:
        """Return True if ZeroMQ tries no more. That is known half a second after its last try, from the second call on."""
        self.note_events()
        return self._has_given_up

    def has_broken(self) -> bool:
        """Return True if ZeroMQ tries no more after a connection that was good, as after a damaged frame."""
        return self.has_given_up() and self._connections.was_good

    def why_unusable(self) -> str:
        """Return why there is no connection, empty if there is one."""
        self.note_events()
        return "" if self._connections.is_good else self._refusal or (SILENT if self._is_open else AWAY)

    def note_events(self) -> None:
        """Read what ZeroMQ has told since the last call."""
        while self._events.poll(0):
            self._note(parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK)))
        self._has_given_up = self._connections.has_given_up(time.monotonic())
        if self._has_given_up and not self._connections.was_good:
            self._refusal = self._reason_of_end()

    def _note(self, found: Mapping[str, Any]) -> None:
        """Note one event. With several keys a DEALER has a connection for each, of which all but one are refused for good."""
        kind = int(found["event"])
        self._connections.note(found)
        if kind == zmq.EVENT_CONNECT_RETRIED:
            return
        self._is_open = kind in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if is_refusal(found):
            self._refusal = self._reason_of_refusal()
        elif kind in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CLOSED):
            self._refusal = ""

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
            self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
