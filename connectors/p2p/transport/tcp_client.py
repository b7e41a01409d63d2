"""Reads over ZeroMQ frames: works between any two hosts that can open a TCP connection.

The producer answers chunk requests (``connectors.p2p.transport.tcp_server``). The consumer opens one DEALER per peer, keeps a
window of requests in flight and receives every frame straight into its row. A pool on a device is copied through pinned
memory on either side. A connection is never re-established: a broken one is reported as lost, and whoever opens the peer again
gets another DEALER. So closing it is an exact fence.

Both ends check everything: rows are bounds-checked by the producer, frame sizes by the consumer, and a request names the
incarnation's token, so that a process that took over the address answers nothing from its own pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from connectors.p2p.transport.base import RowShape, check_read, decode_metadata, landing_of, region_at
from connectors.p2p.transport.frames import MAX_CHUNK_ROWS, access_to, discard_frames, max_frame_bytes, take_rows
from connectors.p2p.transport.interface import POOL_REGION, PeerId, ReadResult, RowRegion, Transport
from connectors.p2p.transport.tcp_server import (
    FORMAT_VERSION,
    SOCKET_BUFFER_BYTES,
    ChunkHeader,
    ChunkRequest,
    TcpMetadata,
    TcpServer,
    keep_alive,
)
from connectors.pool_access import PoolAccess
from core.errors import KVFerryError, PeerUnreachable, ProtocolError, TransferError
from core.ids import IdSource
from core.wire.connections import LOST_EVENTS, is_refusal, monitor_of
from core.wire.contexts import started_context
from core.wire.curve import ClusterKeys, secure_client
from core.wire.key_rotation import next_keys
from core.wire.sockets import never_reconnect

CHUNK_BYTES = 4 << 20
WINDOW_BYTES = 16 << 20  # requested and not received yet, per peer
WINDOW_CHUNKS = 256  # in addition; a producer drops answers that it cannot queue, and it queues SNDHWM = 1000 for a consumer
MAX_HEADER_BYTES = 4 << 10
CHUNKS_PER_POLL = 4
MAX_QUEUED_ANSWERS = 1024  # a producer that sends more than was requested waits on its own side


@dataclass(slots=True)
class _Chunk:
    """Rows of one request, and where they go."""

    handle: int
    region: int
    remote_rows: tuple[int, ...]
    local_rows: tuple[int, ...]
    num_bytes: int


@dataclass(slots=True)
class _Read:
    peer_id: PeerId
    num_chunks_left: int


@dataclass(slots=True)
class _Peer:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    address: str
    keys: ClusterKeys | None  # that the socket was made with
    token: int
    shapes: tuple[RowShape, ...]
    landing: tuple[RowRegion, ...]  # regions in which its rows land
    access: tuple[PoolAccess, ...]  # and the access to each
    waiting: deque[_Chunk] = field(default_factory=deque)
    in_flight: dict[int, _Chunk] = field(default_factory=dict)
    in_flight_bytes: int = 0
    bytes_received: int = 0
    lost: str = ""  # why nothing can be read any more


class TcpTransport(Transport):
    """Reads rows by asking their producer for them, with a window of chunks in flight.

    ``bind_address`` is a ZeroMQ endpoint (port 0 = any); ``advertise_host`` replaces its host in the address for peers. With
    ``keys`` connections are encrypted, and only holders of them can read. Each transport has a context of its own, so that its
    I/O thread ends with it.
    """

    name = "tcp"
    reads_in_order = True

    def __init__(self, ids: IdSource, bind_address: str, advertise_host: str = "", keys: ClusterKeys | None = None) -> None:
        self._ids = ids
        self._keys = keys
        self._bind_address = bind_address
        self._advertise_host = advertise_host
        self._context: zmq.Context[zmq.Socket[bytes]] = started_context(zmq.Context)
        self._regions: tuple[RowRegion, ...] = ()
        self._access: tuple[PoolAccess, ...] = ()
        self._staging: RowRegion | None = None
        self._server: TcpServer | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._ended: list[ReadResult] = []
        self._lost: list[PeerId] = []
        self._last_id = 0
        self._header_decoder = msgspec.msgpack.Decoder(ChunkHeader)
        self._encoder = msgspec.msgpack.Encoder()

    def counts(self) -> dict[str, int]:
        """Return the number of malformed or surplus requests, and of answers that could not be sent."""
        server = self._server
        return {
            "bad_data_requests": server.num_bad_requests if server is not None else 0,
            "dropped_data_answers": server.num_dropped_answers if server is not None else 0,
        }

    def unavailable_reason(self) -> str | None:
        """ZeroMQ is always there."""
        return None

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Take host memory, and device memory that can be copied."""
        self._access = tuple(map(access_to, regions))
        self._regions = tuple(regions)
        self._staging = staging

    def describe(self) -> bytes:
        """Bind the data socket, once."""
        if self._server is None:
            self._server = TcpServer(self._context, self._bind_address, self._advertise_host, self._keys)
            self._metadata = self._server.serve(self._regions, self._access, self._ids)
        return msgspec.msgpack.encode(self._metadata)

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Start to connect. A refused connection ends the reads that wait for it."""
        producer = decode_metadata(metadata, TcpMetadata, self.name)
        landing = landing_of(self._regions, self._staging, producer.shapes)
        if peer in self._peers:
            return
        socket, monitor = self._connect(producer.address, producer.shapes, self._keys)
        access = tuple(
            ours if region is mine else access_to(region)
            for region, mine, ours in zip(landing, self._regions, self._access, strict=True)
        )
        self._peers[peer] = _Peer(
            socket, monitor, producer.address, self._keys, producer.token, producer.shapes, landing, access
        )

    def _connect(
        self, address: str, shapes: Sequence[RowShape], keys: ClusterKeys | None
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return a socket that connects to a producer, and its monitor."""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = True  # in addition to IPv4
        socket.sndhwm = 0  # the window bounds it
        socket.rcvhwm = MAX_QUEUED_ANSWERS
        never_reconnect(socket)
        socket.rcvbuf = SOCKET_BUFFER_BYTES
        keep_alive(socket)
        socket.maxmsgsize = max([MAX_HEADER_BYTES, *(max_frame_bytes(shape.row_bytes) for shape in shapes)])
        secure_client(socket, keys)
        monitor = monitor_of(socket, LOST_EVENTS)
        try:
            socket.connect(address)
        except (zmq.ZMQError, ValueError) as error:
            _close_connection(socket, monitor)
            raise ProtocolError(f"the peer's data address {address!r} is unusable: {error}") from None
        return socket, monitor

    def pool_shape(self, peer: PeerId) -> tuple[int, int] | None:
        """Return the shape in its metadata."""
        shape = self._peers[peer].shapes[POOL_REGION]
        return shape.num_rows, shape.row_bytes

    def bytes_received(self, peer: PeerId) -> int | None:
        """Count answers as a whole: at most 4 MiB of rows each."""
        return self._peers[peer].bytes_received if peer in self._peers else None

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Cut the read into chunks and send as many requests as the window allows."""
        producer = self._peers.get(peer)
        if producer is None or producer.lost:
            raise PeerUnreachable(producer.lost if producer else f"no data connection to {peer.address}")
        local = region_at(producer.landing, region)
        check_read(producer.shapes[region], local, remote_rows, local_rows)
        step = min(MAX_CHUNK_ROWS, max(1, CHUNK_BYTES // local.row_bytes))
        starts = range(0, len(remote_rows), step)
        handle = self._next_id()
        self._reads[handle] = _Read(peer, len(starts))
        for start in starts:
            rows = tuple(remote_rows[start : start + step])
            chunk = _Chunk(handle, region, rows, tuple(local_rows[start : start + step]), len(rows) * local.row_bytes)
            producer.waiting.append(chunk)
        self._fill_window(producer)
        return handle

    def poll(self) -> list[ReadResult]:
        """Answer requests, receive chunks, notice lost connections."""
        if self._server is not None:
            self._server.poll()
        for peer_id, peer in list(self._peers.items()):
            self._receive(peer)
            news = None if peer.lost else _next_event(peer.monitor)
            if news is None:
                continue
            if is_refusal(news) and next_keys(peer.keys) is not None:
                self._try_next_key(peer)
            else:
                while self._receive_chunk(peer):
                    pass  # answers that arrived before the loss come first; they may complete reads
                self._lose(peer_id, f"the data connection to {peer_id.address} was lost")
                self._lost.append(peer_id)
        ended, self._ended = self._ended, []
        return ended

    def take_lost_peers(self) -> Sequence[PeerId]:
        """Return the peers whose connections have ended."""
        lost, self._lost = self._lost, []
        return lost

    def _try_next_key(self, peer: _Peer) -> None:
        """Connect again with the next key that the producer may hold, and repeat the requests."""
        _close_connection(peer.socket, peer.monitor)
        peer.keys = next_keys(peer.keys)
        peer.socket, peer.monitor = self._connect(peer.address, peer.shapes, peer.keys)
        peer.waiting.extendleft(reversed(peer.in_flight.values()))
        peer.in_flight.clear()
        peer.in_flight_bytes = 0
        self._fill_window(peer)

    def cancel(self, handle: int) -> None:
        """Forget the read: frames that still arrive for it are discarded, not written."""
        read = self._reads.get(handle)
        if read is None:
            return
        peer = self._peers[read.peer_id]
        peer.waiting = deque(chunk for chunk in peer.waiting if chunk.handle != handle)
        self._end(handle, TransferError("the read was cancelled"))

    def remove_peer(self, peer: PeerId) -> None:
        """Close the connection."""
        if peer in self._peers:
            self._lose(peer, f"{peer.address} was removed")
            gone = self._peers.pop(peer)
            _close_connection(gone.socket, gone.monitor)
            self._lost = [other for other in self._lost if other != peer]

    def pollables(self) -> Sequence[zmq.Socket[bytes] | int]:
        """The data socket, the connections and their monitors."""
        sockets: list[zmq.Socket[bytes] | int] = [] if self._server is None else [self._server.socket]
        for peer in self._peers.values():
            if not peer.lost:
                sockets += [peer.socket, peer.monitor]
        return sockets

    def max_wait_s(self) -> float | None:
        """Sockets announce everything, except results that ended outside ``poll`` and answers that the producer holds back."""
        if self._ended:
            return 0.0
        return self._server.max_wait_s() if self._server is not None else None

    def close(self) -> None:
        """Close all sockets and end the I/O thread."""
        for peer in list(self._peers):
            self.remove_peer(peer)
        if self._server is not None:
            self._server.close()
            self._server = None
        self._context.destroy(linger=0)
        self._staging = None
        self._regions = ()

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _fill_window(self, peer: _Peer) -> None:
        while peer.waiting and _fits_window(peer, peer.waiting[0]):
            chunk = peer.waiting[0]
            chunk_id = self._next_id()
            request = ChunkRequest(FORMAT_VERSION, peer.token, chunk_id, chunk.region, chunk.remote_rows)
            try:
                peer.socket.send(self._encoder.encode(request), zmq.NOBLOCK)
            except zmq.Again:
                return  # the connection is gone; the monitor will report it
            peer.waiting.popleft()
            peer.in_flight[chunk_id] = chunk
            peer.in_flight_bytes += chunk.num_bytes

    def _receive(self, peer: _Peer) -> None:
        """Receive some chunks, until a read has ended: the next ones belong to another read."""
        num_ended = len(self._ended)
        for _ in range(CHUNKS_PER_POLL):
            if len(self._ended) > num_ended or not self._receive_chunk(peer):
                return

    def _receive_chunk(self, peer: _Peer) -> bool:
        """Receive the next answer; False if none has arrived, or its read has ended."""
        if peer.lost:
            return False
        try:
            header_frame = peer.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._take_answer(peer, header_frame)
        self._fill_window(peer)
        return True

    def _take_answer(self, peer: _Peer, header_frame: bytes) -> None:
        try:
            header = self._header_decoder.decode(header_frame)
            chunk = peer.in_flight.pop(header.chunk_id)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError, KeyError):
            discard_frames(peer.socket)
            return
        peer.in_flight_bytes -= chunk.num_bytes
        peer.bytes_received += chunk.num_bytes
        read = self._reads.get(chunk.handle)
        if read is None:  # cancelled, or failed by an earlier chunk
            discard_frames(peer.socket)
            return
        try:
            if header.refusal:
                raise ProtocolError(f"{read.peer_id.address} refused a read: {header.refusal}")
            take_rows(peer.socket, chunk.local_rows, peer.landing[chunk.region].row_bytes, peer.access[chunk.region])
        except ProtocolError as error:
            discard_frames(peer.socket)
            peer.waiting = deque(other for other in peer.waiting if other.handle != chunk.handle)
            self._end(chunk.handle, error)
            return
        read.num_chunks_left -= 1
        if not read.num_chunks_left:
            self._end(chunk.handle, None)

    def _lose(self, peer_id: PeerId, reason: str) -> None:
        """End all reads of a peer; nothing is received from it any more."""
        peer = self._peers[peer_id]
        peer.lost = reason
        peer.waiting.clear()
        peer.in_flight.clear()
        for handle in [handle for handle, read in self._reads.items() if read.peer_id == peer_id]:
            self._end(handle, PeerUnreachable(reason))

    def _end(self, handle: int, error: KVFerryError | None) -> None:
        del self._reads[handle]
        self._ended.append(ReadResult(handle, error))


def _fits_window(peer: _Peer, chunk: _Chunk) -> bool:
    """Return True if a chunk may be requested now; a single one always may."""
    if not peer.in_flight:
        return True
    return len(peer.in_flight) < WINDOW_CHUNKS and peer.in_flight_bytes + chunk.num_bytes <= WINDOW_BYTES


def _next_event(monitor: zmq.Socket[bytes]) -> dict[str, Any] | None:
    """Return the monitor's next message, which is one of ``LOST_EVENTS``; None if there is none."""
    try:
        return dict(recv_monitor_message(monitor, zmq.NOBLOCK))
    except zmq.Again:
        return None


def _close_connection(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close a connection and its monitor, in an order that cannot hang.

    ZeroMQ's thread reports events by a blocking send, under the lock that ``monitor`` takes: if the reading end is closed
    first, as by pyzmq's ``disable_monitor``, an event in between blocks both forever.
    """
    socket.monitor(None, 0)
    monitor.close(linger=0)
    socket.close(linger=0)
