"""What ZeroMQ tells of a link to a router: whether it is connected, and why not.

Owns the socket of its monitor, which is read only when somebody asks, without waiting: ``note_events`` has to be called now and
then, because ZeroMQ's thread waits once the events of many tries to connect are unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from core.wire.key_rotation import is_refusal
from core.wire.sockets import AsyncSocket

SILENT = "it does not answer"
AWAY = "no connection: no router is there, or a firewall or NetworkPolicy is in between"
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED  # a try to connect has failed
)


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
        self._has_given_up = False

    def has_given_up(self) -> bool:
        """Return True if ZeroMQ tries no more, as after a router without a key has met a worker with one, or the reverse."""
        self.note_events()
        return self._has_given_up and not self._is_connected

    def why_unusable(self) -> str:
        """Return why there is no connection, empty if there is one."""
        self.note_events()
        return "" if self._is_connected else self._refusal or (SILENT if self._is_open else AWAY)

    def note_events(self) -> None:
        """Read what ZeroMQ has told since the last call."""
        while self._events.poll(0):
            self._note(parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK)))

    def _note(self, found: Mapping[str, Any]) -> None:
        """Note one event. With several keys a DEALER has a connection for each, of which all but one are refused for good."""
        kind, was_refused = int(found["event"]), self._was_refused
        self._is_open = kind in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if kind == zmq.EVENT_CONNECTED:
            return
        self._was_refused = is_refusal(found)
        if self._was_refused:
            self._refusal = self._reason(int(found["value"]))
            self._has_given_up |= int(found["value"]) == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            return
        match kind:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected, self._refusal = True, ""
            case zmq.EVENT_CLOSED:
                self._refusal = ""
            case _ if not was_refused:  # else it is the end of a connection that never was
                self._is_connected = False

    def _reason(self, error: int) -> str:
        is_of_mechanism = error == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if is_of_mechanism and self._has_key:
            return "it has no cluster key, and this worker has one (security.cluster_key)"
        if is_of_mechanism:
            return "it has a cluster key, and this worker has none: set $KVFERRY_CLUSTER_KEY"
        if self._has_key:
            return "it ended the handshake: most likely it has another cluster key, or no workers connect to that port"
        return "it ended the handshake: no workers connect to that port"

    def close(self) -> None:
        """Stop monitoring. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
