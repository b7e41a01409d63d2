"""The table "Aborts, death, restart" of the design, row by row, on real nodes, executors, memory and seals; time is the test's.

Two workers and what is between them: messages arrive at once unless the owner is frozen or dead, reads end when polled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from connectors.p2p.actions import (
    Action,
    CloseControl,
    HandoffRef,
    LeaseGrant,
    LoadEnded,
    P2PConnectorMetadata,
    PullRequest,
    QuarantineEnded,
    Reply,
    Report,
    SendControl,
    SendingEnded,
    TransferCommand,
    TransferEvent,
    row_units,
)
from connectors.p2p.handshake import HandshakeResponder, WorkerIdentity
from connectors.p2p.leases import LeaseTerms
from connectors.p2p.node import NodeSettings, P2PNode
from connectors.p2p.pull import PullSettings
from connectors.p2p.transfer import TransferExecutor
from core.errors import PeerUnreachable, fallback_reason
from core.kv.seals import ExpectedSeal, SealTable, layout_fingerprint, map_seal_memory
from core.testing.clock import FakeClock
from core.testing.fault_transport import FaultPlan, FaultTransport
from core.testing.inproc_transport import InprocFabric, InprocTransport
from core.testing.transport_owner import HostRows
from core.transport import PeerId, RowRegion
from core.wire.kv import ControlMessage, Handshake

ADDRESS = "tcp://10.0.0.1:5600"
NUM_BLOCKS = 32
LEASE_S = 10.0
DEADLINE_S = 30.0
DIGEST = 1 << 40  # of a block: this and its first byte


class DeniedTransport(InprocTransport):
    """Cannot reach anybody, as shared memory of another user."""

    name = "denied"

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        raise PeerUnreachable("permission denied")


class Worker:
    """A node with memory, seals and transports, but no engine; ``reports`` is what its engine would be told."""

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
        self.seals = SealTable(map_seal_memory(NUM_BLOCKS), identity.incarnation, version, self.digest)
        self.plan = FaultPlan()
        self.inproc = InprocTransport(fabric, late_bytes=True)
        self.transport = FaultTransport(self.inproc, self.plan)
        self.transport.register([self.memory.region, RowRegion.of_seals(self.seals)])
        self.reports: list[Report] = []
        self.events: list[TransferEvent] = []
        by_name = {"denied": DeniedTransport(fabric), "inproc": self.transport}
        self.executor = TransferExecutor(by_name, self.seals, self.digest, self.events.append)
        offers = {"denied": b"", "inproc": self.transport.describe()}
        settings = NodeSettings(
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
        self.node = P2PNode(identity, clock, transports, settings, responder)

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
    """A reader, and whoever lives at ``ADDRESS``; ``owner`` may be dead."""

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

    def hand_over(self, request_id: str = "r", first: int = 4, num_blocks: int = 6, rows: int = 20) -> PullRequest:
        """Compute blocks on the owner, grant their lease, and return what the reader's engine would ask for."""
        assert self.owner is not None
        remote = tuple(range(first, first + num_blocks))
        expected = tuple(self.owner.write(row, content=100 + row) for row in remote)
        transfer_id = f"transfer of {request_id}"
        self.carry_out(self.owner, self.owner.node.on_grant(LeaseGrant(transfer_id, request_id, num_blocks)))
        ref = HandoffRef(transfer_id, PeerId(ADDRESS, self.owner.identity.incarnation))
        local = tuple(range(rows, rows + num_blocks))
        return PullRequest(request_id, ref, row_units(remote, local, expected), 32 * num_blocks)

    def tell_reader(self, **news: object) -> None:
        self.carry_out(self.reader, self.reader.node.on_metadata(P2PConnectorMetadata(**news)))

    def load(self, request: PullRequest, *, settle: bool = True) -> None:
        self.tell_reader(pulls=[request])
        if settle:
            self.settle()

    def settle(self) -> None:
        """Let transfers run until nothing more comes of them."""
        while any(worker.executor.poll() or worker.events for worker in self.workers):
            for worker in self.workers:
                while worker.events:
                    self.carry_out(worker, worker.node.on_transfer(worker.events.pop(0)))

    def wait(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        end = self.clock.now() + seconds
        while True:
            awake = [worker for worker in self.workers if worker is not self.owner or not self.is_frozen]
            due = [(time, index) for index, worker in enumerate(awake) if (time := worker.node.next_timer()) is not None]
            time, index = min(due, default=(end + 1, 0))
            if time > end:
                break
            self.clock.advance(max(0.0, time - self.clock.now()))
            self.carry_out(awake[index], awake[index].node.on_timer())
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
        self.carry_out(self.owner, self.owner.node.on_timer())
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
        self.carry_out(self.reader, self.reader.node.on_disconnected(ADDRESS))
        self.settle()

    def restart(self, **changed: object) -> Worker:
        """Start another life at the same address."""
        self.owner = self.add("prefill-0", 2, **changed)
        return self.owner

    # ---- what the nodes want

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
                assert isinstance(action, CloseControl | Reply)

    def deliver(self, sender: Worker, message: ControlMessage) -> None:
        if self.is_frozen:
            self._held_back.append(message)
            return
        if self.owner is None:
            self.carry_out(sender, sender.node.on_disconnected(ADDRESS))
            return
        answers = self.owner.node.on_question(message)
        self.carry_out(self.owner, answers)
        for answer in answers:
            if isinstance(answer, Reply):
                self.carry_out(sender, sender.node.on_control(ADDRESS, answer.message))

    # ---- what is true in the end

    def reason(self, request_id: str = "r") -> str:
        error = self.reader.loads()[request_id].error
        return "" if error is None else fallback_reason(error.code)

    def assert_quiet(self) -> None:
        """Check that the reader has nothing open, and that its quarantine has been told to end as often as to begin."""
        node = self.reader.node
        assert (node.num_loading_blocks, node.num_quarantined_blocks) == (0, 0)
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


def test_the_fault_free_case_loads_everything_and_leaves_nothing(world):
    request = world.hand_over()
    world.load(request)
    assert world.reason() == ""
    assert world.has_content(request)
    world.tell_reader(releases=[request.handoff])
    assert world.owner.reports == [SendingEnded("r")]
    assert world.owner.node.num_leased_blocks == 0
    world.assert_quiet()


# ---- a client disconnects


@pytest.mark.parametrize("phase", ["handshake", "read", "seals"])
def test_abort_is_reported_at_once_in_every_phase_and_what_is_open_is_quarantined(world, phase):
    request = world.hand_over()
    if phase == "handshake":
        world.freeze()
    world.load(request, settle=False)
    if phase == "seals":
        world.reader.plan.stall = {4}
        world.settle()
    world.tell_reader(aborts=["r"])
    load = world.reader.loads()["r"]
    assert (load.error, load.usage) == (None, None)
    assert (
        set(load.quarantined_block_ids)
        == {
            "handshake": set(),
            "read": set(request.local_rows),
            "seals": set(request.local_rows),
        }[phase]
    )
    world.tell_reader(releases=[request.handoff])
    if phase == "handshake":
        world.thaw()
    world.settle()
    world.assert_quiet()
    assert world.owner.node.num_leased_blocks == 0


# ---- D dies


def test_leases_of_a_reader_that_died_end_within_their_term(world):
    request = world.hand_over()
    world.load(request)
    world.workers.remove(world.reader)
    world.wait(LEASE_S - 0.5)
    assert world.owner.node.num_leased_blocks == 6
    world.wait(0.5)
    assert world.owner.reports == [SendingEnded("r")]
    assert world.owner.node.num_leased_blocks == 0
    world.workers.append(world.reader)


# ---- P dies


@pytest.mark.parametrize("when", ["before contact", "before the read", "during the read", "before the seals"])
def test_death_of_the_owner_is_reported_at_once(world, when):
    before = world.hand_over("before", num_blocks=1, first=1, rows=1)
    if when != "before contact":
        world.load(before)
    request = world.hand_over()
    if when == "before contact":
        world.kill()
        world.load(request)
    elif when == "before the read":
        world.tell_reader(holds=[request.handoff])
        world.kill()
        world.load(request)
    elif when == "during the read":
        world.load(request, settle=False)
        world.kill()
    else:
        world.reader.plan.stall = {6}  # 1 and 2 were the first load's, 3 to 5 are the blocks
        world.load(request)
        world.kill()
    assert world.reason() == "peer_lost"
    assert world.reader.loads()["r"].invalid_block_ids == ()
    world.settle()
    world.assert_quiet()
    if when != "before contact":
        assert world.reason("before") == ""


def test_memory_of_a_dead_owner_is_given_up_at_once(world, monkeypatch):
    removed: list[PeerId] = []
    monkeypatch.setattr(world.reader.transport, "remove_peer", removed.append)
    world.load(world.hand_over())
    world.kill()
    assert removed == [PeerId(ADDRESS, 1)]


# ---- P freezes


def test_frozen_owner_costs_its_readers_a_deadline_and_its_late_bytes_never_land(world):
    request = world.hand_over()
    world.load(request, settle=False)
    world.freeze()
    world.wait(DEADLINE_S - 0.5)
    assert world.reader.loads() == {}
    world.wait(0.5)
    assert world.reason() == "deadline"
    assert set(world.reader.loads()["r"].quarantined_block_ids) == set(request.local_rows)
    world.assert_quiet()  # the peer was fenced
    world.reader.memory.rows[list(request.local_rows)] = 7  # somebody else's by now
    world.thaw()
    assert (world.reader.memory.rows[list(request.local_rows)] == 7).all()


def test_owner_that_thaws_is_a_peer_again(world):
    world.load(world.hand_over("first"), settle=False)
    world.freeze()
    world.wait(DEADLINE_S)
    world.thaw()
    again = world.hand_over("again")
    world.load(again)
    assert world.reason("again") == ""
    assert world.has_content(again)


def test_owner_that_is_frozen_at_the_handshake_costs_its_timeout(world):
    request = world.hand_over()
    world.freeze()
    world.load(request)
    world.wait(5.0)
    assert world.reason() == "peer_lost"
    world.assert_quiet()


def test_quarantine_ends_with_the_read_where_the_peer_need_not_be_fenced(world):
    request = world.hand_over()
    world.load(request, settle=False)
    world.freeze()
    world.wait(1.0)
    world.tell_reader(aborts=["r"])
    assert world.reader.node.num_quarantined_blocks == 6
    world.thaw()  # the bytes land, in blocks that nobody has got
    world.assert_quiet()
    assert np.array_equal(world.reader.memory.rows[20], world.owner.memory.rows[4])


# ---- P restarts


def test_restarted_owner_is_a_new_peer_with_one_handshake_for_all_who_wait(world):
    old = world.hand_over("old")
    world.load(old, settle=False)
    world.kill()
    assert world.reason("old") == "peer_lost"
    world.restart()
    world.sent.clear()
    outdated = world.hand_over("outdated", first=1, num_blocks=1, rows=1)
    outdated = PullRequest("outdated", old.handoff, outdated.units, outdated.num_tokens)
    new = [world.hand_over(f"new {index}", first=8 + 4 * index, num_blocks=4, rows=8 + 4 * index) for index in range(3)]
    world.tell_reader(pulls=[outdated, *new])
    world.settle()
    assert world.reason("outdated") == "stale"
    for request in new:
        assert world.reason(request.request_id) == ""
        assert world.has_content(request)
    assert len([message for message in world.sent if isinstance(message, Handshake)]) == 1
    world.assert_quiet()


def test_hand_over_of_an_earlier_life_is_stale_though_the_blocks_look_right(world):
    """The new life has the same content at the same place and grants the same lease: only the incarnation tells."""
    request = world.hand_over()
    world.kill()
    world.restart()
    world.hand_over()
    world.load(request)
    assert world.reason() == "stale"
    world.assert_quiet()


# ---- leases and reuse


def test_lease_that_is_over_is_stale_before_anything_is_read(world):
    request = world.hand_over()
    world.wait(LEASE_S)
    world.load(request)
    assert world.reason() == "stale"
    assert not world.reader.memory.rows.any()
    world.assert_quiet()


def test_blocks_that_were_reused_are_stale_by_their_seals_whatever_the_lease_says(world):
    request = world.hand_over()
    for row in request.remote_rows:
        world.owner.write(row, content=50, generation=2)
    world.load(request)
    assert world.reason() == "stale"
    assert world.reader.loads()["r"].invalid_block_ids == ()


def test_reused_block_is_stale_even_with_the_same_content(world):
    request = world.hand_over()
    world.owner.write(request.remote_rows[2], content=100 + request.remote_rows[2], generation=2)
    world.load(request)
    assert world.reason() == "stale"
    assert world.reader.loads()["r"].invalid_block_ids == (request.local_rows[2],)


def test_block_that_is_being_rewritten_is_stale_and_the_others_are_kept(world):
    request = world.hand_over()
    world.owner.seals.break_seals(request.remote_rows[3:])
    world.load(request)
    load = world.reader.loads()["r"]
    assert world.reason() == "stale"
    assert load.invalid_block_ids == request.local_rows[3:]
    assert load.usage.verified_blocks == 3


def test_owner_that_thaws_after_its_lease_and_reuses_the_blocks_is_stale(world):
    """The reads were in flight when the owner froze; they end with the bytes of somebody else's prompt."""
    request = world.hand_over()
    world.load(request, settle=False)
    world.freeze()
    world.wait(LEASE_S + 1)
    for row in request.remote_rows:
        world.owner.write(row, content=50, generation=2)
    world.thaw()
    assert world.owner.reports == [SendingEnded("r")]
    assert world.reason() == "stale"
    world.assert_quiet()


def test_lease_that_ended_with_the_blocks_untouched_is_no_failure(world):
    request = world.hand_over()
    world.load(request, settle=False)
    world.freeze()
    world.wait(LEASE_S + 1)
    world.thaw()
    assert world.owner.node.num_leased_blocks == 0
    assert world.reason() == ""
    assert world.has_content(request)


# ---- mismatches


@pytest.mark.parametrize("wrong", ["model", "layout", "digests"])
def test_owner_that_does_not_fit_is_refused_with_both_values(world, make_identity, layout, wrong):
    changed = {
        "model": {"model_fingerprint": b"\xab\xcd"},
        "layout": {"layout": msgspec.structs.replace(layout, dtype="bfloat16")},
        "digests": {},
    }[wrong]
    world.kill()
    owner = world.restart(**changed)
    if wrong == "digests":
        owner.node._responder = HandshakeResponder(owner.identity, NUM_BLOCKS, {"inproc": owner.transport.describe()})
        world.reader = world.add("decode-1", 98, kv_verify="digest")
    request = world.hand_over()
    world.load(request)
    message = world.reader.loads()["r"].error.message
    assert world.reason() == ("rejected" if wrong == "digests" else "layout")
    for value in {
        "model": (b"\xab\xcd".hex(), b"model".hex()),
        "layout": ("dtype float32 at the peer", "bfloat16 at prefill-0"),
        "digests": ("kv_verify = digest", "have none"),
    }[wrong]:
        assert value in message
    world.assert_quiet()


def test_transport_that_opens_nobody_costs_no_load(world):
    world.reader = world.add("decode-1", 98, transports=("denied", "inproc"))
    for name in ("first", "second"):
        request = world.hand_over(name)
        world.load(request)
        assert world.reason(name) == ""
        assert world.has_content(request)
        assert world.reader.loads()[name].usage.transport == "inproc"
    assert world.reader.node.transports_in_use() == {"inproc"}
    assert [message.transports for message in world.sent if isinstance(message, Handshake)] == [
        ("denied", "inproc"),
        ("inproc",),
    ]


def test_reader_whose_only_transport_opens_nobody_says_why(world):
    world.reader = world.add("decode-1", 98, transports=("denied",))
    world.load(world.hand_over())
    assert world.reason() == "peer_lost"
    assert "permission denied" in world.reader.loads()["r"].error.message
    world.assert_quiet()


# ---- corrupted bytes


@pytest.fixture
def digesting(world) -> World:
    world.reader = world.add("decode-1", 98, kv_verify="digest")
    return world


def test_bytes_that_were_corrupted_once_are_read_again_and_served(digesting):
    request = digesting.hand_over()
    digesting.reader.plan.corrupt = {2}
    digesting.load(request)
    assert digesting.reason() == ""
    assert digesting.has_content(request)
    assert digesting.reader.node.counts()["blocks_read_again"] == 1


def test_bytes_that_are_corrupted_twice_are_given_up_alone(digesting):
    request = digesting.hand_over()
    digesting.reader.plan.corrupt = {2, 5}  # 1 to 3 are the blocks, 4 the seals, 5 is the second time
    digesting.load(request)
    assert digesting.reason() == "digest"
    assert digesting.reader.loads()["r"].invalid_block_ids == (request.local_rows[2],)


def test_corrupted_seal_is_no_proof(digesting):
    request = digesting.hand_over()
    digesting.reader.plan.corrupt = {4}
    digesting.load(request)
    assert digesting.reason() == "stale"
    assert digesting.reader.loads()["r"].invalid_block_ids == (request.local_rows[0],)


# ---- the router dies


def test_lease_that_the_router_kept_alive_ends_when_it_does_not_any_more(world):
    request = world.hand_over()
    for _ in range(3):
        world.wait(LEASE_S - 1)
        world.carry_out(world.owner, world.owner.node.renew([request.handoff.transfer_id]))
    assert world.owner.node.num_leased_blocks == 6
    world.wait(LEASE_S)
    assert world.owner.reports == [SendingEnded("r")]


def test_no_renewal_goes_beyond_the_cap(world):
    request = world.hand_over()
    world.tell_reader(holds=[request.handoff])
    world.wait(59.0)
    assert world.owner.node.num_leased_blocks == 6
    world.wait(1.0)
    assert world.owner.node.num_leased_blocks == 0
