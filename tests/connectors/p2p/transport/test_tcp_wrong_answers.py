"""An owner that answers wrongly, or unasked: the read ends, the reader continues, no other row is touched."""

import msgspec
import pytest
import zmq

from connectors.p2p.transport.base import RowShape
from connectors.p2p.transport.tcp_client import WINDOW_CHUNKS
from connectors.p2p.transport.tcp_server import FORMAT_VERSION, ChunkHeader, ChunkRequest, TcpMetadata
from connectors.testing.transport_suite import PEER, ROW_BYTES
from core.errors import PeerUnreachable, ProtocolError
from core.kv.seals import SEAL_BYTES

NUM_OWNER_ROWS = 8


class LyingOwner:
    """A data socket that answers what the test wants."""

    def __init__(self, context):
        self.socket = context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        shapes = (RowShape(NUM_OWNER_ROWS, ROW_BYTES), RowShape(2 * NUM_OWNER_ROWS, SEAL_BYTES))
        self.metadata = msgspec.msgpack.encode(TcpMetadata(address=f"tcp://127.0.0.1:{port}", token=1, shapes=shapes))

    def take(self):
        """Wait for a request."""
        assert self.socket.poll(5000)
        self.identity, body = self.socket.recv_multipart()
        self.chunk_id = msgspec.msgpack.decode(body, type=ChunkRequest).chunk_id

    def send(self, make_frames):
        """Send frames made from the id of the last requested chunk."""
        self.socket.send_multipart([self.identity, *make_frames(self.chunk_id)])

    def answer(self, make_frames):
        self.take()
        self.send(make_frames)


def header_of(chunk_id, refusal=""):
    return msgspec.msgpack.encode(ChunkHeader(FORMAT_VERSION, chunk_id, refusal))


ROW = b"\x07" * ROW_BYTES
LIES = {
    "too few rows": lambda chunk_id: [header_of(chunk_id), ROW],
    "no rows": lambda chunk_id: [header_of(chunk_id)],
    "too many rows": lambda chunk_id: [header_of(chunk_id), ROW, ROW, ROW],
    "a short row": lambda chunk_id: [header_of(chunk_id), ROW[:-1], ROW],
    "a refusal": lambda chunk_id: [header_of(chunk_id, "no"), ROW, ROW],
}


@pytest.mark.parametrize("lie", LIES)
def test_reader_ends_a_read_that_is_answered_wrongly_and_continues(context, reader, lie):
    owner = LyingOwner(context)
    reader.transport.add_peer(PEER, owner.metadata)
    handle = reader.transport.post_read(PEER, 0, [1, 2], [5, 6])
    owner.answer(LIES[lie])
    assert isinstance(reader.wait(handle)[0], ProtocolError)
    reader.assert_untouched([row for row in range(NUM_OWNER_ROWS) if row not in (5, 6)])
    handle = reader.transport.post_read(PEER, 0, [1], [2])
    owner.answer(lambda chunk_id: [header_of(chunk_id), ROW])
    assert reader.wait(handle) == [None]
    assert (reader.memory.rows[2] == 7).all()


SEALS = b"\x05" * SEAL_BYTES + b"\x06" * SEAL_BYTES
PACKED_LIES = {
    "a frame for each row": lambda chunk_id: [header_of(chunk_id), SEALS[:SEAL_BYTES], SEALS[SEAL_BYTES:]],
    "no rows": lambda chunk_id: [header_of(chunk_id)],
    "a row too many": lambda chunk_id: [header_of(chunk_id), SEALS + SEALS[:SEAL_BYTES]],
    "a short row": lambda chunk_id: [header_of(chunk_id), SEALS[:-1]],
    "a frame too many": lambda chunk_id: [header_of(chunk_id), SEALS, b""],
}


@pytest.mark.parametrize("lie", PACKED_LIES)
def test_reader_ends_a_read_of_short_rows_that_is_answered_wrongly_and_continues(context, reader, lie):
    owner = LyingOwner(context)
    reader.transport.add_peer(PEER, owner.metadata)
    handle = reader.transport.post_read(PEER, 1, [1, 2], [5, 9])
    owner.answer(PACKED_LIES[lie])
    assert isinstance(reader.wait(handle)[0], ProtocolError)
    reader.assert_untouched([row for row in range(2 * NUM_OWNER_ROWS) if row not in (5, 9)], region=1)
    handle = reader.transport.post_read(PEER, 1, [1, 2], [5, 9])
    owner.answer(lambda chunk_id: [header_of(chunk_id), SEALS])
    assert reader.wait(handle) == [None]
    assert reader.seals.rows[[5, 9]].tobytes() == SEALS


NONSENSE = {
    "an empty frame": lambda _: [b""],
    "no header": lambda _: [b"\xc1" * 50, ROW, ROW],
    "a chunk that nobody asked for": lambda chunk_id: [header_of(chunk_id + 1000), ROW, ROW],
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_reader_throws_nonsense_away(context, reader, kind):
    owner = LyingOwner(context)
    reader.transport.add_peer(PEER, owner.metadata)
    handle = reader.transport.post_read(PEER, 0, [1, 2], [5, 6])
    owner.take()
    owner.send(NONSENSE[kind])
    owner.send(lambda chunk_id: [header_of(chunk_id), ROW, ROW])
    assert reader.wait(handle) == [None]
    assert (reader.memory.rows[[5, 6]] == 7).all()
    reader.assert_untouched([0, 1, 2, 3, 4, 7])


def test_reader_leaves_an_owner_that_sends_larger_frames_than_a_row(context, reader):
    owner = LyingOwner(context)
    reader.transport.add_peer(PEER, owner.metadata)
    handle = reader.transport.post_read(PEER, 0, [1], [5])
    owner.answer(lambda chunk_id: [header_of(chunk_id), ROW + b"x"])
    assert isinstance(reader.wait(handle)[0], PeerUnreachable)
    reader.assert_untouched(range(NUM_OWNER_ROWS))


def test_answer_to_a_cancelled_read_is_thrown_away(context, reader):
    owner = LyingOwner(context)
    reader.transport.add_peer(PEER, owner.metadata)
    cancelled = reader.transport.post_read(PEER, 0, [1], [5])
    reader.transport.cancel(cancelled)
    owner.answer(lambda chunk_id: [header_of(chunk_id), ROW])
    handle = reader.transport.post_read(PEER, 0, [1], [2])
    owner.answer(lambda chunk_id: [header_of(chunk_id), ROW])
    assert reader.wait(handle) == [None]
    assert reader.results[cancelled].error is not None
    reader.assert_untouched([5])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:notaport", "nonsense", "", "ftp://127.0.0.1:1"])
def test_reader_refuses_a_data_address_that_makes_no_sense(reader, address):
    shapes = (RowShape(NUM_OWNER_ROWS, ROW_BYTES), RowShape(2 * NUM_OWNER_ROWS, SEAL_BYTES))
    with pytest.raises(ProtocolError, match="unusable"):
        reader.transport.add_peer(PEER, msgspec.msgpack.encode(TcpMetadata(address=address, token=1, shapes=shapes)))


def test_reader_asks_for_no_more_answers_than_an_owner_can_queue(context, reader):
    owner = LyingOwner(context)
    reader.transport.add_peer(PEER, owner.metadata)
    for _ in range(3 * WINDOW_CHUNKS):
        reader.transport.post_read(PEER, 1, [1], [2])
    num_asked = 0
    while owner.socket.poll(200 if num_asked >= WINDOW_CHUNKS else 5000):
        owner.take()
        num_asked += 1
    assert num_asked == WINDOW_CHUNKS < owner.socket.sndhwm
