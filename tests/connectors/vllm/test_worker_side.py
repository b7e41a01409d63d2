"""One rank: seals, leases and reports, with real sockets and the tcp transport between two ranks of this process."""

import mmap
import threading
import time
from dataclasses import replace

import pytest

from connectors.p2p.actions import PullRequest, row_units
from connectors.p2p.host_id import host_id
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.settings import DriverSettings
from connectors.p2p.transport.interface import PeerId
from connectors.reports import LoadEnded
from connectors.vllm.orders import LoadOrder, RankOrders, RemoteHandoff, SealOrder
from connectors.vllm.sealing import Sealer
from connectors.vllm.settings import PluginSettings
from connectors.vllm.worker_side import RankRole, WorkerSide
from core.clock import SystemClock
from core.digest import BlockDigester
from core.errors import ConfigError, ConnectorUnavailable
from core.ids import RandomIds, new_incarnation
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import BROKEN, ExpectedSeal, SealTable, each_by_itself, layout_fingerprint, map_seal_memory
from tests.connectors.vllm.fake_requests import LAYOUT, MODEL

NUM_BLOCKS = 12
SIZE = LAYOUT.block_bytes


def pool_of(fill, incarnation):
    memory = mmap.mmap(-1, NUM_BLOCKS * SIZE)
    buffer = memoryview(memory)
    for block_id in range(NUM_BLOCKS):
        buffer[block_id * SIZE : (block_id + 1) * SIZE] = bytes([fill + block_id]) * SIZE

    def new_digester():
        digester = BlockDigester(SIZE)
        return each_by_itself(lambda block_id: digester.digest(buffer[block_id * SIZE : (block_id + 1) * SIZE]))

    seals = SealTable(map_seal_memory(NUM_BLOCKS), incarnation, layout_fingerprint(LAYOUT), new_digester())
    return KVPoolRegion(0, NUM_BLOCKS, SIZE, LAYOUT, buffer=buffer, seals=seals, new_digester=new_digester)


class Rank:
    """A rank and its memory."""

    def __init__(
        self,
        name,
        fill,
        *,
        can_name_blocks=True,
        num_kv_heads=1,
        transports=("tcp",),
        is_on_device=False,
        unsealed_patience_s=0.0,
        port=0,
        **settings,
    ):
        self.incarnation = new_incarnation(RandomIds())
        self.pool = pool_of(fill, self.incarnation)
        if is_on_device:
            self.pool = replace(self.pool, bind_thread=lambda: None)
        identity = WorkerIdentity(
            engine_id=name,
            incarnation=self.incarnation,
            model_fingerprint=MODEL.fingerprint,
            layout=LAYOUT,
            host_id=host_id(),
        )
        driver = DriverSettings(
            transfer=PluginSettings(transports=transports, **settings).transfer,
            control_address=f"tcp://127.0.0.1:{port}",
            advertise_host="127.0.0.1",
            unsealed_patience_s=unsealed_patience_s,
            clock=SystemClock(),
            ids=RandomIds(),
        )
        role = RankRole(rank=0, num_kv_heads=num_kv_heads, is_producer=True, can_name_blocks=can_name_blocks)
        self.side = WorkerSide(role, identity, driver, self.pool)
        try:
            self.address = self.side.start(MODEL)
        except ConfigError:
            self.side.stop()
            raise

    @property
    def peer(self):
        return PeerId(self.address.control_address, self.incarnation)

    def step(self, **orders):
        """Make a step with these orders, and return what the rank reports."""
        found = RankOrders(**orders)
        self.side.begin_step(found)
        self.side.start_loads(found)
        self.side.seal(found)
        self.last_report = self.side.end_step()
        return self.last_report

    def wait_for(self, request_id):
        """Step until a transfer of a request is reported; the last step may have done so already."""
        end = time.monotonic() + 20
        report = self.last_report
        while time.monotonic() < end:
            if request_id in report.finished_recving | report.finished_sending:
                return report
            time.sleep(0.005)
            report = self.step()
        raise AssertionError(f"{request_id} was not reported")

    def generation(self, block_id):
        return self.pool.seals.sealed_generation(block_id)

    def content(self, block_id):
        return self.pool.buffer[block_id * SIZE]


@pytest.fixture
def ranks():
    made = []

    def make(*arguments, **settings):
        made.append(Rank(*arguments, **settings))
        return made[-1]

    yield make
    for rank in made:
        rank.side.stop()


def seal_order(name, block_ids, first_generation=1):
    seals = [ExpectedSeal(first_generation + index, 0, bytes([index]) * 16, 32) for index in range(len(block_ids))]
    return SealOrder(f"kv-{name}", name, tuple(zip(block_ids, seals, strict=True)))


def load_order(order, owner, local_rows):
    handoff = RemoteHandoff(order.transfer_id, (owner.peer,))
    rows, seals = zip(*order.blocks, strict=True)
    units = row_units(rows, local_rows, seals)
    return LoadOrder("load", handoff, units, 32 * len(units), LAYOUT)


def test_a_load_brings_the_sealed_blocks_and_its_release_breaks_the_seals(ranks):
    owner, reader = ranks("p", 10), ranks("d", 100)
    order = seal_order("a", [3, 4])
    owner.step(seals=[order])
    load = load_order(order, owner, [7, 8])
    reader.step(holds=[load.handoff], loads=[load])
    report = reader.wait_for("load")
    assert (report.failed_recving, report.invalid_block_ids) == (set(), set())
    assert [reader.content(block_id) for block_id in (7, 8)] == [13, 14]
    assert reader.side.take_counts().verified_blocks == 2
    owner.step(published=[order.transfer_id])
    reader.step(releases=[load.handoff])
    assert owner.wait_for("a").finished_sending == {"a"}
    assert [owner.generation(block_id) for block_id in (3, 4)] == [BROKEN, BROKEN]
    assert owner.side.num_held_blocks() == 0


class Step:
    """A step that a device is still computing."""

    def __init__(self):
        self._is_done = threading.Event()
        self.error = None

    def end(self, error=None):
        self.error = error
        self._is_done.set()

    def synchronize(self):
        assert self._is_done.wait(20)
        if self.error is not None:
            raise self.error


def test_a_prompt_is_sealed_once_the_device_has_written_it(ranks, eventually):
    owner = ranks("p", 10, is_on_device=True)
    steps, orders = [Step(), Step()], [seal_order("a", [3, 4]), seal_order("b", [3, 4, 5])]
    for step, order in zip(steps, orders, strict=True):
        owner.side.seal(RankOrders(seals=[order]), step)
    assert owner.generation(3) == BROKEN
    owner.step(cancelled=["kv-a"])
    steps[0].end()
    steps[1].end()
    eventually(lambda: [owner.generation(block_id) for block_id in (3, 4, 5)] == [1, 2, 3])
    owner.step(cancelled=["kv-b"])
    assert [owner.generation(block_id) for block_id in (3, 4, 5)] == [BROKEN] * 3


def test_what_has_ended_before_the_device_is_done_is_never_sealed(ranks, eventually):
    owner = ranks("p", 10, is_on_device=True)
    cancelled, last = Step(), Step()
    owner.side.seal(RankOrders(seals=[seal_order("a", [3])]), cancelled)
    owner.side.seal(RankOrders(seals=[seal_order("b", [4], 9)]), last)
    owner.step(cancelled=["kv-a"])
    cancelled.end()
    last.end()
    eventually(lambda: owner.generation(4) == 9)
    assert owner.generation(3) == BROKEN


def test_a_reader_that_is_faster_than_the_device_waits_for_the_seals(ranks, eventually):
    owner, reader, step = ranks("p", 10, is_on_device=True), ranks("d", 100, unsealed_patience_s=20.0), Step()
    order = seal_order("a", [3, 4])
    owner.side.seal(RankOrders(seals=[order]), step)
    load = load_order(order, owner, [7, 8])
    reader.step(holds=[load.handoff], loads=[load])
    eventually(lambda: reader.content(7) == 13)
    owner.pool.buffer[3 * SIZE : 5 * SIZE] = bytes([77]) * (2 * SIZE)  # the step goes on writing
    step.end()
    report = reader.wait_for("load")
    assert (report.failed_recving, report.invalid_block_ids) == (set(), set())
    assert [reader.content(block_id) for block_id in (7, 8)] == [77, 77]


def test_a_device_that_fails_ends_the_engine(ranks):
    owner, step = ranks("p", 10, is_on_device=True), Step()
    owner.side.seal(RankOrders(seals=[seal_order("a", [3])]), step)
    step.end(RuntimeError("CUDA error: an illegal memory access was encountered"))
    owner.side.stop()
    with pytest.raises(RuntimeError, match="has died"):
        owner.step()


def test_a_lease_that_ends_before_it_is_published_is_reported_afterwards(ranks):
    owner = ranks("p", 10, lease_s=0.05)
    order = seal_order("a", [3, 4])
    owner.step(seals=[order])
    end = time.monotonic() + 10
    while owner.generation(3) != BROKEN and time.monotonic() < end:
        assert owner.step().finished_sending == set()
        time.sleep(0.005)
    assert owner.generation(3) == BROKEN
    assert owner.step(published=[order.transfer_id]).finished_sending == {"a"}


def test_a_cancelled_handoff_breaks_its_seals_at_once_and_is_never_reported(ranks):
    owner = ranks("p", 10, lease_s=0.2)
    order = seal_order("a", [3, 4])
    owner.step(seals=[order])
    assert owner.generation(3) == 1
    owner.side.begin_step(RankOrders(cancelled=[order.transfer_id]))
    assert owner.generation(3) == owner.generation(4) == BROKEN
    end = time.monotonic() + 10
    while owner.side.num_held_blocks() and time.monotonic() < end:
        time.sleep(0.005)
    assert owner.side.num_held_blocks() == 0
    assert owner.step().finished_sending == set()


def corrupt(owner):
    owner.pool.buffer[4 * SIZE + 100] ^= 1


def reseal(owner):
    owner.pool.seals.seal(4, ExpectedSeal(99, 0, b"x" * 16, 32))


@pytest.mark.parametrize(("spoil", "reason"), [(corrupt, "digest"), (reseal, "stale")])
@pytest.mark.parametrize("can_name_blocks", [True, False])
def test_one_bad_block_is_named_or_fails_the_load(ranks, spoil, reason, can_name_blocks):
    owner, reader = ranks("p", 10), ranks("d", 100, can_name_blocks=can_name_blocks)
    order = seal_order("a", [3, 4, 5])
    owner.step(seals=[order])
    spoil(owner)
    load = load_order(order, owner, [7, 8, 9])
    reader.step(holds=[load.handoff], loads=[load])
    report = reader.wait_for("load")
    assert report.invalid_block_ids == ({8} if can_name_blocks else set())
    assert report.failed_recving == (set() if can_name_blocks else {"load"})
    assert reader.side.take_counts().failures == {reason: 1}


def test_all_parts_of_a_load_end_at_one_deadline(ranks, monkeypatch):
    """Each of four ranks of P has a part; the load may not take four times as long as one from a single rank."""
    reader, owner = ranks("d", 100, num_kv_heads=4, transfer_deadline_s=7.0), ranks("p", 0)
    posted = []
    monkeypatch.setattr(reader.side._agent.driver, "post", posted.append)
    load = load_order(seal_order("r", [3, 4]), owner, [5, 6])
    parts = replace(load, handoff=RemoteHandoff(load.handoff.transfer_id, (owner.peer,) * 4))
    before = SystemClock().now()
    reader.step(loads=[parts])
    (first,) = posted[0].pulls
    assert before + 7.0 <= first.deadline <= SystemClock().now() + 7.0
    others = []
    while isinstance(part := reader.side._parts.end(LoadEnded((others or [first])[-1].request_id, None)), PullRequest):
        others.append(part)
    assert [part.deadline for part in others] == 3 * [first.deadline]


def test_a_lost_peer_fails_the_load(ranks):
    owner, reader = ranks("p", 10), ranks("d", 100)
    order = seal_order("a", [3, 4])
    owner.step(seals=[order])
    load = load_order(order, owner, [7, 8])
    owner.side.stop()
    reader.step(holds=[load.handoff], loads=[load])
    assert reader.wait_for("load").failed_recving == {"load"}
    assert reader.side.take_counts().failures == {"peer_lost": 1}


def test_shm_is_refused_with_the_reason_and_the_next_transport_is_used(ranks, caplog):
    with pytest.raises(ConnectorUnavailable, match="the KV pool or its seals do not lie in an anonymous memory file"):
        ranks("p", 10, transports=("shm",))
    assert list(ranks("p", 10, transports=("shm", "tcp")).address.transports) == ["tcp"]
    assert "memory file" in caplog.text


def test_an_address_that_cannot_be_bound_is_refused_by_the_settings(ranks):
    used = ranks("early", 0).address.control_address
    with pytest.raises(ConfigError, match=f"^kvferry.host, kvferry.port: cannot bind {used}"):
        ranks("late", 50, port=int(used.rpartition(":")[2]))


def test_the_engine_does_not_go_on_without_its_agent(ranks):
    rank = ranks("p", 10)
    rank.side._on_failure(ValueError("a bug"))
    with pytest.raises(RuntimeError, match="has died"):
        rank.step()


def test_a_shared_block_stays_sealed_until_its_last_handoff_ends():
    pool = pool_of(0, 5)
    sealer = Sealer(pool.seals)
    one, two = seal_order("a", [3, 4]), seal_order("b", [3, 4, 5])
    for order in (one, two):
        sealer.begin(order)
        sealer.seal(order)
    sealer.end("kv-a")
    sealer.end("kv-a")
    assert [pool.seals.sealed_generation(block_id) for block_id in (3, 4, 5)] == [1, 2, 3]
    sealer.end("kv-b")
    assert [pool.seals.sealed_generation(block_id) for block_id in (3, 4, 5)] == [BROKEN] * 3
    assert len(sealer) == 0
