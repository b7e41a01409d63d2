"""The producer's half of the tcp transport: answers the requests for chunks of this process's regions.

Owns the ROUTER socket, the format of requests and answers, and their order. Frames point into the pool (no copy in this
process), so ZeroMQ's thread reads long rows when it writes them to the network, some time after their request. Short rows,
the seals, are packed: all of a chunk in one frame, since a frame costs more than copying them. They are read only after
ZeroMQ has released everything that was sent to the same consumer before. So a consumer may request blocks and their seals
together: the seals describe the blocks as they were after their bytes had left.

Knows nothing of a consumer except which of its answers are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq

from connectors.p2p.transport.base import RowShape, check_rows, region_at, shapes_of
from connectors.p2p.transport.frames import MAX_CHUNK_ROWS, content_of, is_packed
from connectors.p2p.transport.interface import RowRegion
from connectors.pool_access import PoolAccess
from core.errors import ConfigError, ConnectorUnavailable, ProtocolError
from core.ids import IdSource
from core.struct_types import prepared
from core.wire.curve import ClusterKeys, secure_server
from core.wire.limits import Text
from core.wire.sockets import CLOSE_LINGER_MS, advertised_host, binds_ipv6, join_tcp, split_tcp, warn_if_exposed

FORMAT_VERSION = 3
MAX_REQUEST_BYTES = 64 << 10
REQUESTS_PER_POLL = 16
MAX_HELD_BACK = 1024  # requests for short rows, of one consumer
HELD_BACK_WAITS_S = (0.0001, 0.005)  # between checks whether they can be answered, which nothing announces: first, longest
PATIENT_LOOKS = 20  # after so many checks in vain the wait is twice the first, and so on
SOCKET_BUFFER_BYTES = 4 << 20
MAX_UNTAKEN_MS = 60_000  # that a consumer takes no byte of what is sent: its host is gone, or it reads nothing any more
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, MAX_KEEPALIVES = 60, 15, 4  # nothing else shows that an idle connection is dead


@prepared
class TcpMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer tells its consumers."""

    address: Text
    token: int
    shapes: tuple[RowShape, ...]


@prepared
class ChunkRequest(msgspec.Struct, frozen=True, array_like=True):
    """Consumer → producer: send these rows, one frame each or, if they are short, all in one."""

    version: int
    token: int
    chunk_id: int
    region: int
    rows: tuple[int, ...]


@prepared
class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Producer → consumer: first frame of an answer. ``refusal`` is empty if the rows follow."""

    version: int
    chunk_id: int
    refusal: str = ""


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Have the kernel probe the idle connections of a data socket. To be called before it binds or connects."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, MAX_KEEPALIVES)


class _HeldBack(NamedTuple):
    """A request for short rows, and the answers that were under way to its consumer when it arrived."""

    request: ChunkRequest
    sending: Sequence[zmq.MessageTracker]


class TcpServer:
    """Serves regions at ``bind_address``, a ZeroMQ endpoint (port 0 = any).

    Raises:
        ConfigError: the address is not one that consumers can connect to.
        ConnectorUnavailable: the address cannot be bound.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], bind_address: str, advertise_host: str, keys: ClusterKeys | None
    ) -> None:
        self._regions: tuple[RowRegion, ...] = ()
        self._access: tuple[PoolAccess, ...] = ()
        self._token = 0
        self._sending: dict[bytes, list[zmq.MessageTracker]] = {}
        self._held_back: dict[bytes, deque[_HeldBack]] = {}  # by consumer, in order
        self._num_looks = 0  # checks in vain
        self.num_bad_requests = 0
        self.num_dropped_answers = 0
        self._request_decoder = msgspec.msgpack.Decoder(ChunkRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = CLOSE_LINGER_MS
        self.socket.ipv6 = binds_ipv6(bind_address)
        self.socket.maxmsgsize = MAX_REQUEST_BYTES
        secure_server(self.socket, keys)
        self.socket.router_mandatory = True  # a consumer that does not take its answers gets EAGAIN instead of more memory
        self.socket.sndbuf = SOCKET_BUFFER_BYTES
        # By the kernel, which sees each byte arrive: a heartbeat's answer could wait a long time behind data on a slow network.
        self.socket.setsockopt(zmq.TCP_MAXRT, MAX_UNTAKEN_MS)
        keep_alive(self.socket)
        try:
            self._address = self._bind(bind_address, advertise_host)
        except (ConfigError, ConnectorUnavailable):
            self.socket.close()
            raise
        if keys is None:
            endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            warn_if_exposed("worker.control_address", endpoint)  # its host is also the data socket's

    def serve(self, regions: Sequence[RowRegion], access: Sequence[PoolAccess], ids: IdSource) -> TcpMetadata:
        """Answer for these regions from now on, and return the metadata for consumers."""
        self._regions, self._access = tuple(regions), tuple(access)
        self._token = ids.bits(63)
        return TcpMetadata(address=self._address, token=self._token, shapes=shapes_of(self._regions))

    def poll(self) -> None:
        """Answer the requests whose turn has come."""
        self._answer_held_back()
        for _ in range(REQUESTS_PER_POLL):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def max_wait_s(self) -> float | None:
        """Requests announce themselves; the end of a send does not."""
        first_s, longest_s = HELD_BACK_WAITS_S
        return min(longest_s, first_s * (1 + self._num_looks // PATIENT_LOOKS)) if self._held_back else None

    def close(self) -> None:
        """Serve no more."""
        self.socket.close(linger=CLOSE_LINGER_MS)
        self._regions, self._access = (), ()
        self._held_back.clear()
        self._sending.clear()

    def _bind(self, bind_address: str, advertise_host: str) -> str:
        """Bind, and return the address for consumers."""
        try:
            self.socket.bind(bind_address)
        except zmq.ZMQError as error:
            raise ConnectorUnavailable(f"tcp transport: cannot bind {bind_address}: {error}") from None
        host, port = split_tcp(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return join_tcp(advertised_host(host, advertise_host), port)

    def _take(self, frames: list[bytes]) -> None:
        try:
            consumer, body = frames
            request = self._request_decoder.decode(body)
        except (ValueError, RecursionError, OverflowError):  # msgspec's errors are ValueErrors
            self.num_bad_requests += 1  # it cannot be answered without a chunk id
            return
        try:
            region = self._check(request)
        except ProtocolError as error:
            self._refuse(consumer, request, error.message)
            return
        sending = self._sending_to(consumer) if is_packed(region.row_bytes) else []
        if sending or (is_packed(region.row_bytes) and consumer in self._held_back):
            self._hold_back(consumer, _HeldBack(request, sending))
        else:
            self._answer(consumer, request)

    def _hold_back(self, consumer: bytes, held: _HeldBack) -> None:
        """Answer later, after the requests that are held back already."""
        waiting = self._held_back.setdefault(consumer, deque())
        if len(waiting) >= MAX_HELD_BACK:
            self._refuse(consumer, held.request, f"{MAX_HELD_BACK} requests for short rows wait for what was asked before them")
            return
        waiting.append(held)
        self._num_looks = 0

    def _answer_held_back(self) -> None:
        """Answer held-back requests after all earlier answers have been sent; check less and less often while none can be."""
        if not self._held_back:
            return
        self._num_looks += 1
        for consumer, waiting in list(self._held_back.items()):
            while waiting and all(tracker.done for tracker in waiting[0].sending):
                self._answer(consumer, waiting.popleft().request)
                self._num_looks = 0
            if not waiting:
                del self._held_back[consumer]

    def _answer(self, consumer: bytes, request: ChunkRequest) -> None:
        rows = content_of(self._access[request.region], request.rows)
        if is_packed(self._regions[request.region].row_bytes):
            rows = [b"".join(rows)]
        tracker = self._send(consumer, ChunkHeader(FORMAT_VERSION, request.chunk_id), rows)
        if tracker is not None and not tracker.done:
            self._sending[consumer] = [*(each for each in self._sending.get(consumer, ()) if not each.done), tracker]

    def _refuse(self, consumer: bytes, request: ChunkRequest, reason: str) -> None:
        self.num_bad_requests += 1
        self._send(consumer, ChunkHeader(FORMAT_VERSION, request.chunk_id, reason), [])

    def _send(self, consumer: bytes, header: ChunkHeader, rows: Sequence[memoryview | bytes]) -> zmq.MessageTracker | None:
        """Send an answer; return a tracker that is done when ZeroMQ has released its last frame, and so all before it."""
        try:
            return self.socket.send_multipart(
                [consumer, self._encoder.encode(header), *rows], zmq.NOBLOCK, copy=False, track=True
            )
        except zmq.ZMQError:
            self.num_dropped_answers += 1  # the consumer is gone, or takes nothing: its deadline ends the read
            return None

    def _sending_to(self, consumer: bytes) -> list[zmq.MessageTracker]:
        """Return the answers to a consumer that ZeroMQ still holds; forget other consumers that have received everything."""
        self._sending = {
            other: left
            for other, trackers in self._sending.items()
            if (left := [tracker for tracker in trackers if not tracker.done])
        }
        return list(self._sending.get(consumer, ()))

    def _check(self, request: ChunkRequest) -> RowRegion:
        """Return the region of the requested rows.

        Raises:
            ProtocolError: the request cannot be answered; the message says why.
        """
        if request.version != FORMAT_VERSION:
            raise ProtocolError(f"format {request.version} of data requests is not spoken here, only {FORMAT_VERSION}")
        if request.token != self._token:
            raise ProtocolError("the request is for another incarnation")
        if len(request.rows) > MAX_CHUNK_ROWS:
            raise ProtocolError(f"a chunk of {len(request.rows)} rows exceeds the cap of {MAX_CHUNK_ROWS}")
        region = region_at(self._regions, request.region)
        check_rows(request.rows, region.num_rows, "requested")
        return region
