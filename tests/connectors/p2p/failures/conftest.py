"""Two real agents and what is between them: the table "Aborts, death, restart" of the design is played on it, row by row.

Executors, memory and seals are real, time is the test's. Messages arrive at once unless the owner is frozen or dead, reads end
when polled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from connectors.p2p.actions import (
    Action,
    CloseControl,
    ControlLost,
    ControlReceived,
    HandoffRef,
    LeaseGrant,
    LogEntry,
    PullRequest,
    QuarantineEnded,
    Reply,
    Report,
    SendControl,
    TransferCommand,
    TransferEvent,
    TransferReport,
    row_units,
)
from connectors.p2p.agent import P2PAgent
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.producer.leases import LeaseTerms
from connectors.p2p.settings import AgentSettings, PullSettings
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transport.interface import PeerId, RowRegion
from connectors.reports import LoadEnded
from connectors.testing.fault_transport import FaultPlan, FaultTransport
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.transport_owner import HostRows
from core.errors import PeerUnreachable, fallback_reason
from core.kv.seals import ExpectedSeal, SealTable, each_by_itself, layout_fingerprint, map_seal_memory
from core.machine_driver import TimerDue
from core.testing.clock import FakeClock
from core.wire.kv import ControlMessage

ADDRESS = "tcp://10.0.0.1:5600"
NUM_BLOCKS = 32
LEASE_S = 10.0
DEADLINE_S = 30.0
DIGEST = 1 << 40  # of a block: this and its first byte


class DeniedTransport(InprocTransport):
    """Cannot reach any peer, like shared memory of another user."""

    name = "denied"

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        raise PeerUnreachable("permission denied")


class Worker:
    """An agent with memory, seals and transports, but no engine; ``reports`` is what its engine would receive."""

    def __init__(
        self,
        identity: WorkerIdentity,
        clock: FakeClock,
        fabric: InprocFabric,
        kv_verify: str,
        transports: tuple[str, ...] = ("inproc",),
    ) -> None:
        self.identity = identity
        self.memory = HostRows(NUM_BLOCKS, identity.layout.block_bytes)
        version = layout_fingerprint(identity.layout)
        self.seals = SealTable(map_seal_memory(NUM_BLOCKS), identity.incarnation, version, each_by_itself(self.digest))
        self.plan = FaultPlan()
        self.inproc = InprocTransport(fabric, late_bytes=True)
        self.transport = FaultTransport(self.inproc, self.plan)
        self.transport.register([self.memory.region, RowRegion.of_seals(self.seals)])
        self.reports: list[Report] = []
        self.events: list[tuple[TransferEvent, float]] = []
        by_name = {"denied": DeniedTransport(fabric), "inproc": self.transport}
        self.executor = TransferExecutor(by_name, self.seals, each_by_itself(self.digest), self.report, clock.now)
        offers = {"denied": b"", "inproc": self.transport.describe()}
        settings = AgentSettings(
            pull=PullSettings(
                transfer_deadline_s=DEADLINE_S,
                handshake_timeout_s=5.0,
                lease_renew_interval_s=3.0,
                kv_verify=kv_verify,
                max_read_bytes=2 * identity.layout.block_bytes,
            ),
            leases=LeaseTerms(LEASE_S, LEASE_S, 60.0),
        )
        responder = HandshakeResponder(identity, NUM_BLOCKS, offers, self.seals.has_digests)
        self.agent = P2PAgent(identity, transports, settings, responder)

    def report(self, event: TransferEvent, at: float) -> None:
        self.events.append((event, at))

    def digest(self, block_id: int) -> int:
        return DIGEST + int(self.memory.rows[block_id, 0])

    def write(self, block_id: int, content: int, generation: int = 1) -> ExpectedSeal:
        """Allocate, compute and seal a block; returns what its seal is."""
        self.seals.break_seals([block_id])
        self.memory.rows[block_id] = content
        seal = ExpectedSeal(generation, 0, content.to_bytes(16, "little"), 32)
        self.seals.seal(block_id, seal)
        return seal

    def loads(self) -> dict[str, LoadEnded]:
        return {report.request_id: report for report in self.reports if isinstance(report, LoadEnded)}


class World:
    """A consumer, and the process at ``ADDRESS``; ``owner`` may be dead."""

    address, num_blocks, lease_s, deadline_s = ADDRESS, NUM_BLOCKS, LEASE_S, DEADLINE_S

    def __init__(self, make_identity: Callable[..., WorkerIdentity]) -> None:
        self.clock = FakeClock()
        self.fabric = InprocFabric()
        self.make_identity = make_identity
        self.workers: list[Worker] = []
        self.is_frozen = False
        self.owner: Worker | None = self.add("prefill-0", 1)
        self.reader = self.add("decode-0", 99)
        self.sent: list[ControlMessage] = []
        self._held_back: list[ControlMessage] = []

    def add(
        self,
        engine_id: str,
        incarnation: int,
        kv_verify: str = "identity",
        transports: tuple[str, ...] = ("inproc",),
        **changed: object,
    ) -> Worker:
        identity = self.make_identity(engine_id, incarnation, **changed)
        worker = Worker(identity, self.clock, self.fabric, kv_verify, transports)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.executor.close()
            worker.memory.close()

    # ---- what happens

    def make_handoff(self, request_id: str = "r", first: int = 4, num_blocks: int = 6, rows: int = 20) -> PullRequest:
        """Compute blocks on the owner, grant their lease, and return what the reader's engine would ask for."""
        assert self.owner is not None
        remote = tuple(range(first, first + num_blocks))
        expected = tuple(self.owner.write(row, content=100 + row) for row in remote)
        transfer_id = f"transfer of {request_id}"
        self.take_in(self.owner, LeaseGrant(transfer_id, request_id, num_blocks))
        ref = HandoffRef(transfer_id, PeerId(ADDRESS, self.owner.identity.incarnation))
        local = tuple(range(rows, rows + num_blocks))
        return PullRequest(request_id, ref, row_units(remote, local, expected), 32 * num_blocks)

    def tell_reader(self, **news: object) -> None:
        self.take_in(self.reader, P2PConnectorMetadata(**news))

    def load(self, request: PullRequest, *, settle: bool = True) -> None:
        self.tell_reader(pulls=[request])
        if settle:
            self.settle()

    def settle(self) -> None:
        """Let transfers run until nothing more comes of them."""
        while any(worker.executor.poll() or worker.events for worker in self.workers):
            for worker in self.workers:
                while worker.events:
                    self.take_in(worker, TransferReport(*worker.events.pop(0)))

    def wait(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        end = self.clock.now() + seconds
        while True:
            awake = [worker for worker in self.workers if worker is not self.owner or not self.is_frozen]
            machines = [(worker, machine) for worker in awake for machine in (worker.agent.consumer, worker.agent.producer)]
            times = [(machine.next_timer(), index) for index, (_, machine) in enumerate(machines)]
            due = [(time, index) for time, index in times if time is not None]
            time, index = min(due, default=(end + 1, 0))
            if time > end:
                break
            self.clock.advance(max(0.0, time - self.clock.now()))
            worker, machine = machines[index]
            self.carry_out(worker, machine.handlers[TimerDue](TimerDue(), self.clock.now()))
            self.settle()
        self.clock.advance(end - self.clock.now())
        self.settle()

    def freeze(self) -> None:
        assert self.owner is not None
        self.is_frozen = True
        self.fabric.set_frozen(self.owner.inproc.number, True)

    def thaw(self) -> None:
        assert self.owner is not None
        self.is_frozen = False
        self.fabric.set_frozen(self.owner.inproc.number, False)
        self.take_in(self.owner, TimerDue())
        held_back, self._held_back = self._held_back, []
        for message in held_back:
            self.deliver(self.reader, message)
        self.settle()

    def kill(self) -> None:
        """Kill the owner; the reader's connection breaks."""
        assert self.owner is not None
        self.fabric.kill(self.owner.inproc.number)
        self.workers.remove(self.owner)
        self.owner = None
        self.take_in(self.reader, ControlLost(ADDRESS))
        self.settle()

    def restart(self, **changed: object) -> Worker:
        """Start another incarnation at the same address."""
        self.owner = self.add("prefill-0", 2, **changed)
        return self.owner

    # ---- what the agents want

    def take_in(self, worker: Worker, event: object) -> list[Action]:
        """Let the reader's consumer or an owner's producer handle an event."""
        machine = worker.agent.consumer if worker is self.reader else worker.agent.producer
        actions = list(machine.handlers[type(event)](event, self.clock.now()))
        self.carry_out(worker, actions)
        return actions

    def carry_out(self, worker: Worker, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Report):
                worker.reports.append(action)
            elif isinstance(action, TransferCommand):
                worker.executor.execute(action)
            elif isinstance(action, SendControl):
                self.sent.append(action.message)
                self.deliver(worker, action.message)
            else:
                assert isinstance(action, CloseControl | LogEntry | Reply)

    def deliver(self, sender: Worker, message: ControlMessage) -> None:
        if self.is_frozen:
            self._held_back.append(message)
            return
        if self.owner is None:
            self.take_in(sender, ControlLost(ADDRESS))
            return
        answers = self.take_in(self.owner, message)
        for answer in answers:
            if isinstance(answer, Reply):
                self.take_in(sender, ControlReceived(ADDRESS, answer.message))

    # ---- what is true in the end

    def reason(self, request_id: str = "r") -> str:
        error = self.reader.loads()[request_id].error
        return "" if error is None else fallback_reason(error.code)

    def assert_quiet(self) -> None:
        """Check that the reader has nothing open, and that as many quarantines were reported to end as to begin."""
        agent = self.reader.agent.consumer
        assert (agent.num_loading_blocks, agent.num_quarantined_blocks) == (0, 0)
        began = [row for load in self.reader.loads().values() for row in load.quarantined_block_ids]
        ended = [row for report in self.reader.reports if isinstance(report, QuarantineEnded) for row in report.block_ids]
        assert sorted(began) == sorted(ended)
        assert len([report for report in self.reader.reports if isinstance(report, LoadEnded)]) == len(self.reader.loads())

    def has_content(self, request: PullRequest) -> bool:
        return all(
            (self.reader.memory.rows[local] == 100 + remote).all()
            for remote, local in zip(request.remote_rows, request.local_rows, strict=True)
        )


@pytest.fixture
def world(make_identity) -> Iterator[World]:
    world = World(make_identity)
    yield world
    world.close()
