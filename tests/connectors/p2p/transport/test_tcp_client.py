import dataclasses
import socket
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from connectors.p2p.transport.base import RowShape
from connectors.p2p.transport.frames import MAX_CHUNK_ROWS
from connectors.p2p.transport.tcp_client import TcpTransport
from connectors.p2p.transport.tcp_server import FORMAT_VERSION, MAX_REQUEST_BYTES, ChunkHeader, ChunkRequest, TcpMetadata
from connectors.testing.torn_read_suite import RewrittenRowsSuite
from connectors.testing.transport_owner import HostRegions, load_factory
from connectors.testing.transport_suite import PEER, ROW_BYTES, Reader, TransportSuite
from core.errors import ConfigError, ConnectorUnavailable, KVFerryError, PeerUnreachable, ProtocolError
from core.ids import RandomIds
from core.kv.seals import SEAL_BYTES
from core.wire.curve import derive_keys
from core.wire.sockets import join_tcp, split_tcp
from tests.support.tcp_proxy import TcpProxy

FACTORIES = Path(__file__).with_name("transport_factories.py")
NUM_OWNER_ROWS = 8


class TestTcpTransport(TransportSuite):
    factory = f"{FACTORIES}:make_tcp"


@pytest.mark.slow
class TestTcpTransportWithKey(TransportSuite):
    factory = f"{FACTORIES}:make_tcp_with_key"


@pytest.mark.slow
class TestTcpOverRewrittenRows(RewrittenRowsSuite):
    factory = f"{FACTORIES}:make_tcp"


@pytest.mark.slow
class TestTcpWithKeyOverRewrittenRows(RewrittenRowsSuite):
    factory = f"{FACTORIES}:make_tcp_with_key"


@pytest.mark.full
class TestTcpBesideDevice(TransportSuite):
    """Both ends copy through pinned memory."""

    factory = f"{FACTORIES.with_name('device_factories.py')}:make_tcp_beside_device"


@pytest.mark.gpu
class TestTcpOnGpu(TransportSuite):
    """Rows lie in video memory on both ends."""

    factory = f"{FACTORIES.with_name('device_factories.py')}:make_tcp_on_gpu"


class LocalOwner:
    """A transport that serves rows from this process, on command."""

    def __init__(self, address="tcp://127.0.0.1:0", salt=1, advertise_host="", transport=None):
        self._regions = HostRegions(NUM_OWNER_ROWS, ROW_BYTES)
        self._regions.fill(salt)
        self.memory, self.seals = self._regions.pool, self._regions.seals
        self.transport = transport or TcpTransport(RandomIds(), address, advertise_host)
        self.transport.register(self._regions.regions)
        self.metadata = self.transport.describe()
        self.described = msgspec.msgpack.decode(self.metadata, type=TcpMetadata)

    def serve(self, is_done):
        """Answer until the condition holds."""
        for _ in range(500):
            if is_done():
                return
            zmq.zmq_poll([(pollable, zmq.POLLIN) for pollable in self.transport.pollables()], 10)
            self.transport.poll()
        pytest.fail("the owner did not get there")

    def close(self):
        self.transport.close()
        self._regions.close()


@pytest.fixture
def local_owner():
    owner = LocalOwner()
    yield owner
    owner.close()


def read_from(owner, reader, peer=PEER):
    """Read row 3 into row 5, both sides driven from here; return the error."""
    try:
        handle = reader.transport.post_read(peer, 0, [3], [5])
    except KVFerryError as error:
        return error

    def has_ended():
        reader.poll()
        return handle in reader.results

    owner.serve(has_ended)
    return reader.results[handle].error


def assert_serves(owner, reader):
    reader.transport.add_peer(PEER, owner.metadata)
    assert read_from(owner, reader) is None
    reader.assert_rows(1, [3], [5])


# ---- change of the cluster key -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner_key", ["the old key of a cluster, long enough", "the new key of a cluster, long enough"])
def test_reads_from_owners_that_hold_either_key_while_it_changes(owner_key):
    old, new = (derive_keys(f"the {age} key of a cluster, long enough") for age in ("old", "new"))
    transport = TcpTransport(RandomIds(), "tcp://127.0.0.1:0", keys=old.with_others([new]))
    owner = LocalOwner(transport=TcpTransport(RandomIds(), "tcp://127.0.0.1:0", keys=derive_keys(owner_key)))
    reader = Reader(transport, NUM_OWNER_ROWS)
    assert_serves(owner, reader)
    reader.close()
    owner.close()


def test_owner_that_holds_a_third_key_is_lost():
    old, new, third = (derive_keys(f"the {age} key of a cluster, long enough") for age in ("old", "new", "third"))
    owner = LocalOwner(transport=TcpTransport(RandomIds(), "tcp://127.0.0.1:0", keys=third))
    reader = Reader(TcpTransport(RandomIds(), "tcp://127.0.0.1:0", keys=old.with_others([new])), NUM_OWNER_ROWS)
    reader.transport.add_peer(PEER, owner.metadata)
    assert isinstance(read_from(owner, reader), PeerUnreachable)
    reader.close()
    owner.close()


# ---- pools on devices ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_beside_device():
    return load_factory(f"{FACTORIES.with_name('device_factories.py')}:make_tcp_beside_device")


@pytest.fixture
def device_reader(make_beside_device):
    reader = Reader(make_beside_device(), NUM_OWNER_ROWS)
    yield reader
    reader.close()


def read_rows(owner, reader, remote_rows, local_rows):
    handle = reader.transport.post_read(PEER, 0, remote_rows, local_rows)

    def has_ended():
        reader.poll()
        return handle in reader.results

    owner.serve(has_ended)
    return reader.results[handle].error


@pytest.mark.parametrize("owner_is_on_device", [True, False])
def test_rows_of_a_device_are_there_when_the_read_ends(owner_is_on_device, make_beside_device, device_reader):
    owner = LocalOwner(transport=make_beside_device() if owner_is_on_device else None)
    try:
        device_reader.transport.add_peer(PEER, owner.metadata)
        assert read_rows(owner, device_reader, [7, 1, 0, 3, 5], [2, 3, 6, 4, 0]) is None
        device_reader.assert_rows(1, [7, 1, 0, 3, 5], [2, 3, 6, 4, 0])  # without a wait for the device
        device_reader.assert_untouched([1, 5, 7])
    finally:
        owner.close()


def test_a_device_receives_nothing_after_a_wrong_answer(make_beside_device, device_reader, context):
    liar = context.socket(zmq.ROUTER)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    metadata = TcpMetadata(
        address=f"tcp://127.0.0.1:{port}", token=1, shapes=(RowShape(8, ROW_BYTES), RowShape(16, SEAL_BYTES))
    )
    device_reader.transport.add_peer(PEER, msgspec.msgpack.encode(metadata))
    handle = device_reader.transport.post_read(PEER, 0, [0, 1, 2], [4, 5, 6])
    assert liar.poll(5000)
    reader_id, body = liar.recv_multipart()
    request = msgspec.msgpack.decode(body, type=ChunkRequest)
    header = msgspec.msgpack.encode(ChunkHeader(FORMAT_VERSION, request.chunk_id))
    liar.send_multipart([reader_id, header, b"a" * ROW_BYTES, b"b" * (ROW_BYTES - 1)])
    (error,) = device_reader.wait(handle)
    assert isinstance(error, ProtocolError)
    assert (device_reader.memory.rows[4] == ord("a")).all(), "its copy has ended, too"
    device_reader.assert_untouched([5, 6])


def test_device_memory_that_nothing_copies_is_refused(reader):
    region = dataclasses.replace(reader.memory.region, buffer=None, device="cuda:0")
    transport = TcpTransport(RandomIds(), "tcp://127.0.0.1:0")
    with pytest.raises(ConnectorUnavailable, match="cuda:0"):
        transport.register([region])
    transport.close()


# ---- connections from outside -------------------------------------------------------------------------------------------


def request_to(owner, **changed):
    fields = {"version": FORMAT_VERSION, "token": owner.described.token, "chunk_id": 9, "region": 0, "rows": (1,)} | changed
    return msgspec.msgpack.encode(ChunkRequest(**fields))


def ask(owner, context, frames):
    """Send frames to the owner's data socket and return its answer, None if it has counted them and said nothing."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(owner.described.address)
    before = owner.transport.counts()["bad_data_requests"]
    dealer.send_multipart(frames)
    owner.serve(lambda: dealer.poll(0) or owner.transport.counts()["bad_data_requests"] > before)
    answer = dealer.recv_multipart() if dealer.poll(50) else None
    dealer.close(linger=0)
    return answer


def test_reader_counts_what_it_has_received(local_owner, reader):
    assert reader.transport.bytes_received(PEER) is None
    assert_serves(local_owner, reader)
    received = reader.transport.bytes_received(PEER)
    assert received > 0
    assert_serves(local_owner, reader)
    assert reader.transport.bytes_received(PEER) > received


def test_owner_answers_a_proper_request_with_a_header_and_the_rows(local_owner, context):
    header, *rows = ask(local_owner, context, [request_to(local_owner, rows=(4, 2))])
    assert msgspec.msgpack.decode(header, type=ChunkHeader) == ChunkHeader(FORMAT_VERSION, 9)
    assert rows == [local_owner.memory.rows[4].tobytes(), local_owner.memory.rows[2].tobytes()]


def test_answers_that_a_reader_does_not_take_are_dropped_and_counted(local_owner, context):
    lazy = context.socket(zmq.DEALER)
    lazy.rcvhwm = 1
    lazy.connect(local_owner.described.address)
    request = request_to(local_owner, region=1, rows=(1,) * 64)

    def has_dropped():
        for _ in range(16):
            lazy.send(request)
        return local_owner.transport.counts()["dropped_data_answers"]

    local_owner.serve(has_dropped)
    assert local_owner.transport.counts()["bad_data_requests"] == 0


def test_owner_packs_short_rows_into_one_frame(local_owner, context):
    header, packed = ask(local_owner, context, [request_to(local_owner, region=1, rows=(4, 2))])
    assert msgspec.msgpack.decode(header, type=ChunkHeader) == ChunkHeader(FORMAT_VERSION, 9)
    assert packed == local_owner.seals.rows[[4, 2]].tobytes()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\xff" * 1000],
        [b"\x95" * 500],
        [b"\x91" * 5000],
        [b"", b""],
        [b"one", b"two", b"three"],
        [msgspec.msgpack.encode(("a", "b", "c", "d", "e"))],
        [msgspec.msgpack.encode((1, 2, 3, 0, ["row"]))],
    ],
)
def test_owner_counts_nonsense_and_continues(local_owner, context, reader, frames):
    assert ask(local_owner, context, frames) is None
    assert_serves(local_owner, reader)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": FORMAT_VERSION + 1}, f"format {FORMAT_VERSION + 1}"),
        ({"token": 12345}, "another incarnation"),
        ({"region": 2}, "region 2"),
        ({"region": -1}, "region -1"),
        ({"rows": (NUM_OWNER_ROWS,)}, "row 8"),
        ({"rows": (0, -1)}, "row -1"),
        ({"rows": (0,) * (MAX_CHUNK_ROWS + 1)}, "cap"),
    ],
)
def test_owner_refuses_with_a_reason_and_without_rows(local_owner, context, reader, changed, reason):
    (header,) = ask(local_owner, context, [request_to(local_owner, **changed)])
    refusal = msgspec.msgpack.decode(header, type=ChunkHeader)
    assert refusal.chunk_id == 9
    assert reason in refusal.refusal
    assert_serves(local_owner, reader)


def test_owner_survives_bytes_that_are_no_zeromq(local_owner, reader):
    host, _, port = local_owner.described.address.removeprefix("tcp://").rpartition(":")
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes(54) + b"\xff" * 512,
        bytes(4096),
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    assert_serves(local_owner, reader)


def test_owner_cuts_off_a_request_above_the_cap(local_owner, context, reader):
    dealer = context.socket(zmq.DEALER)
    dealer.connect(local_owner.described.address)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send(bytes(MAX_REQUEST_BYTES + 1))
    local_owner.serve(lambda: monitor.poll(0))
    dealer.monitor(None, 0)  # before the context closes the sockets in any order
    assert_serves(local_owner, reader)


def test_owner_survives_readers_that_leave_before_their_answer(local_owner, context, reader):
    for _ in range(20):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(local_owner.described.address)
        dealer.send(request_to(local_owner, rows=tuple(range(NUM_OWNER_ROWS))))
        local_owner.transport.poll()
        dealer.close(linger=0)
    assert_serves(local_owner, reader)


def test_owner_cannot_bind_an_address_that_is_taken(local_owner):
    second = TcpTransport(RandomIds(), local_owner.described.address)
    second.register([local_owner.memory.region])
    with pytest.raises(ConnectorUnavailable, match="cannot bind"):
        second.describe()
    second.close()


# ---- the next process at the same address ----------------------------------------------------------------------------------


def test_successor_at_the_same_address_gives_nothing_to_readers_of_the_dead(reader):
    first = LocalOwner()
    first.close()
    successor = LocalOwner(first.described.address, salt=2)
    try:
        assert successor.described.address == first.described.address
        reader.transport.add_peer(PEER, first.metadata)
        error = read_from(successor, reader)
        assert isinstance(error, ProtocolError)
        assert "another incarnation" in error.message
        reader.assert_untouched(range(NUM_OWNER_ROWS))
    finally:
        successor.close()


def test_connection_never_goes_over_to_the_successor(reader):
    first = LocalOwner()
    reader.transport.add_peer(PEER, first.metadata)
    assert read_from(first, reader) is None
    before = reader.memory.rows.copy()
    first.close()
    successor = LocalOwner(first.described.address, salt=2)
    try:
        for _ in range(3):
            assert isinstance(read_from(successor, reader), PeerUnreachable)
        assert np.array_equal(reader.memory.rows, before)
        reader.transport.remove_peer(PEER)
        next_life = PEER._replace(incarnation=2)
        reader.transport.add_peer(next_life, successor.metadata)
        assert read_from(successor, reader, next_life) is None
        reader.assert_rows(2, [3], [5])
    finally:
        successor.close()


# ---- the end of a connection, and addresses ------------------------------------------------------------------------------


@pytest.fixture
def proxied(local_owner, reader):
    """A proxy between the owner and its reader, which has read through it."""
    with TcpProxy(split_tcp(local_owner.described.address)) as proxy:
        metadata = msgspec.structs.replace(local_owner.described, address=join_tcp(*proxy.address))
        reader.transport.add_peer(PEER, msgspec.msgpack.encode(metadata))
        assert read_from(local_owner, reader) is None
        yield proxy


def test_connection_that_breaks_while_idle_is_told_of_once(proxied, reader):
    assert not reader.transport.take_lost_peers()
    proxied.reset()
    lost = []
    reader.until(lambda: lost.extend(reader.transport.take_lost_peers()) or lost)
    reader.poll(0.05)
    assert [*lost, *reader.transport.take_lost_peers()] == [PEER]
    with pytest.raises(PeerUnreachable):
        reader.transport.post_read(PEER, 0, [1], [1])


def test_reads_in_flight_end_with_the_connection_before_it_is_told_of(proxied, local_owner, reader):
    handle = reader.transport.post_read(PEER, 0, [3], [5])
    proxied.reset()
    assert isinstance(reader.wait(handle)[0], PeerUnreachable)
    assert reader.transport.take_lost_peers() == [PEER]
    reader.transport.remove_peer(PEER)
    assert_serves(local_owner, reader)


def test_idle_connections_are_probed_by_the_kernel(local_owner, reader):
    assert_serves(local_owner, reader)
    (connection,) = (socket for socket in reader.transport.pollables() if socket.type == zmq.DEALER)
    (server,) = (socket for socket in local_owner.transport.pollables() if socket.type == zmq.ROUTER)
    assert all(socket.get(zmq.TCP_KEEPALIVE) == 1 for socket in (connection, server))


def test_events_stop_before_their_reading_end_is_closed(monkeypatch, local_owner, reader):
    """ZeroMQ's thread sends an event by a blocking call: without a reader of that event it would hang, and we with it."""
    reader.transport.add_peer(PEER, local_owner.metadata)
    monitor = weakref.ref(reader.transport.pollables()[-1])
    was_open = []
    stop = zmq.Socket.monitor

    def spy(self, address, events=zmq.EVENT_ALL):
        if address is None:
            was_open.append(monitor() is not None and not monitor().closed)
        return stop(self, address, events)

    monkeypatch.setattr(zmq.Socket, "monitor", spy)
    reader.transport.remove_peer(PEER)
    assert was_open == [True]
    assert monitor() is None or monitor().closed


def test_wildcard_is_bound_only_under_another_name_and_warned_about(caplog):
    nameless = TcpTransport(RandomIds(), "tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match=r"worker\.advertise_host"):
        nameless.describe()
    nameless.close()
    named = TcpTransport(RandomIds(), "tcp://0.0.0.0:0", "pod-3")
    assert b"tcp://pod-3:" in named.describe()
    assert "exposed_socket" in caplog.text
    named.close()


# ---- IPv6 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "told"), [("tcp://[::1]:0", ""), ("tcp://[::]:0", "[::1]"), ("tcp://[::]:0", "127.0.0.1")])
def test_reads_over_ipv6_and_beside_it_over_ipv4(needs_ipv6, reader, bound, told):
    owner = LocalOwner(bound, advertise_host=told)
    try:
        host = told or "[::1]"
        assert owner.described.address.startswith(f"tcp://{host}:")
        assert_serves(owner, reader)
    finally:
        owner.close()
