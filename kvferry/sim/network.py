"""A network of simulated processes with the failures of TCP under ZeroMQ.

Such a link delivers frames in order, late, or not at all, in which case the connection is lost with everything that was under
way on it. Connections are lost by the death of a process, by a cut, and by silence for longer than ZeroMQ's heartbeat (a frozen
process, a partition). Frames of one link are never reordered, frames of different links are, by their delays. ZeroMQ never
repeats a frame, but peers may repeat a message, so frames that ``may_repeat`` accepts sometimes arrive twice in a row.

``Server`` is a bound ROUTER, ``Link`` a connected DEALER: one that reconnects by itself and gets no report of a loss
(the request plane), or one that reports its loss and is closed then (the KV control plane). Knows no messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvferry.sim.loop import EventLoop, Process
from kvferry.sim.troubles import Kind, Troubles

HEARTBEAT_TIMEOUT_S = 5.0  # of ZeroMQ, see core.wire.sockets
RECONNECT_S = 0.05  # the first time, then twice as long each time
RECONNECT_MAX_S = 2.0
HANDSHAKE_TIMEOUT_S = 30.0  # ZMTP's own: a listening process that does not answer
_NOTICE_S = 0.02  # the longest time until an end notices that its connection is gone
_LATE_S = 0.1  # a frame that takes longer counts as a trouble
_FOUND_S = 1.0  # from a new connection, until both ends have heard from each other; delays of frames come on top


@dataclass(slots=True)
class NetworkWeather:
    """The quality of the network. May be changed while it runs; times in seconds."""

    delay_s: float = 0.002  # of a frame, up to
    spike_rate: float = 0.0  # share of frames that take up to ``spike_s``
    spike_s: float = 0.0
    repeat_rate: float = 0.0  # share of repeatable frames that arrive twice
    drop_rate: float = 0.0  # share of a server's frames, of those that may be dropped, that never arrive


class Network:
    """Listening addresses, connections, and pairs of processes that are partitioned."""

    def __init__(
        self,
        loop: EventLoop,
        random: Random,
        weather: NetworkWeather,
        may_repeat: Callable[[bytes], bool],
        troubles: Troubles | None = None,
        may_drop: Callable[[bytes], bool] = lambda frame: False,
    ) -> None:
        self.loop = loop
        self.random = random
        self.weather = weather
        self.may_repeat = may_repeat
        self.may_drop = may_drop
        self.troubles = troubles or Troubles(lambda: loop.now)
        self.num_lost_connections = 0
        self._servers: dict[str, Server] = {}
        self._closed: dict[tuple[str, str], float] = {}  # (from, to) → until when no frame passes
        self._closed_to_reads: dict[frozenset[str], float] = {}
        self._connections: dict[int, Connection] = {}  # live ones, in the order of their creation
        self._num_connections = 0

    def listen(
        self,
        process: Process,
        address: str,
        on_frame: Callable[[bytes, bytes], None],
        on_lost: Callable[[], None] | None = None,
    ) -> Server:
        """Bind an address; ``on_frame`` gets a connection's identity and a frame, ``on_lost`` is called after a loss."""
        server = Server(self, process, on_frame, on_lost)
        self._servers[address] = server
        return server

    def server_at(self, address: str) -> Server | None:
        """Return the server that listens there, None if its process is dead."""
        server = self._servers.get(address)
        return server if server is not None and server.process.is_alive else None

    def new_connection(self, link: Link, server: Server) -> Connection:
        """Connect, under a new identity."""
        self._num_connections += 1
        connection = Connection(self, link, server, b"\x00" + self._num_connections.to_bytes(4, "big"))
        self._connections[self._num_connections] = connection
        return connection

    def cut(self, one: str, other: str) -> int:
        """Break every connection between two processes; return how many there were."""
        found = [connection for connection in self._live() if connection.ends == {one, other}]
        for connection in found:
            connection.lose()
        return len(found)

    def partition(self, one: str, other: str, seconds: float) -> None:
        """Let no frame pass between two processes for a while; connections are lost if it lasts."""
        self.close_way(one, other, seconds)
        self.close_way(other, one, seconds)

    def close_way(self, sender: str, receiver: str, seconds: float) -> None:
        """Let no frame pass from one process to another for a while. Connections are lost by that, too: pings get no answer."""
        way = sender, receiver
        self._closed[way] = max(self._closed.get(way, 0.0), self.loop.now + seconds)
        if seconds >= HEARTBEAT_TIMEOUT_S:
            self.loop.call_later(HEARTBEAT_TIMEOUT_S, lambda: self._lose_partitioned(sender, receiver))

    def close_to_reads(self, one: str, other: str, seconds: float) -> None:
        """Let no reads pass between two processes for a while; messages do."""
        self._closed_to_reads[frozenset((one, other))] = self.loop.now + seconds

    def way_open_in(self, sender: str, receiver: str) -> float:
        """Return in how many seconds frames can pass from one process to another; 0 = now."""
        return max(0.0, self._closed.get((sender, receiver), 0.0) - self.loop.now)

    def open_in(self, one: str, other: str) -> float:
        """Return in how many seconds frames can pass between two processes in both directions; 0 = now."""
        return max(self.way_open_in(one, other), self.way_open_in(other, one))

    def reads_open_in(self, one: str, other: str) -> float:
        """Return in how many seconds one of two processes can read the other's memory over the network; 0 = now."""
        closed_s = self._closed_to_reads.get(frozenset((one, other)), 0.0) - self.loop.now
        return max(closed_s, self.open_in(one, other))

    def note_freeze(self, process: Process, seconds: float) -> None:
        """Let the peers of a process that will be silent for this long lose it."""
        if seconds >= HEARTBEAT_TIMEOUT_S:
            self.loop.call_later(HEARTBEAT_TIMEOUT_S, lambda: self._lose_frozen(process))

    def note_unconnected(self, pair: tuple[str, str], delay_s: float) -> None:
        """Record that two processes remain unconnected until the next attempt, which comes so much later."""
        weather = self.weather
        self.troubles.note(Kind.PARTED, pair, delay_s + _FOUND_S + 2 * (weather.delay_s + weather.spike_s))

    def delay_s(self) -> float:
        """Return how long a frame takes."""
        weather = self.weather
        if weather.spike_rate and self.random.random() < weather.spike_rate:
            return self.random.uniform(weather.delay_s, weather.spike_s)
        return self.random.uniform(0.0, weather.delay_s)

    def _lose_partitioned(self, sender: str, receiver: str) -> None:
        if self.way_open_in(sender, receiver):
            for connection in self._live():
                if connection.ends == {sender, receiver}:
                    connection.lose()

    def _lose_frozen(self, process: Process) -> None:
        if process.is_frozen and process.is_alive:
            for connection in self._live():
                if process.name in connection.ends:
                    connection.lose()

    def _live(self) -> list[Connection]:
        self._connections = {number: found for number, found in self._connections.items() if not found.is_lost}
        return list(self._connections.values())


class Connection:
    """One TCP connection between a link and a server."""

    def __init__(self, network: Network, link: Link, server: Server, identity: bytes) -> None:
        self.identity = identity
        self.ends = frozenset((link.process.name, server.process.name))
        self.is_lost = False
        self._network = network
        self._link = link
        self._server = server
        self._to_server = _Direction(network, self, link.process, server.process, lambda frame: server.take(self, frame))
        self._to_link = _Direction(network, self, server.process, link.process, lambda frame: link.take(self, frame))
        link.process.on_death(self.lose)
        server.process.on_death(self.lose)

    def to_server(self, frame: bytes) -> None:
        """Send a frame of the link."""
        self._to_server.send(frame)

    def to_link(self, frame: bytes) -> None:
        """Send a frame of the server; some are dropped if its queue is full."""
        network = self._network
        rate = network.weather.drop_rate
        if rate and network.may_drop(frame) and network.random.random() < rate:
            network.troubles.note(Kind.DROPPED, self.ends, 0.0)
            return
        self._to_link.send(frame)

    def lose(self) -> None:
        """Lose the connection: frames under way are lost, and both ends notice it, each in its time."""
        if self.is_lost:
            return
        self.is_lost = True
        network = self._network
        network.num_lost_connections += 1
        for process, tell in (
            (self._server.process, lambda: self._server.forget(self)),
            (self._link.process, lambda: self._link.notice_loss(self)),
        ):
            process.call_later(network.random.uniform(0.0, _NOTICE_S), tell)

    def lose_when_quiet(self) -> None:
        """Lose the connection after the frames under way to the server."""
        delay_s = self._to_server.last_arrival - self._network.loop.now
        self._network.loop.call_later(delay_s, self.lose)


class _Direction:
    """The frames under way in one direction of a connection, in order."""

    def __init__(
        self, network: Network, connection: Connection, sender: Process, receiver: Process, take: Callable[[bytes], None]
    ) -> None:
        self.last_arrival = 0.0
        self._network = network
        self._connection = connection
        self._sender = sender
        self._receiver = receiver
        self._take = take
        self._frames: deque[tuple[float, bytes]] = deque()  # with the earliest arrival of each

    def send(self, frame: bytes) -> None:
        """Send a frame after the earlier ones."""
        network = self._network
        loop, weather = network.loop, network.weather
        num_copies = 1
        if weather.repeat_rate and network.may_repeat(frame):
            num_copies += network.random.random() < weather.repeat_rate
        for _ in range(num_copies):
            self.last_arrival = max(self.last_arrival, loop.now + network.delay_s())
            if self.last_arrival - loop.now > _LATE_S:
                network.troubles.note(Kind.LATE, self._connection.ends, self.last_arrival - loop.now)
            self._frames.append((self.last_arrival, frame))
            loop.call_later(self.last_arrival - loop.now, lambda: self._deliver(loop))

    def _deliver(self, loop: EventLoop) -> None:
        """Deliver the frames that have arrived; hold them while the two processes are partitioned."""
        if self._connection.is_lost:
            self._frames.clear()
            return
        closed_s = self._network.way_open_in(self._sender.name, self._receiver.name)
        if closed_s:
            loop.call_later(closed_s, lambda: self._deliver(loop))
            return
        while self._frames and self._frames[0][0] <= loop.now:
            _, frame = self._frames.popleft()
            self._receiver.call_later(0.0, lambda frame=frame: self._take(frame))  # type: ignore[misc]


class Server:
    """A bound ROUTER: it receives frames with the identity of their connection, and sends to one."""

    def __init__(
        self,
        network: Network,
        process: Process,
        on_frame: Callable[[bytes, bytes], None],
        on_lost: Callable[[], None] | None,
    ) -> None:
        self.process = process
        self._network = network
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._connections: dict[bytes, Connection] = {}

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Queue a frame; False if the connection is known to be gone (EHOSTUNREACH)."""
        connection = self._connections.get(identity)
        if connection is None:
            return False
        if not connection.is_lost:
            connection.to_link(frame)
        return True

    def accept(self, connection: Connection) -> None:
        """Take a new connection."""
        self._connections[connection.identity] = connection

    def forget(self, connection: Connection) -> None:
        """Notice that a connection is gone. ZeroMQ reports that one is, not which."""
        if self._connections.pop(connection.identity, None) is not None and self._on_lost is not None:
            self._on_lost()

    def take(self, connection: Connection, frame: bytes) -> None:
        """Read a frame. It counts even if its connection has been lost since the frame reached this machine."""
        self._on_frame(connection.identity, frame)


class Link:
    """A connected DEALER.

    With ``on_lost`` it queues while it connects, reports its loss once, and cannot be used afterwards; the caller opens
    another. Without, it reconnects by itself, and drops the frames sent meanwhile.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        address: str,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.process = process
        self.num_dropped = 0
        self._network = network
        self._address = address
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._queue: deque[bytes] = deque()
        self._is_closed = False
        self._num_attempts = 0
        delay_s = network.delay_s()
        server = network.server_at(address)
        if delay_s > _LATE_S and server is not None:
            network.troubles.note(Kind.LATE, [process.name, server.process.name], delay_s)
        process.call_later(delay_s, self._connect)
        if on_lost is not None:
            process.call_later(HANDSHAKE_TIMEOUT_S, self._give_up)

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False if it is dropped."""
        if self._connection is not None:
            if not self._connection.is_lost:
                self._connection.to_server(frame)
            return True
        if self._on_lost is not None and not self._is_closed:
            self._queue.append(frame)
            return True
        self.num_dropped += 1
        return False

    def close(self) -> None:
        """Close silently. Frames sent just before may or may not have left. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.clear()
            connection, self._connection = self._connection, None
            if connection is not None and self._network.random.random() < 0.5:
                connection.lose()  # linger is 0: frames that have not left are lost
            elif connection is not None:
                connection.lose_when_quiet()

    def take(self, connection: Connection, frame: bytes) -> None:
        """Read a frame."""
        if connection is self._connection and not self._is_closed:
            self._on_frame(frame)

    def notice_loss(self, connection: Connection) -> None:
        """Notice that the connection is gone."""
        if connection is not self._connection or self._is_closed:
            return
        self._connection = None
        if self._on_lost is None:
            self._connect_later()
        else:
            self._report_loss()

    def _connect_later(self) -> float:
        """Plan the next attempt; return in how many seconds it comes."""
        least_s = min(RECONNECT_MAX_S, RECONNECT_S * 2**self._num_attempts)
        self._num_attempts += 1
        delay_s = self._network.random.uniform(least_s, 1.5 * least_s)
        self.process.call_later(delay_s, self._connect)
        return delay_s

    def _connect(self) -> None:
        if self._is_closed or self._connection is not None:
            return
        server = self._network.server_at(self._address)
        if server is None and self._on_lost is not None:
            self._report_loss()  # connection refused
            return
        if server is None:
            self._connect_later()
            return
        if server.process.is_frozen or self._network.open_in(*self._pair(server)):
            self._network.note_unconnected(self._pair(server), self._connect_later())
            return
        self._num_attempts = 0
        self._connection = self._network.new_connection(self, server)
        server.accept(self._connection)
        while self._queue:
            self._connection.to_server(self._queue.popleft())

    def _give_up(self) -> None:
        if self._connection is None and not self._is_closed:
            self._report_loss()

    def _report_loss(self) -> None:
        self._is_closed = True
        assert self._on_lost is not None
        self._on_lost()

    def _pair(self, server: Server) -> tuple[str, str]:
        return self.process.name, server.process.name
