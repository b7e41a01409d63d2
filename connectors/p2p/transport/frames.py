"""Rows of a pool as ZeroMQ frames, on both ends of a connection, for pools in host or device memory.

Owns the rule which rows are packed into one frame, and the way from a socket into the rows. Rows in host memory are sent from
their place and received into their place. Rows on a device are copied to pinned memory before they are sent, and from pinned
memory after they have arrived; no copy continues after a call returns, so a read that has ended writes nothing more. Knows no
requests and no peers.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from connectors.p2p.transport.interface import RowRegion
from connectors.pool_access import DevicePoolAccess, HostPoolAccess, PoolAccess
from core.errors import ConnectorUnavailable, ProtocolError

MAX_CHUNK_ROWS = 1024
MAX_PACKED_ROW_BYTES = 1024  # longer rows get a frame each


def is_packed(row_bytes: int) -> bool:
    """Say whether rows of this size share a frame."""
    return row_bytes <= MAX_PACKED_ROW_BYTES


def access_to(region: RowRegion) -> PoolAccess:
    """Return the way to a region's rows.

    Raises:
        ConnectorUnavailable: it is on a device, and there is no copier for its rows.
    """
    if region.buffer is not None:
        buffer = region.buffer.cast("B") if region.buffer.format != "B" else region.buffer
        return HostPoolAccess(buffer, region.row_bytes)
    if region.new_copier is None:
        raise ConnectorUnavailable(f"tcp transport: the memory is on {region.device}, and nothing copies it to the host")
    return DevicePoolAccess(region.new_copier())


def content_of(access: PoolAccess, rows: Sequence[int]) -> Sequence[memoryview | bytes]:
    """Return the bytes of rows, stable until they are sent: views of the rows in host memory, else copies."""
    if access.is_direct:
        return access.read(rows)
    starts = range(0, len(rows), access.max_reads)
    return [bytes(view) for start in starts for view in access.read(rows[start : start + access.max_reads])]


def take_rows(socket: zmq.Socket[bytes], rows: Sequence[int], row_bytes: int, target: PoolAccess) -> None:
    """Receive the frames of an answer into these rows; nothing writes into them after this returns or raises.

    Raises:
        ProtocolError: the frames do not match these rows. Some rows may have been written.
    """
    try:
        if is_packed(row_bytes):
            _take_packed_rows(socket, rows, row_bytes, target)
        else:
            _take_long_rows(socket, rows, row_bytes, target)
    finally:
        target.finish_writes()
    if socket.rcvmore:
        raise ProtocolError("an answer holds more frames than requested")


def _take_long_rows(socket: zmq.Socket[bytes], rows: Sequence[int], row_bytes: int, target: PoolAccess) -> None:
    def receive(memory: memoryview) -> None:
        num_bytes = socket.recv_into(memory, flags=zmq.NOBLOCK)
        if num_bytes != row_bytes:
            raise ProtocolError(f"a row of {row_bytes} bytes came as a frame of {num_bytes} bytes")

    for row in rows:
        if not socket.rcvmore:
            raise ProtocolError("an answer holds fewer rows than requested")
        target.write(row, receive)


def _take_packed_rows(socket: zmq.Socket[bytes], rows: Sequence[int], row_bytes: int, target: PoolAccess) -> None:
    """Copy all rows out of one frame; if its length is wrong, write nothing."""
    packed = socket.recv(zmq.NOBLOCK) if socket.rcvmore else b""
    num_bytes = len(rows) * row_bytes
    if len(packed) != num_bytes:
        raise ProtocolError(f"rows of {num_bytes} bytes came as a frame of {len(packed)} bytes")
    starts = iter(range(0, num_bytes, row_bytes))

    def take(memory: memoryview) -> None:
        start = next(starts)
        memory[:] = packed[start : start + row_bytes]

    for row in rows:
        target.write(row, take)


def max_frame_bytes(row_bytes: int) -> int:
    """Return the longest frame of rows that a producer may send."""
    return MAX_CHUNK_ROWS * row_bytes if is_packed(row_bytes) else row_bytes


def discard_frames(socket: zmq.Socket[bytes]) -> None:
    """Throw away the rest of the current message."""
    while socket.rcvmore:
        socket.recv(zmq.NOBLOCK, copy=False)
