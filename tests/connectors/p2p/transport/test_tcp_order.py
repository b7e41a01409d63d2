"""Seals that are requested together with their blocks say what the blocks were when their bytes had left the owner."""

from types import SimpleNamespace

import msgspec
import pytest
import zmq

from connectors.p2p.transport import tcp_server
from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, PeerId
from connectors.p2p.transport.tcp_client import WINDOW_BYTES, TcpTransport
from connectors.p2p.transport.tcp_server import (
    FORMAT_VERSION,
    HELD_BACK_WAITS_S,
    SOCKET_BUFFER_BYTES,
    ChunkHeader,
    ChunkRequest,
    TcpMetadata,
)
from connectors.testing.transport_owner import HostRegions
from core.ids import RandomIds
from core.wire.sockets import join_tcp, split_tcp
from tests.support.tcp_proxy import BUFFER_BYTES, TcpProxy

PEER = PeerId("tcp://10.0.0.1:5600", 1)
ROW_BYTES = 1 << 20
NUM_ROWS = WINDOW_BYTES // ROW_BYTES - 1  # all in flight at once, their seals too
ROWS = range(NUM_ROWS)
OLD, NEW = 1, 2

CUT_AFTER_BYTES = 2 << 20
TAKEN_IN_BYTES = 2 * (SOCKET_BUFFER_BYTES + BUFFER_BYTES)  # the kernel doubles the size that is requested

assert NUM_ROWS * ROW_BYTES > CUT_AFTER_BYTES + TAKEN_IN_BYTES, "the owner must not get rid of all of it"


class World:
    """An owner, and a reader whose network can delay its answers. Both are driven from here."""

    def __init__(self):
        self.theirs, self.ours = HostRegions(NUM_ROWS, ROW_BYTES), HostRegions(NUM_ROWS, ROW_BYTES)
        self.write(OLD)
        self.owner, self.reader = (TcpTransport(RandomIds(), "tcp://127.0.0.1:0") for _ in range(2))
        self.owner.register(self.theirs.regions)
        self.reader.register(self.ours.regions)
        said = msgspec.msgpack.decode(self.owner.describe(), type=TcpMetadata)
        host, port = split_tcp(said.address)
        self.network = TcpProxy((host, port))
        reached_at = msgspec.structs.replace(said, address=join_tcp(*self.network.address))
        self.reader.add_peer(PEER, msgspec.msgpack.encode(reached_at))
        self.ended = []
        self.read(SEAL_REGION)
        self.drive(lambda: self.ended)  # the connection is there
        self.ended.clear()

    def write(self, content):
        """Break the seals, write the blocks."""
        self.theirs.seals.rows[:] = content
        self.theirs.pool.rows[:] = content

    def read(self, region):
        return self.reader.post_read(PEER, region, ROWS, ROWS)

    def ask_for_all_of_it_while_the_answers_are_held_up(self):
        """Return the handles of blocks and seals, once the owner has been asked for both and cannot send all."""
        self.network.silence_answers(CUT_AFTER_BYTES)
        handles = [self.read(POOL_REGION), self.read(SEAL_REGION)]
        self.drive(lambda: self.owner.max_wait_s() is not None)
        return handles

    def drive(self, is_done):
        for _ in range(3000):
            self.owner.poll()
            self.ended += self.reader.poll()
            if is_done():
                return
            pollables = [*self.owner.pollables(), *self.reader.pollables()]
            zmq.zmq_poll([(each, zmq.POLLIN) for each in pollables], 10)
        pytest.fail("it does not get there")

    def close(self):
        self.reader.close()
        self.owner.close()
        self.network.close()
        self.theirs.close()
        self.ours.close()


@pytest.fixture
def impatient(monkeypatch):
    """Owners give up a reader soon; named before ``world``."""
    monkeypatch.setattr(tcp_server, "MAX_UNTAKEN_MS", 100)


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_blocks_that_are_written_before_they_have_left_have_broken_seals(world):
    blocks, seals = world.ask_for_all_of_it_while_the_answers_are_held_up()
    world.write(NEW)
    world.network.heal()
    world.drive(lambda: len(world.ended) == 2)
    assert [(result.handle, result.error) for result in world.ended] == [(blocks, None), (seals, None)]
    assert (world.ours.pool.rows[-1] == NEW).all(), "else all had left before it was written"
    assert (world.ours.seals.rows[:NUM_ROWS] == NEW).all()


@pytest.mark.slow
def test_seals_are_held_back_for_no_reader_that_takes_nothing_any_more(impatient, world):
    world.ask_for_all_of_it_while_the_answers_are_held_up()
    world.drive(lambda: world.owner.max_wait_s() is None)
    assert world.owner.counts()["dropped_data_answers"] == 1


def test_seals_that_are_held_back_hold_nothing_else_up(world):
    world.ask_for_all_of_it_while_the_answers_are_held_up()
    other = TcpTransport(RandomIds(), "tcp://127.0.0.1:0")
    memory = HostRegions(NUM_ROWS, ROW_BYTES)
    other.register(memory.regions)
    other.add_peer(PEER, world.owner.describe())
    handles = [other.post_read(PEER, region, [3], [5]) for region in (POOL_REGION, SEAL_REGION)]
    ended = []
    world.drive(lambda: ended.extend(other.poll()) or len(ended) == 2)
    assert [(result.handle, result.error) for result in ended] == [(handle, None) for handle in handles]
    other.close()
    memory.close()


@pytest.mark.slow
def test_owner_of_a_reader_that_takes_nothing_looks_less_and_less_often(world):
    """A frozen reader costs no processor."""
    world.ask_for_all_of_it_while_the_answers_are_held_up()
    world.drive(lambda: world.owner.max_wait_s() > HELD_BACK_WAITS_S[0])
    world.network.heal()
    world.drive(lambda: len(world.ended) == 2)
    assert world.owner.max_wait_s() is None


def test_requests_of_a_reader_that_has_left_are_not_held_back_forever(world):
    world.ask_for_all_of_it_while_the_answers_are_held_up()
    world.network.reset()
    world.drive(lambda: world.owner.max_wait_s() is None and len(world.ended) == 2)
    assert {type(result.error).__name__ for result in world.ended} == {"PeerUnreachable"}


def test_no_more_than_so_many_requests_are_held_back(world, monkeypatch):
    monkeypatch.setattr("connectors.p2p.transport.tcp_server.MAX_HELD_BACK", 4)
    world.network.silence_answers(CUT_AFTER_BYTES)
    world.read(POOL_REGION)
    for _ in range(7):
        world.read(SEAL_REGION)
    world.drive(lambda: world.owner.counts()["bad_data_requests"] == 3)
    world.network.heal()
    world.drive(lambda: len(world.ended) == 8)
    refused = [result.error.message for result in world.ended if result.error]
    assert len(refused) == 3
    assert all("4 requests for short rows wait" in message for message in refused)


def test_a_request_that_cannot_be_answered_is_refused_at_once(world):
    world.ask_for_all_of_it_while_the_answers_are_held_up()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        said = msgspec.msgpack.decode(world.owner.describe(), type=TcpMetadata)
        stranger.connect(said.address)
        request = ChunkRequest(FORMAT_VERSION, said.token, 7, SEAL_REGION, (1 << 20,))
        stranger.send(msgspec.msgpack.encode(request))
        world.drive(lambda: stranger.poll(0))
        (header,) = stranger.recv_multipart()
    assert "row 1048576" in msgspec.msgpack.decode(header, type=ChunkHeader).refusal


def test_requests_of_one_reader_are_answered_in_order(world, monkeypatch):
    """Whatever was sent between two looks: nothing overtakes what is held back."""
    answered = []
    owner = world.owner._server
    monkeypatch.setattr(owner, "_answer", lambda reader, request: answered.append(request.chunk_id))
    sending = [SimpleNamespace(done=False)]
    monkeypatch.setattr(owner, "_sending_to", lambda reader: [tracker for tracker in sending if not tracker.done])
    said = msgspec.msgpack.decode(world.owner.describe(), type=TcpMetadata)
    for chunk_id in (1, 2):
        request = ChunkRequest(FORMAT_VERSION, said.token, chunk_id, SEAL_REGION, (0,))
        owner._take([b"reader", msgspec.msgpack.encode(request)])
        sending[0].done = True
    assert answered == []
    owner.poll()
    assert answered == [1, 2]
