"""Clients of a store under faults from a seed: no wrong byte, no write into a slot of others, no leak."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from core.errors import CorruptBlock, StaleBlock
from core.ids import SeededIds
from kvferry.sim.eventlog import EventLog
from kvferry.sim.host import Host, World
from kvferry.sim.loop import EventLoop, Process
from kvferry.sim.network import Network, NetworkWeather
from kvferry.sim.store import CLIENT_TIMEOUT_S, SimStoreClient
from kvferry.sim.stores import SharedStore
from kvferry.sim.tier_plan import STORE, TierPlan
from kvferry.sim.transport import ReadWeather, SimFabric
from kvstore.base import GetTicket, PutTicket, Ticket
from kvstore.testing.blocks import make_block

BLOCK_BYTES = 64
NUM_BLOCKS = 16
NUM_SLOTS = 8
NUM_CLIENTS = 3
WORK_S, QUIET_S = 30.0, 60.0
FREEZE, DEATH, CRASH, CUT, CORRUPTION = 0.03, 0.02, 0.01, 0.02, 0.06  # per step of a client's work
LOSS = 0.03  # of messages, each way
COPY_S = 0.02  # after about so long a put copies


class StoreRun:
    """Clients that look up, get and put at random, each on a process of its own."""

    def __init__(self, seed: int, *, has_faults: bool, write_back: bool) -> None:
        self.num_reads = self.num_rejected = 0
        self.happened: Counter[str] = Counter()
        self._random = Random(seed)
        self._ids = SeededIds(seed)
        self._rates = (FREEZE, DEATH, CRASH, CUT, CORRUPTION) if has_faults else ()
        self._is_over = False
        self.loop = EventLoop()
        self._network = Network(self.loop, Random(seed), NetworkWeather(), may_repeat=lambda frame: False)
        fabric = SimFabric(self.loop, self._network, Random(seed), ReadWeather())
        log = EventLog(lambda: self.loop.now, is_kept=False)
        self._world = World(self.loop, self._network, fabric, Random(seed), log)
        plan = TierPlan(
            seed=seed,
            name="store",
            kinds=frozenset(),
            workers=(),
            num_slots=NUM_SLOTS,
            eviction="arc",
            write_back=write_back,
            num_lower_tiers=2,
            remote_workers=frozenset(f"worker-{number}" for number in range(0, 100, 3)),
            loss_rate=LOSS if has_faults else 0.0,
            question_loss_rate=LOSS if has_faults else 0.0,
        )
        self._blocks = [make_block(number, BLOCK_BYTES) for number in range(NUM_BLOCKS)]
        self.store = SharedStore(self._world, plan)
        self.store.start()
        self.clients: dict[str, SimStoreClient] = {}
        self._tickets: dict[str, list[Ticket]] = {}
        self._num_started = 0
        for _ in range(NUM_CLIENTS):
            self._start_client()

    def run(self) -> StoreRun:
        """Work under faults, then be quiet, and check that nothing is left."""
        self._run_until(WORK_S)
        self._is_over = True
        self.store.calm_down()
        self._run_until(WORK_S + QUIET_S)
        assert self.store.leftovers() == []
        for name, client in self.clients.items():
            assert all(ticket.is_done for ticket in self._tickets[name])
            assert not any(client.leftovers().values()), (name, client.leftovers())
        return self

    def on_copy(self, source: memoryview) -> None:
        """A block is being read to be stored."""

    def _run_until(self, end: float) -> None:
        while self.loop.now < end:
            assert self.loop.run_next()

    def _start_client(self) -> None:
        name = f"worker-{self._num_started}"
        self._num_started += 1
        process = Process(self.loop, name)
        client = self.store.connect(Host(self._world, process), BLOCK_BYTES, self._ids)
        client.watch = self
        self.clients[name], self._tickets[name] = client, []

        def work() -> None:
            if self._is_over:
                return
            self._work(client, process)
            if self._rates:
                self._fail(process)
            process.call_later(self._random.random() * 0.4, work)

        process.call_later(self._random.random(), work)

    def _work(self, client: SimStoreClient, process: Process) -> None:
        blocks = self._random.sample(self._blocks, self._random.randint(1, 5))
        keys = [block.key for block in blocks]
        ticket: Ticket
        match self._random.choice(["lookup", "get", "get", "put", "put"]):
            case "lookup":
                ticket = client.lookup(keys)
            case "get":
                ticket = got = client.get(keys)
                process.call_later(self._random.random() * 3, lambda: self._read(client, got))
            case _:
                sources = [memoryview(bytearray(block.content)) for block in blocks]
                ticket = stored = client.put(keys, sources, [block.seal for block in blocks])
                process.call_later(0.0, lambda: self._reuse(process, stored, sources))
        self._tickets[process.name].append(ticket)

    def _reuse(self, process: Process, ticket: PutTicket, sources: list[memoryview]) -> None:
        """Use the memory of a put for something else as soon as it is done."""
        if not ticket.is_done:
            process.call_later(0.01, lambda: self._reuse(process, ticket, sources))
            return
        for source in sources:
            source[:] = bytes(len(source))

    def _read(self, client: SimStoreClient, ticket: GetTicket) -> None:
        """Read what a get has brought, however late, and give it back."""
        content_of = {block.key: block.content for block in self._blocks}
        for found in ticket.blocks:
            if found is not None:
                target = memoryview(bytearray(found.content.nbytes))
                try:
                    client.copy_out(found, target)
                except (CorruptBlock, StaleBlock):
                    self.num_rejected += 1
                    continue
                self.num_reads += 1
                assert target == content_of[found.key]
        client.release(ticket)

    def _fail(self, process: Process) -> None:
        does_freeze, dies, store_crashes, is_cut, is_corrupted = (self._random.random() < rate for rate in self._rates)
        if store_crashes:
            self.store.crash(self._random.random() * 0.5)
            self.happened["store crashes"] += 1
        if is_cut:
            self._network.cut(process.name, STORE)
        if is_corrupted:
            self.happened["flipped bits"] += self.store.corrupt()
        if does_freeze:
            self.loop.call_later(self._random.random() * COPY_S, process.freeze)
            self.loop.call_later(COPY_S + self._random.random() * 2.5 * CLIENT_TIMEOUT_S, process.thaw)
        elif dies:
            process.kill()
            del self.clients[process.name]
            self.loop.call_later(0.1, self._start_client)


def run(seed: int, *, has_faults: bool, write_back: bool = False) -> StoreRun:
    return StoreRun(seed, has_faults=has_faults, write_back=write_back).run()


WRITES = pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])


@pytest.mark.slow
@WRITES
def test_in_peace_everything_is_read_and_nothing_rejected(write_back):
    for seed in range(4):
        done = run(seed, has_faults=False, write_back=write_back)
        assert done.num_reads > 100
        assert done.num_rejected == 0


@pytest.mark.slow
@WRITES
@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.full) for start in range(10, 200, 10))])
def test_under_faults_a_block_is_right_or_missing(start, write_back):
    runs = [run(seed, has_faults=True, write_back=write_back) for seed in range(start, start + 10)]
    assert sum(done.num_reads for done in runs) > 250
    assert sum(done.num_rejected for done in runs) > 3
    assert sum(done.happened["store crashes"] for done in runs) > 3


@pytest.mark.slow
def test_a_seed_replays_exactly():
    runs = [run(7, has_faults=True) for _ in range(2)]
    assert len({(done.num_reads, done.num_rejected, done.loop.num_events) for done in runs}) == 1
