"""The consumer's state machine under random histories: every load is reported once, and only proven blocks are accepted."""

from __future__ import annotations

from collections import Counter, deque
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from connectors.p2p.actions import ClosePeer, OpenPeer, PostRead, PostSealRead, SendControl
from connectors.p2p.producer.leases import LeaseTable, LeaseTerms
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import PeerUnreachable, TransferError
from core.kv.seals import BROKEN, ExpectedSeal
from core.wire.kv import ControlError, HandshakeRefused, LeaseRenew, LeaseState

ADDRESSES = ("tcp://10.0.0.1:5600", "tcp://10.0.0.2:5600")
addresses = st.sampled_from((ADDRESSES[0], *ADDRESSES))
incarnations = st.sampled_from((1, 1, 1, 1, 2))
transfer_ids = st.sampled_from(["t0", "t1", "t2"])
MAX_TIMERS_TO_THE_END = 80


class HostileWorld(RuleBasedStateMachine):
    """Messages in any order, lost, repeated or made up; reads that end well, badly, late or only by a fence; wrong seals.

    ``PullDriver`` checks every action. A handoff's owner is a function of its id, as in a real one.
    """

    make_pull = None  # set by the fixture below
    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.pull = HostileWorld.make_pull(kv_verify="digest", max_quarantined_blocks=6)
        self.aborted: set[str] = set()
        self.num_started = 0
        self.ended_reads: list[int] = []

    @initialize(num_rows=st.lists(st.integers(1, 9), max_size=3), patience_s=st.sampled_from([0.0, 0.05]))
    def begin_well(self, num_rows: list[int], patience_s: float) -> None:
        """Most histories begin with loads that are being read; else hardly one would come so far."""
        self.pull = HostileWorld.make_pull(kv_verify="digest", max_quarantined_blocks=6, unsealed_patience_s=patience_s)
        for number in num_rows:
            self.start(number, "t0", ADDRESSES[0], 1, None)
        self.go_well(ADDRESSES[0], 1)

    @rule(
        num_rows=st.integers(0, 9),
        transfer_id=transfer_ids,
        address=addresses,
        incarnation=incarnations,
        left_s=st.sampled_from([None, None, None, 0.0, 3.0, 100.0]),
    )
    def start(self, num_rows: int, transfer_id: str, address: str, incarnation: int, left_s: float | None) -> None:
        request_id = f"r{self.num_started}"
        self.num_started += 1
        owner = f"{transfer_id}/{address[-6]}/{incarnation}"
        deadline = None if left_s is None else self.pull.now + left_s
        self.pull.start(request_id, num_rows, owner, incarnation, address, deadline)

    @rule(
        transfer_id=transfer_ids,
        address=addresses,
        incarnation=incarnations,
        name=st.sampled_from(["expect", "hold", "release"]),
    )
    def tell_of_a_lease(self, transfer_id: str, address: str, incarnation: int, name: str) -> None:
        getattr(self.pull, name)(f"{transfer_id}/{address[-6]}/{incarnation}", incarnation, address)

    @precondition(lambda self: self.num_started)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(0, self.num_started - 1))}"
        if request_id not in self.pull.ended:
            self.aborted.add(request_id)
        self.pull.abort(request_id)

    @rule(
        address=addresses,
        incarnation=incarnations,
        changed=st.sampled_from(
            [{}, {}, {}, {}, {"model_fingerprint": b"x"}, {"transport": "x"}, {"num_blocks": 505}, {"has_digests": False}]
        ),
    )
    def answer_handshake(self, address: str, incarnation: int, changed: dict[str, object]) -> None:
        self.pull.accept(incarnation, address, **({"has_digests": True} | changed))

    @rule(address=addresses, incarnation=incarnations, left_ms=st.sampled_from([0, 1_000, 60_000, 60_000]), data=st.data())
    def answer_leases(self, address: str, incarnation: int, left_ms: int, data: st.DataObject) -> None:
        questions = [
            action.message
            for action in self.pull.actions(SendControl)
            if action.address == address and isinstance(action.message, LeaseRenew)
        ]
        if questions:
            question = data.draw(st.sampled_from(questions[-4:]))
            mine = f"/{incarnation}"
            left = {name: left_ms if name.endswith(mine) else 0 for name in question.transfer_ids}
            self.pull.receive(LeaseState(incarnation=incarnation, left_ms=left, number=question.number), address)

    @rule(address=addresses, incarnation=incarnations)
    def go_well(self, address: str, incarnation: int) -> None:
        """Whoever waits for this worker gets to its reads."""
        self.pull.accept(incarnation, address, has_digests=True)
        asked = [action.message for action in self.pull.actions(SendControl) if action.address == address]
        for question in [message for message in asked if isinstance(message, LeaseRenew)][-4:]:
            left = {name: 60_000 for name in question.transfer_ids if name.endswith(f"/{incarnation}")}
            self.pull.receive(LeaseState(incarnation=incarnation, left_ms=left, number=question.number), address)

    @precondition(lambda self: self.pull.open_reads)
    @rule(times=st.integers(1, 3))
    def end_all_reads(self, times: int) -> None:
        for _ in range(times):
            for read_id in sorted(self.pull.open_reads):
                self._end_read(read_id)

    @rule(
        address=addresses,
        message=st.sampled_from(
            [
                HandshakeRefused(engine_id="p", incarnation=1, code="layout", message="no"),
                ControlError(code="protocol_error", message="what?"),
                LeaseRenew(transfer_ids=("t0",)),
                LeaseState(incarnation=1, left_ms={"unheard of": 0}),
            ]
        ),
    )
    def say_something_else(self, address: str, message: object) -> None:
        self.pull.receive(message, address)

    @rule(address=addresses)
    def disconnect(self, address: str) -> None:
        self.pull.disconnect(address)

    @precondition(lambda self: self.pull.open_reads)
    @rule(
        data=st.data(),
        error=st.sampled_from([None, None, None, None, TransferError("bad"), PeerUnreachable("gone")]),
        wrong_seal=st.sampled_from([None, None, bytes(64), b"\xff" * 64]),
        wrong_digest=st.booleans(),
    )
    def end_read(self, data: st.DataObject, error: TransferError | None, wrong_seal: bytes | None, wrong_digest: bool) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.pull.endable)))
        row = data.draw(st.sampled_from(self.pull.open_reads[read_id].remote_rows))
        seals = {} if wrong_seal is None else {row: wrong_seal}
        self._end_read(read_id, error, seals=seals, digests={row: 1} if wrong_digest else {})

    @precondition(lambda self: self.ended_reads)
    @rule(data=st.data())
    def repeat_the_end_of_a_read(self, data: st.DataObject) -> None:
        assert self.pull.end_read(data.draw(st.sampled_from(self.ended_reads))) == []

    @precondition(lambda self: self.pull.actions(OpenPeer))
    @rule(data=st.data(), was_open=st.booleans())
    def fail_to_open_or_lose(self, data: st.DataObject, was_open: bool) -> None:
        how = data.draw(st.sampled_from(self.pull.actions(OpenPeer)[-4:]))
        peer = self.pull.protocol.peers.get(how.peer)
        is_open = peer is not None and peer.how_to_open is how
        actions = self.pull.lose_peer(how) if was_open else self.pull.fail_to_open(how)
        assert (ClosePeer(how.peer) in actions) == is_open, "only the present opening of a peer ends it"

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.pull.tick(seconds)

    def teardown(self) -> None:
        """Nobody answers any more and no read ends but by a fence: everything ends all the same."""
        for _ in range(MAX_TIMERS_TO_THE_END):
            self._end_fenced_reads()
            due = self.pull.protocol.next_timer()
            if (len(self.pull.ended) == self.num_started and not self.pull.quarantined) or due is None:
                break
            self.pull.tick(max(0.0, due - self.pull.now))
        protocol = self.pull.protocol
        assert protocol.num_loading_blocks == protocol.num_quarantined_blocks == 0
        assert not self.pull.quarantined
        assert set(self.pull.ended) == {f"r{index}" for index in range(self.num_started)}
        self._count()
        for request_id, ended in self.pull.ended.items():
            assert (ended.usage is None) == (request_id in self.aborted)
            if ended.error is None and ended.usage is not None:
                assert self.pull.usable_rows(request_id) == set(self.pull.requests[request_id].local_rows)

    def _count(self) -> None:
        ended = self.pull.ended.values()
        self.reached["accepted"] += sum(bool(self.pull.usable_rows(load.request_id)) for load in ended)
        self.reached["accepted in part"] += sum(load.invalid_block_ids not in ((), ALL_BLOCKS) for load in ended)
        self.reached["quarantined"] += self.pull.protocol.counts.quarantined_blocks
        self.reached["read again"] += self.pull.protocol.counts.blocks_read_again
        self.reached["fenced"] += self.pull.protocol.counts.fenced_peers

    def _end_fenced_reads(self) -> None:
        fences = {}
        for position, action in enumerate(self.pull.log):
            if isinstance(action, ClosePeer):
                fences[action.peer] = position
        for read_id, read in list(self.pull.open_reads.items()):
            if self.pull.log.index(read) < fences.get(read.peer, -1):
                self._end_read(read_id, PeerUnreachable("fenced"))

    def _end_read(self, read_id: int, error: TransferError | None = None, **spoiled: dict[int, object]) -> None:
        if read_id in self.pull.endable:  # an earlier one may have ended it
            self.ended_reads.append(read_id)
            self.pull.end_read(read_id, error, **spoiled)


class ReusedBlocks(RuleBasedStateMachine):
    """A real lease table with slow queues, and an owner that reuses its blocks as soon as it may.

    Rows are copied one by one at any moment between the posting and the end of their read, as the seals are. Whatever is
    accepted must be the KV of the handoff: the content of a block is the generation in which it was written.
    """

    make_pull = None
    make_seal = None
    reached: ClassVar[Counter[str]] = Counter()
    NUM_ROWS = 5

    def __init__(self) -> None:
        super().__init__()
        self.pull = ReusedBlocks.make_pull(
            unsealed_patience_s=0.02, lease_renew_interval_s=2.0, transfer_deadline_s=60.0, lease_margin_s=0.5
        )
        self.table = LeaseTable(LeaseTerms(grant_s=3.0, renew_s=2.0, max_s=9.0))
        self.to_owner: deque[LeaseRenew] = deque()
        self.to_reader: deque[LeaseState] = deque()
        self.num_seen = 0
        rows = range(500, 500 + self.NUM_ROWS)
        self.content = {row: row + 7 for row in rows}  # generation of the bytes
        self.sealed = dict(self.content)  # generation in the seal, BROKEN if there is none
        self.is_written = dict.fromkeys(rows, True)  # since the seal was broken
        self.copies: dict[int, dict[int, int]] = {}  # read id → remote row → what was copied
        self.local: dict[int, int] = {}
        self.table.grant("t", "request", self.NUM_ROWS, self.pull.now)
        self.pull.start("r", self.NUM_ROWS)
        self.pull.accept()
        self.pull.grant(3_000)

    # ---- the owner

    def _may_reuse(self) -> bool:
        return not len(self.table)

    @precondition(_may_reuse)
    @rule(row=st.integers(500, 504), num_stages=st.integers(1, 3))
    def reuse(self, row: int, num_stages: int) -> None:
        """Advance a block some stages in its next generation: its seal is broken, it is written, it is sealed."""
        for _ in range(num_stages):
            if self.sealed[row] != BROKEN:
                self.sealed[row] = BROKEN
                self.is_written[row] = False
            elif not self.is_written[row]:
                self.content[row] += 1000
                self.is_written[row] = True
            else:
                self.sealed[row] = self.content[row]

    # ---- the network

    @precondition(lambda self: self.to_owner)
    @rule()
    def reach_owner(self) -> None:
        question = self.to_owner.popleft()
        left_ms = self.table.renew(question.transfer_ids, self.pull.now)
        self.to_reader.append(LeaseState(incarnation=1, left_ms=left_ms, number=question.number))

    @precondition(lambda self: self.to_reader)
    @rule(is_lost=st.integers(0, 4).map(lambda number: number == 0))
    def reach_reader(self, is_lost: bool) -> None:
        state = self.to_reader.popleft()
        if not is_lost:
            self.pull.receive(state)

    @rule(halves=st.integers(1, 5))
    def wait(self, halves: int) -> None:
        self.pull.tick(halves / 2)
        self.table.expire(self.pull.now)

    # ---- the transfers

    @precondition(lambda self: self.pull.open_reads)
    @rule(data=st.data())
    def copy_a_row(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.pull.endable)))
        self._copy(read_id, data.draw(st.sampled_from(self.pull.open_reads[read_id].remote_rows)))

    @precondition(lambda self: self.pull.open_reads)
    @rule()
    def end_read(self) -> None:
        read_id = min(self.pull.open_reads)
        read = self.pull.open_reads[read_id]
        for row in read.remote_rows:
            self._copy(read_id, row)
        found = self.copies[read_id]
        if isinstance(read, PostSealRead):
            wrong = {row: self.seal_row(row, found[row]) for row in read.remote_rows if found[row] != row + 7}
            self.pull.end_read(read_id, seals=wrong)
            return
        self.local |= {local: found[remote] for remote, local in zip(read.remote_rows, read.local_rows, strict=True)}
        self.pull.end_read(read_id)

    def seal_row(self, row: int, generation: int) -> bytes:
        if generation == BROKEN:
            return bytes(64)
        return ReusedBlocks.make_seal(ExpectedSeal(generation, 0, b"other" * 3 + b".", 32))

    def _copy(self, read_id: int, row: int) -> None:
        source = self.sealed if isinstance(self.pull.open_reads[read_id], PostSealRead) else self.content
        self.copies.setdefault(read_id, {}).setdefault(row, source[row])

    @invariant()
    def look(self) -> None:
        for action in self.pull.log[self.num_seen :]:
            if isinstance(action, SendControl) and isinstance(action.message, LeaseRenew):
                self.to_owner.append(action.message)
            if isinstance(action, PostRead):
                assert len(self.table), "a read was started that the lease cannot have covered"
            if isinstance(action, LoadEnded):
                self.reached["accepted" if action.error is None else action.error.code] += 1
                for local in self.pull.usable_rows("r"):
                    assert self.local[local] == local + 507, "accepted a block that is not part of the handoff"
        self.num_seen = len(self.pull.log)


MOST_ROUNDS = 10  # of 150 histories: with --full they are others each time, and one round may end nowhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "must_reach"),
    [
        (HostileWorld, ("accepted", "quarantined", "fenced")),
        (ReusedBlocks, ("accepted", "stale")),
    ],
)
def test_random_histories(machine, must_reach, make_pull, make_seal, monkeypatch):
    monkeypatch.setattr(machine, "make_pull", staticmethod(make_pull))
    monkeypatch.setattr(ReusedBlocks, "make_seal", staticmethod(make_seal))
    monkeypatch.setattr(machine, "reached", Counter())
    for _ in range(MOST_ROUNDS):
        run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))
        if all(machine.reached[name] for name in must_reach):
            return
    pytest.fail(f"histories that come nowhere prove nothing: {dict(machine.reached)}")
