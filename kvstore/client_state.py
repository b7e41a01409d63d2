"""The client's side of the protocol: the connection to a store and the session with it.

Owns the session, the mapping of the store's arena, and the times of heartbeats and greetings; ``kvstore.client_calls`` owns the
calls. Does no I/O and never waits: it queues actions, which a driver (``kvstore.client``, ``kvstore.embedded``, the simulation)
carries out. Time is passed as an argument. Not thread-safe; the driver has a lock.

    DOWN -> GREETING -> (MAPPING -> ATTACHING ->) UP        from everywhere back to DOWN, and all open calls are misses

If the store does not answer, open calls end at their deadlines; once the connection is lost, new calls are misses at once. A
restarted store has another incarnation and does not know the session: the client forgets its pins and opens a new session.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from core.ids import IdSource
from core.wire.version import RetryBackoff
from kvstore import messages
from kvstore.arena import ArenaView
from kvstore.base import StoreStatistics
from kvstore.client_actions import ClientAction, ClientOptions, MapArena, SendToStore
from kvstore.client_calls import ClientCalls
from kvstore.messages import Parcel, ToClient, ToStore


class ConnectionState(Enum):
    """The state of the connection to the store."""

    DOWN = auto()
    GREETING = auto()
    MAPPING = auto()
    ATTACHING = auto()
    UP = auto()


class ClientState:
    """Talks to one store through all its incarnations."""

    def __init__(self, options: ClientOptions, ids: IdSource) -> None:
        self._options = options
        self._ids = ids
        self.state = ConnectionState.DOWN
        self._session = 0
        self._is_unreachable = True
        self._other_version = RetryBackoff()
        self._incarnation = 0
        self._mapped: ArenaView | None = None  # while attaching
        self._last_heard = 0.0
        self._next_beat = 0.0
        self._actions: list[ClientAction] = []
        self._num_restarts_noticed = 0
        self.calls = ClientCalls(options, self._emit)

    def take_actions(self) -> list[ClientAction]:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def say_goodbye(self) -> None:
        """End the session; all open calls are misses. No copy may be under way."""
        if self.state is ConnectionState.UP:
            self._send(messages.StoreGoodbye())
        self._lose("closed")

    def on_parcel(self, message: ToClient, blocks: Sequence[memoryview | bytes], now: float) -> None:
        """Process one message of the store. An answer to a call that has ended is ignored."""
        self._last_heard = now
        self._other_version.end()
        match message:
            case messages.Welcome():
                self._on_welcome(message)
            case messages.Attached():
                if self.state is ConnectionState.ATTACHING:
                    self._go_up(self._mapped)
            case messages.UnknownClient():
                if self.state is not ConnectionState.GREETING:
                    self._lose("restarted")
                    self._greet(now)
            case messages.AttachRefused():
                self._on_refused(message, now)
            case messages.LookupReply() | messages.GetReply() | messages.Reserved() | messages.PutReply():
                self.calls.on_reply(message, blocks, now)
            case messages.Alive():
                pass

    def on_mapped(self, arena: ArenaView | None) -> None:
        """Set the mapped arena; None if it cannot be mapped here, so that blocks come as frames."""
        if self.state is not ConnectionState.MAPPING:
            return
        if arena is None or self._options.process is None:
            self._go_up(None)
            return
        self._mapped = arena
        self.state = ConnectionState.ATTACHING
        pid, start_ticks = self._options.process
        self._send(messages.Attach(nonce=arena.nonce, pid=pid, start_ticks=start_ticks))

    @property
    def waits_for_link(self) -> bool:
        """Whether the driver should call ``on_link_up`` as soon as messages can be sent."""
        return self.state is ConnectionState.DOWN and self._is_unreachable

    def on_link_lost(self, now: float) -> None:
        """Handle a lost connection."""
        self._lose("unreachable")
        self._is_unreachable = True
        self._next_beat = now + self._options.heartbeat_interval_s

    @property
    def is_other_version(self) -> bool:
        """Whether the store speaks another wire version, as far as is known."""
        return self._other_version.is_active

    def on_other_version(self, now: float) -> bool:
        """Back off from a store of another wire version. Returns True if this was not known before."""
        self._lose("other_version")
        is_news = self._other_version.start()
        if is_news:
            self._next_beat = now + self._other_version.next_delay_s()
        return is_news

    def on_link_up(self, now: float) -> None:
        """Greet the store at once, since a connection is up."""
        if self.waits_for_link:
            self._greet(now)

    def on_timer(self, now: float) -> None:
        """End calls at their deadlines, detect a silent store, and greet a lost one again."""
        self.calls.end_late(now)
        is_silent = now - self._last_heard >= self._options.heartbeat_interval_s + self._options.request_timeout_s
        if self.state is not ConnectionState.DOWN and is_silent:
            self._lose("silent")
        if now < self._next_beat:
            return
        self._next_beat = now + self._options.heartbeat_interval_s
        if self.state is ConnectionState.UP:
            self.calls.send_heartbeat()
        elif self.state is ConnectionState.DOWN:
            self._greet(now)

    def next_timer(self) -> float:
        """Return the time by which ``on_timer`` must be called."""
        return min(self._next_beat, self.calls.next_deadline())

    def statistics(self) -> StoreStatistics:
        """Return the counts so far."""
        restarts = self._num_restarts_noticed
        return StoreStatistics(**self.calls.counts, restarts_noticed=restarts, rejected=dict(self.calls.rejected))

    def _greet(self, now: float) -> None:
        self._session = self._ids.bits(64)
        self.state = ConnectionState.GREETING
        self._is_unreachable = False
        self._last_heard = now
        is_other = self._other_version.is_active
        self._next_beat = now + (self._other_version.next_delay_s() if is_other else self._options.heartbeat_interval_s)
        hello = messages.Hello(client_id=self._options.client_id, session=self._session, block_bytes=self._options.block_bytes)
        self._send(hello)

    def _on_welcome(self, message: messages.Welcome) -> None:
        if self.state is not ConnectionState.GREETING or message.session != self._session:
            return
        if self._incarnation not in (0, message.incarnation):
            self._num_restarts_noticed += 1
        self._incarnation = message.incarnation
        if message.arena is None or self._options.process is None:
            self._go_up(None)
            return
        self.state = ConnectionState.MAPPING
        self._emit(MapArena(message.arena, message.incarnation))

    def _on_refused(self, message: messages.AttachRefused, now: float) -> None:
        if self.calls.refuse(message.number, message.code):
            return
        if self.state is ConnectionState.GREETING:
            self._lose("refused")  # and try again by the timer: the link is up
            self._next_beat = now + self._options.heartbeat_interval_s
        elif self.state is ConnectionState.ATTACHING:
            self._go_up(None)

    def _lose(self, failure: str) -> None:
        self.state = ConnectionState.DOWN
        self._mapped = None
        self.calls.disconnect(failure)

    def _go_up(self, arena: ArenaView | None) -> None:
        self.state = ConnectionState.UP
        self._mapped = None
        self.calls.connect(arena)

    def _send(self, message: ToStore) -> None:
        self._emit(SendToStore(Parcel(message)))

    def _emit(self, action: ClientAction) -> None:
        self._actions.append(action)
