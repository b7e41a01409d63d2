"""Random histories of a reader and two owners: real agents, executor, staging area, seals and leases; what is between by hand.

What happens is drawn from a seed: owners die, freeze, rewrite blocks without leases and choose transports as they like;
connections break; reads fail, stall or bring wrong bytes. Whatever happens, each load is reported once, what is accepted is
what the owner computed, nothing is written into a block that is free, and nothing stays open.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import pytest

from connectors.p2p.actions import (
    CloseControl,
    ControlLost,
    ControlReceived,
    ExpectHandoff,
    HandoffRef,
    MeetPeer,
    OpenPeer,
    PeerFenced,
    PullRequest,
    QuarantineEnded,
    SendControl,
    TransferCommand,
    TransferReport,
    TransportBroken,
    TransportRestored,
)
from connectors.p2p.agent import P2PAgent
from connectors.p2p.consumer.block_mapping import TokenExtent, map_group
from connectors.p2p.consumer.transport_health import BreakerTerms
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.producer.leases import LeaseTerms
from connectors.p2p.settings import AgentSettings, PullSettings
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transfer.staging import map_staging_area
from connectors.p2p.transport.interface import PeerId, regions_of
from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.testing.fault_transport import FaultPlan, FaultTransport
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from core.digest import BlockDigester
from core.kv.seals import each_by_itself
from core.machine_driver import TimerDue
from core.testing.clock import FakeClock
from core.testing.hash_model import SLOT_BYTES, hash_model_region
from core.wire.kv import Handshake

NAMES = ("shm", "tcp")
ADDRESSES = ("tcp://10.0.0.1:5600", "tcp://10.0.0.2:5600")
NUM_BLOCKS = 48
NUM_STEPS = 1200
NUM_LAST_ROUNDS = 2000
SHOWN = (
    *("loads", "accepted blocks", "aborts", "peer_lost", "deadline", "stale", "protocol_error", "quarantined_blocks"),
    *("broken_transports", "restored_transports"),
)


def by_token(content):
    """View a block as [1, tokens, bytes]."""
    return np.frombuffer(content, dtype=np.uint8).reshape(1, -1, SLOT_BYTES)


@dataclass
class Pull:
    """A load, and the content of the blocks of its handoff."""

    request: PullRequest
    contents: dict[int, bytes]


class History:
    """A reader, two owners, and what happens to them. ``happened`` counts it."""

    def __init__(self, make_owner, make_identity, seed):
        self.rng = rng = random.Random(seed)
        self.make_owner, self.make_identity = make_owner, make_identity
        self.clock, self.fabric = FakeClock(), InprocFabric()
        self.size = rng.choice((16, 32, 48))  # tokens of a block
        self.remote_size = rng.choice((16, 32, self.size))
        self.settings = AgentSettings(
            pull=PullSettings(
                transfer_deadline_s=rng.choice((3.0, 10.0)),
                transfer_stall_s=rng.choice((1.0, 5.0)),
                breaker=BreakerTerms(retry_s=0.5, retry_max_s=4.0, probe_timeout_s=1.0),
                handshake_timeout_s=2.0,
                lease_renew_interval_s=1.0,
                lease_margin_s=0.2,
                kv_verify="digest",
                max_quarantined_blocks=rng.choice((4, 12)),
                max_quarantined_blocks_in_total=24,
                fence_grace_s=0.5,
                max_read_bytes=SLOT_BYTES * 16 * rng.choice((2, 4, 8)),
                max_reads_in_flight=rng.choice((1, 2, 4)),
            ),
            leases=LeaseTerms(5.0, 4.0, 20.0),
        )
        self._build_reader()
        self.num_lives = 0
        self.owners = {address: self.new_life(address) for address in ADDRESSES}
        self.links = {}  # control connections by address
        self.offered: dict[str, tuple[str, ...]] = {}  # by address, in the last handshake
        self.waiting: list[Pull] = []  # handed off, not begun
        self.loading: dict[str, Pull] = {}
        self.quarantined: set[int] = set()
        self.held = set()
        self.free = {block_id: self.read_block(block_id) for block_id in range(1, NUM_BLOCKS)}  # and what they hold
        self.num_pulls = 0
        self.happened: Counter[str] = Counter()

    def _build_reader(self):
        digest = BlockDigester(self.size * SLOT_BYTES).digest
        self.region = hash_model_region(NUM_BLOCKS, self.size, 77, digest)
        self.staging = map_staging_area(self.region, self.rng.choice((6, 12, 20)) * self.remote_size * SLOT_BYTES)
        transports = {name: self._faulty(name) for name in NAMES}
        digest_blocks = each_by_itself(lambda block_id: digest(memoryview(self.read_block(block_id))))
        self.events, self.commands = deque(), deque()
        self.executor = TransferExecutor(
            transports, self.region.seals, digest_blocks, self.report, self.clock.now, self.staging
        )
        self.agent = P2PAgent(self.make_identity("decode", 77, layout=self.region.layout), NAMES, self.settings)

    def report(self, event, at):
        self.events.append((event, at))

    def _faulty(self, name):
        rng = self.rng
        inner = InprocTransport(self.fabric, late_bytes=rng.random() < 0.5)
        inner.name = name
        some = [{number for number in range(1, 500) if rng.random() < rate} for rate in (0.02, 0.02, 0.05, 0.03)]
        refuse, fail, stall, corrupt = some
        if self.remote_size != self.size:
            corrupt.clear()  # these reads go to the staging area, about which the plan knows nothing
        transport = FaultTransport(inner, FaultPlan(refuse, fail, stall, corrupt, ignore_cancel=rng.random() < 0.3))
        transport.reads_in_order = rng.random() < 0.5  # a stalled read breaks the promise: its seals are refused then
        transport.register(regions_of(self.region), self.staging.region)
        return transport

    def run(self):
        happenings = {
            self.make_handoff: 3,
            self.meet: 1,
            self.begin: 3,
            self.abort: 0.5,
            self.carry_out: 18,
            self.executor.poll: 25,
            self.take_events: 15,
            self.talk: 15,
            self.freeze_or_thaw: 1,
            self.restart: 0.15,
            self.disconnect: 0.2,
            self.break_data_connection: 0.2,
            self.tick: 3,
            self.rewrite: 4,
            self.check: 5,
        }
        for happening in self.rng.choices(list(happenings), list(happenings.values()), k=NUM_STEPS):
            happening()
        self.finish()
        return self.happened

    # ---- what may happen

    def new_life(self, address):
        self.num_lives += 1
        return self.make_owner(self, address, self.num_lives)

    def some_owner(self):
        return self.owners[self.rng.choice(ADDRESSES)]

    def restart(self):
        owner = self.some_owner()
        owner.die()
        self.owners[owner.address] = self.new_life(owner.address)

    def freeze_or_thaw(self):
        self.some_owner().freeze(self.rng.random() < 0.3)

    def rewrite(self):
        self.some_owner().rewrite_something()

    def make_handoff(self):
        rng, owner, name = self.rng, self.some_owner(), f"r{self.num_pulls}"
        if len(self.free) < 6 * self.remote_size // self.size + 1:
            return
        self.num_pulls += 1
        group = owner.make_handoff(name)
        end = len(group.block_ids) * owner.block_size
        local_ids = rng.sample(sorted(self.free), -(-end // self.size))
        start = rng.randrange(len(local_ids)) * self.size
        extent = TokenExtent(group_id=0, start=start, end=end, local_block_size=self.size, remote_block_size=owner.block_size)
        units = tuple(map_group(extent, group, local_ids, group.block_hashes).units)
        handoff = HandoffRef(f"t-{name}", PeerId(owner.address, owner.incarnation))
        deadline = None if rng.random() < 0.7 else self.clock.now() + rng.uniform(0, 6)
        request = PullRequest(name, handoff, units, end - start, deadline, owner.region.layout)
        for block_id in request.local_rows:
            del self.free[block_id]
        if self.rng.random() < 0.5:
            self.take_in(ExpectHandoff(handoff))
            if self.rng.random() < 0.2:  # the engine refuses it
                self.give_back(request.local_rows)
                return
        self.waiting.append(Pull(request, {block_id: owner.contents[block_id] for block_id in group.block_ids}))

    def meet(self):
        """The router tells of a producer, which may be another by now."""
        owner = self.some_owner()
        self.take_in(MeetPeer(PeerId(owner.address, owner.incarnation - (self.rng.random() < 0.1))))

    def begin(self):
        if not self.waiting:
            return
        pull = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        self.loading[pull.request.request_id] = pull
        self.held.add(pull.request.handoff)
        self.take_in(P2PConnectorMetadata(pulls=[pull.request]))

    def abort(self):
        if self.loading:
            self.take_in(P2PConnectorMetadata(aborts=[self.rng.choice(list(self.loading))]))

    def disconnect(self):
        if self.links:
            self.lose_link(self.rng.choice(list(self.links)))

    def break_data_connection(self):
        if self.executor._peers:
            peer = self.rng.choice(list(self.executor._peers))
            self.executor._peers[peer].inner.break_off(peer)

    def lose_link(self, address):
        del self.links[address]
        self.take_in(ControlLost(address))

    def carry_out(self):
        """Let the transfer thread take commands."""
        for _ in range(min(self.rng.randint(1, 5), len(self.commands))):
            self.executor.execute(self.commands.popleft())

    def take_events(self):
        """Let the event loop take what the transfer thread has reported."""
        for _ in range(min(self.rng.randint(1, 3), len(self.events))):
            self.take_in(TransferReport(*self.events.popleft()))

    def talk(self):
        """Let a message arrive, or the end of a connection."""
        if not self.links:
            return
        address = self.rng.choice(list(self.links))
        link = self.links[address]
        if not link.owner.is_alive:
            self.lose_link(address)
        elif link.owner.is_frozen:
            return
        elif link.questions and self.rng.random() < 0.5:
            link.answers += link.owner.answer(link.questions.popleft())
        elif link.answers:
            self.take_in(ControlReceived(address, link.answers.popleft()))

    def tick(self):
        self.clock.advance(self.rng.choice((0.01, 0.1, 0.5)))
        for owner in self.owners.values():
            if not owner.is_frozen:
                owner.end_leases(owner.take_in(TimerDue()))
        if (due := self.agent.consumer.next_timer()) is not None and due <= self.clock.now():
            self.take_in(TimerDue())
            due = self.agent.consumer.next_timer()
            assert due is None or due > self.clock.now(), "the timer is due again at once"

    def finish(self):
        """Let every owner answer: then every load ends, and every read."""
        for owner in self.owners.values():
            owner.freeze(False)
        while self.waiting:
            self.begin()
        for _ in range(NUM_LAST_ROUNDS):
            for happening in (
                self.carry_out,
                self.executor.poll,
                self.take_events,
                self.talk,
                self.talk,
                self.tick,
                self.check,
            ):
                happening()
            if not (self.loading or self.quarantined or self.commands or self.events or self.executor._reads):
                break
        assert not self.loading
        assert not self.quarantined
        assert self.agent.consumer.num_quarantined_blocks == 0
        self.release_all()
        assert len(self.free) == NUM_BLOCKS - 1
        self.check_executor()
        self.happened += Counter({name: count for name, count in self.agent.counts().items() if count})

    def release_all(self):
        """Let go of every handoff but those that were only expected; these are forgotten."""
        self.take_in(P2PConnectorMetadata(releases=sorted(self.held, key=str)))
        for _ in range(NUM_LAST_ROUNDS):
            if (due := self.agent.consumer.next_timer()) is None:
                break
            self.clock.advance(due - self.clock.now())
            self.take_in(TimerDue())
        assert len(self.agent.consumer.leases) == 0

    def check_executor(self):
        """Nothing is kept of reads that have ended, nor of peers that are closed."""
        executor = self.executor
        assert [*executor._reads, *executor._next, *executor._read_ids] == []
        assert executor._pools.keys() == executor._bytes_seen.keys() == executor._peers.keys()
        assert self.staging.num_taken_bytes == 0

    # ---- what the reader wants, and what must hold

    def take_in(self, event):
        self.take(self.agent.consumer.handlers[type(event)](event, self.clock.now()))

    def take(self, actions):
        for action in actions:
            match action:
                case SendControl():
                    link = self.links.setdefault(action.address, self.owners[action.address].connect())
                    link.questions.append(action.message)
                    if isinstance(action.message, Handshake):
                        self.offered[action.address] = action.message.transports
                case CloseControl():
                    self.links.pop(action.address, None)
                case LoadEnded():
                    self.end_load(action)
                case QuarantineEnded():
                    assert self.quarantined.issuperset(action.block_ids)
                    self.quarantined.difference_update(action.block_ids)
                    self.give_back(action.block_ids)
                case PeerFenced():
                    assert action.num_blocks
                case TransportBroken() | TransportRestored():
                    pass  # counted by the agent
                case _:
                    self.command(action)

    def command(self, action):
        assert isinstance(action, TransferCommand)
        if isinstance(action, OpenPeer):
            assert action.transport in self.offered[action.peer.address]
        self.commands.append(action)

    def end_load(self, ended):
        pull = self.loading.pop(ended.request_id)
        request = pull.request
        late = set(ended.quarantined_block_ids)
        usable = set()
        if ended.usage is not None and ended.invalid_block_ids is not ALL_BLOCKS:
            usable = set(request.local_rows).difference(ended.invalid_block_ids)
        assert not usable & late
        for unit in request.units:
            assert len(usable.intersection(unit.local_rows)) in (0, len(unit.local_rows)), "a unit is accepted as a whole"
            if usable.issuperset(unit.local_rows):
                self.check_accepted(unit, pull)
        self.quarantined |= late
        self.give_back(set(request.local_rows) - late)
        self.happened[ended.error.code if ended.error else "loads" if ended.usage else "aborts"] += 1
        if self.rng.random() < 0.9:
            self.take_in(P2PConnectorMetadata(releases=[request.handoff]))

    def check_accepted(self, unit, pull):
        """Our blocks hold what the owner's held at the handoff."""
        self.happened["accepted blocks"] += len(unit.local_rows)
        if not unit.copies:
            assert self.read_block(unit.local_rows[0]) == pull.contents[unit.remote_rows[0]]
        for copy in unit.copies:
            wanted = by_token(pull.contents[copy.remote_row])[:, copy.remote_start :][:, : copy.num_tokens]
            found = by_token(self.read_block(copy.local_row))[:, copy.local_start :][:, : copy.num_tokens]
            assert np.array_equal(found, wanted)

    def read_block(self, block_id):
        start = block_id * self.region.block_bytes
        return bytes(self.region.buffer[start : start + self.region.block_bytes])

    def give_back(self, block_ids):
        self.free |= {block_id: self.read_block(block_id) for block_id in block_ids}

    def check(self):
        """Nobody writes into a block that no load has."""
        for block_id, content in self.free.items():
            assert self.read_block(block_id) == content, f"block {block_id} is free"


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [*range(0, 80, 40), *(pytest.param(start, marks=pytest.mark.full) for start in range(80, 1200, 40))]
)
def test_random_histories_end_well(make_owner, make_identity, start):
    happened = Counter()
    for seed in range(start, start + 40):
        happened += History(make_owner, make_identity, seed).run()
    for what in SHOWN:
        assert happened[what] > 0, f"no {what}: the histories show nothing"
