"""The simulated transport obeys the contract of all transports, and shows what real ones do under virtual time."""

from random import Random
from typing import ClassVar

import pytest

from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, PeerId
from connectors.testing.transport_owner import HostRegions, HostRows
from connectors.testing.transport_suite import NUM_ROWS, ROW_BYTES, TransportSuite
from core.errors import PeerUnreachable, TransferError
from kvferry.sim.loop import EventLoop, Process
from kvferry.sim.network import Network, NetworkWeather
from kvferry.sim.transport import TRAITS, ReadWeather, SimFabric, SimTransport
from kvferry.sim.troubles import Kind

PEER = PeerId("owner", 1)
ROW = 8


def make_fabric(keeps_order: bool = False) -> SimFabric:
    loop = EventLoop()
    network = Network(loop, Random(1), NetworkWeather(), lambda frame: False)
    return SimFabric(loop, network, Random(2), ReadWeather(row_s=0.01), keeps_order)


class PolledTransport(SimTransport):
    """Lets time pass in each poll, until nothing is planned."""

    def poll(self):
        while self._fabric.loop.run_next():
            pass
        return super().poll()


class SimOwner:
    def __init__(self, fabric: SimFabric, traits, memory: HostRegions) -> None:
        self.process = Process(fabric.loop, "owner")
        self._memory = memory
        transport = SimTransport(fabric, self.process, traits, lambda: None)
        transport.register(memory.regions)
        self.metadata = transport.describe()

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self.process.thaw()

    def close(self) -> None:
        self.process.kill()
        self._memory.close()


class SimTransportSuite(TransportSuite):
    traits: ClassVar[str]
    fabric: ClassVar[SimFabric] = make_fabric()

    @classmethod
    def make_transport(cls):
        return PolledTransport(cls.fabric, Process(cls.fabric.loop, "reader"), TRAITS[cls.traits], lambda: None)

    @classmethod
    def start_owner(cls, salt, num_rows=NUM_ROWS, row_bytes=ROW_BYTES):
        memory = HostRegions(num_rows, row_bytes)
        memory.fill(salt)
        return SimOwner(cls.fabric, TRAITS[cls.traits], memory)


class TestAsTcp(SimTransportSuite):
    traits = "tcp"


@pytest.mark.slow
class TestAsNixl(SimTransportSuite):
    traits = "nixl"


@pytest.mark.slow
class TestAsShm(SimTransportSuite):
    traits = "shm"


@pytest.mark.slow
class TestInOrder(TestAsTcp):
    fabric: ClassVar[SimFabric] = make_fabric(keeps_order=True)


class Watch:
    def __init__(self) -> None:
        self.landed: list[int] = []
        self.open: set[int] = set()

    def on_post(self, handle, region, local_rows) -> None:
        self.open.add(handle)

    def on_landing(self, handle, region, local_row) -> None:
        assert handle in self.open
        self.landed.append(local_row)

    def on_end(self, handle) -> None:
        self.open.remove(handle)


class Pair:
    """A reader of one owner, each with a few rows in two regions; ``run`` lets an amount of time pass."""

    def __init__(self, kind: str, keeps_order: bool = False) -> None:
        self.fabric = make_fabric(keeps_order)
        self.loop = self.fabric.loop
        self.memory = {name: HostRows(6, ROW) for name in ("owner", "reader")}
        self.seals = {name: HostRows(6, ROW) for name in ("owner", "reader")}
        self.memory["owner"].rows[:] = self.seals["owner"].rows[:] = 1
        self.processes = {name: Process(self.loop, name) for name in ("owner", "reader")}
        self.watch = Watch()
        self.reader = SimTransport(self.fabric, self.processes["reader"], TRAITS[kind], lambda: None, self.watch)
        owner = SimTransport(self.fabric, self.processes["owner"], TRAITS[kind], lambda: None)
        owner.register([self.memory["owner"].region, self.seals["owner"].region])
        self.reader.register([self.memory["reader"].region, self.seals["reader"].region])
        self.reader.add_peer(PEER, owner.describe())

    def read(self, *rows: int) -> int:
        return self.reader.post_read(PEER, POOL_REGION, rows, rows)

    def read_seals(self, *rows: int) -> int:
        return self.reader.post_read(PEER, SEAL_REGION, rows, rows)

    def run(self, seconds: float = 100.0) -> None:
        end = self.loop.now + seconds
        self.loop.call_later(seconds, lambda: None)
        while self.loop.now < end and self.loop.run_next():
            pass


@pytest.fixture(params=["tcp", "nixl", "shm"])
def kind(request) -> str:
    return request.param


def test_owner_that_overwrites_meanwhile_tears_the_read(kind):
    pair = Pair(kind)
    pair.read(*range(6))
    while len(pair.watch.landed) < 3:
        pair.loop.run_next()
    pair.memory["owner"].rows[:] = 2
    pair.run()
    content = set(pair.memory["reader"].rows[:, 0].tolist())
    assert content == {1, 2}


def test_frozen_owner_is_read_only_by_one_sided_transports(kind):
    pair = Pair(kind)
    pair.processes["owner"].freeze()
    handle = pair.read(1)
    pair.run(10)
    assert [result.handle for result in pair.reader.poll()] == ([handle] if TRAITS[kind].is_one_sided else [])
    pair.processes["owner"].thaw()
    pair.run(10)
    assert pair.memory["reader"].rows[1, 0] == 1


def test_cancelled_read_writes_on_only_where_bytes_come_late(kind):
    pair = Pair(kind)
    handle = pair.read(0, 1, 2)
    pair.reader.cancel(handle)
    ended_at_once = bool(pair.reader.poll())
    pair.run()
    assert ended_at_once is not TRAITS[kind].has_late_bytes
    assert bool(pair.watch.landed) is TRAITS[kind].has_late_bytes
    assert not pair.watch.open


@pytest.mark.parametrize("keeps_order", [True, False])
def test_seals_are_read_after_the_blocks_before_them_only_in_order(keeps_order):
    pair = Pair("tcp", keeps_order)
    pair.fabric.weather.stall_rate, pair.fabric.weather.stall_s = 1.0, 50.0
    blocks = {pair.read(0, 1, 2), pair.read(3, 4)}
    pair.fabric.weather.stall_rate = 0.0
    seals = pair.read_seals(*range(5))
    pair.run(0.1)
    assert [result.handle for result in pair.reader.poll()] == ([] if keeps_order else [seals])
    pair.seals["owner"].rows[:] = 2
    pair.run()
    handles = [result.handle for result in pair.reader.poll()]
    assert set(handles[:2]) == blocks
    assert handles[2:] == ([seals] if keeps_order else [])
    assert (pair.seals["reader"].rows[:5] == (2 if keeps_order else 1)).all()


def test_seals_are_read_when_the_blocks_before_them_are_abandoned():
    pair = Pair("tcp", keeps_order=True)
    pair.fabric.weather.stall_rate, pair.fabric.weather.stall_s = 1.0, 1e6
    blocks = pair.read(0, 1, 2)
    pair.fabric.weather.stall_rate = 0.0
    seals = pair.read_seals(0, 1, 2)
    pair.run(10)
    pair.reader.cancel(blocks)
    pair.run(10)
    cancelled, read = pair.reader.poll()
    assert (cancelled.handle, type(cancelled.error)) == (blocks, TransferError)
    assert (read.handle, read.error) == (seals, None)


def read_that_lands_late(pair: Pair) -> int:
    """Return a read whose row has been looked at, and is a long time on its way."""
    pair.fabric.weather.row_s = 1e4
    handle = pair.read(0)
    while pair.reader._reads[handle].num_rows_unseen:
        pair.loop.run_next()
    pair.fabric.weather.row_s = 0.001
    return handle


def test_seals_after_blocks_that_are_lost_are_lost_with_them():
    pair = Pair("tcp", keeps_order=True)
    late = read_that_lands_late(pair)
    seals = pair.read_seals(0)
    pair.run(1.0)
    assert pair.seals["reader"].rows[0, 0] == 1
    assert not pair.reader.poll()
    pair.reader.remove_peer(PEER)
    results = pair.reader.poll()
    assert [(result.handle, type(result.error)) for result in results] == [(late, PeerUnreachable), (seals, PeerUnreachable)]


def test_seals_that_fail_wait_for_nothing():
    pair = Pair("tcp", keeps_order=True)
    read_that_lands_late(pair)
    pair.fabric.weather.error_rate = 1.0
    seals = pair.read_seals(0)
    pair.run(1.0)
    (result,) = pair.reader.poll()
    assert (result.handle, type(result.error)) == (seals, TransferError)


def test_stalled_read_continues_later():
    pair = Pair("nixl")
    pair.fabric.weather.stall_rate, pair.fabric.weather.stall_s = 1.0, 50.0
    pair.read(0, 1, 2)
    pair.run(0.1)
    assert pair.reader.num_open_reads == 1
    pair.run(100)
    assert sorted(pair.watch.landed) == [0, 1, 2]
    assert pair.fabric.weather.num_stalled == 1


def test_partition_holds_the_bytes_back():
    pair = Pair("tcp")
    pair.fabric.network.partition("owner", "reader", 3.0)
    pair.read(4)
    pair.run(2.9)
    assert not pair.watch.landed
    pair.run(1.0)
    assert pair.watch.landed == [4]


def test_failing_read_ends_in_an_error_with_its_bytes_written():
    pair = Pair("tcp")
    pair.fabric.weather.error_rate = 1.0
    pair.read(0, 1)
    pair.run()
    (result,) = pair.reader.poll()
    assert isinstance(result.error, TransferError)
    assert sorted(pair.watch.landed) == [0, 1]


def test_failing_read_of_a_connection_ends_all_reads_of_the_peer():
    """As NIXL's agents do: a peer with which a transfer has failed is lost."""
    pair = Pair("nixl")
    pair.fabric.weather.stall_rate, pair.fabric.weather.stall_s = 1.0, 1e6
    pair.read(4)
    pair.fabric.weather.stall_rate, pair.fabric.weather.error_rate = 0.0, 1.0
    pair.read(0, 1)
    pair.run(10.0)
    results = pair.reader.poll()
    assert [type(result.error) for result in results] == [PeerUnreachable, PeerUnreachable]
    with pytest.raises(PeerUnreachable):
        pair.read(2)


@pytest.mark.parametrize("corrupts_data", [True, False])
def test_corruption_changes_one_byte_of_what_it_may(corrupts_data):
    pair = Pair("tcp")
    weather = pair.fabric.weather
    weather.corrupt_rate, weather.corrupts_data = 1.0, corrupts_data
    pair.read(0, 1, 2)
    pair.run()
    (result,) = pair.reader.poll()
    assert result.error is None
    assert int((pair.memory["reader"].rows[:3] != 1).sum()) == int(corrupts_data)


def test_refused_read_is_not_posted():
    pair = Pair("tcp")
    pair.fabric.weather.refuse_rate = 1.0
    with pytest.raises(PeerUnreachable):
        pair.read(0)
    assert not pair.watch.open


def test_dead_reader_is_not_written():
    pair = Pair("nixl")
    pair.read(0, 1)
    pair.processes["reader"].kill()
    pair.run()
    assert not pair.watch.landed


@pytest.mark.parametrize("ends", ["cancelled", "dead"])
def test_read_without_an_answer_is_a_trouble_until_the_reader_ends_it(ends):
    pair = Pair("tcp")
    pair.fabric.weather.drop_rate = 1.0
    read = pair.read(0, 1)
    pair.run(2.0)
    (trouble,) = pair.fabric.network.troubles.touching({Kind.UNANSWERED}, "reader", 1.0, 1.0)
    assert trouble.names == {"owner", "reader"}
    if ends == "cancelled":
        pair.reader.cancel(read)
    else:
        pair.processes["reader"].kill()
    assert (trouble.start, trouble.end) == (0.0, 2.0)
