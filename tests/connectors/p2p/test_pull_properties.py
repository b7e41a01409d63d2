"""The consumer's state machine under random histories: every load ends once, and only good ones succeed."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from connectors.p2p.actions import ClosePeer, LoadEnded, PeerFailed, PostRead, SendControl
from connectors.p2p.leases import LeaseTable, LeaseTerms
from core.errors import PeerUnreachable, TransferError
from core.wire.kv import ControlError, Handshake, HandshakeRefused, LeaseRelease, LeaseRenew, LeaseState

ADDRESSES = ("tcp://10.0.0.1:5600", "tcp://10.0.0.2:5600")
addresses = st.sampled_from(ADDRESSES)
incarnations = st.integers(1, 2)
transfer_ids = st.sampled_from(["t0", "t1", "t2"])
MAX_TIMERS_TO_THE_END = 50


class HostileWorld(RuleBasedStateMachine):
    """Messages in any order, lost, repeated or made up; reads that end well, badly, late or only by a fence.

    ``PullDriver`` checks every action. A hand-over's owner is a function of its id, as in a real one.
    """

    make_pull = None  # set by the fixture below

    def __init__(self) -> None:
        super().__init__()
        self.pull = HostileWorld.make_pull()
        self.good_rows: dict[str, set[tuple[int, int]]] = {}
        self.aborted: set[str] = set()
        self.num_started = 0
        self.ended_reads: list[int] = []

    @rule(num_rows=st.integers(0, 9), transfer_id=transfer_ids, address=addresses, incarnation=incarnations)
    def start(self, num_rows: int, transfer_id: str, address: str, incarnation: int) -> None:
        request_id = f"r{self.num_started}"
        self.num_started += 1
        owner = f"{transfer_id}/{address[-6]}/{incarnation}"
        self.pull.start(request_id, num_rows, owner, incarnation, address)

    @rule(transfer_id=transfer_ids, address=addresses, incarnation=incarnations, is_release=st.booleans())
    def hold_or_release(self, transfer_id: str, address: str, incarnation: int, is_release: bool) -> None:
        act = self.pull.release if is_release else self.pull.hold
        act(f"{transfer_id}/{address[-6]}/{incarnation}", incarnation, address)

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
        changed=st.sampled_from([{}, {}, {}, {"model_fingerprint": b"x"}, {"transport": "x"}, {"num_blocks": 505}]),
    )
    def answer_handshake(self, address: str, incarnation: int, changed: dict[str, object]) -> None:
        self.pull.accept(incarnation, address, **changed)

    @rule(address=addresses, incarnation=incarnations, left_ms=st.sampled_from([0, 1_000, 60_000, 60_000]))
    def answer_leases(self, address: str, incarnation: int, left_ms: int) -> None:
        asked = {
            transfer_id
            for action in self.pull.actions(SendControl)
            if action.address == address and isinstance(action.message, LeaseRenew)
            for transfer_id in action.message.transfer_ids
        }
        left = {transfer_id: left_ms if transfer_id.endswith(f"/{incarnation}") else 0 for transfer_id in sorted(asked)}
        self.pull.receive(LeaseState(incarnation=incarnation, left_ms=left), address)

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
    @rule(data=st.data(), error=st.sampled_from([None, None, None, TransferError("bad"), PeerUnreachable("gone")]))
    def end_read(self, data: st.DataObject, error: TransferError | None) -> None:
        self._end_read(data.draw(st.sampled_from(sorted(self.pull.open_reads))), error)

    @precondition(lambda self: self.ended_reads)
    @rule(data=st.data())
    def repeat_the_end_of_a_read(self, data: st.DataObject) -> None:
        assert self.pull.end_read(data.draw(st.sampled_from(self.ended_reads))) == []

    @precondition(lambda self: self.pull.open_peers)
    @rule(data=st.data())
    def fail_to_open(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.pull.open_peers)))
        self.pull.take(self.pull.protocol.on_transfer(PeerFailed(peer, PeerUnreachable("gone")), self.pull.now))

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.pull.tick(seconds)

    def teardown(self) -> None:
        """Nobody answers any more and no read ends but by a fence: everything ends all the same."""
        for _ in range(MAX_TIMERS_TO_THE_END):
            self._end_fenced_reads()
            due = self.pull.protocol.next_timer()
            if not self.pull.protocol.num_loads or due is None:
                break
            self.pull.tick(max(0.0, due - self.pull.now))
        assert self.pull.protocol.num_loads == self.pull.protocol.num_loading_blocks == 0
        assert set(self.pull.ended) == {f"r{index}" for index in range(self.num_started)}
        for request_id, ended in self.pull.ended.items():
            self._check_end(request_id, ended)

    def _end_read(self, read_id: int, error: TransferError | None) -> None:
        read = self.pull.open_reads[read_id]
        if error is None:
            pairs = set(zip(read.remote_rows, read.local_rows, strict=True))
            self.good_rows.setdefault(self._reader(read), set()).update(pairs)
        self.ended_reads.append(read_id)
        self.pull.end_read(read_id, error)

    def _reader(self, read: PostRead) -> str:
        (reader,) = [name for name, request in self.pull.requests.items() if set(read.local_rows) <= set(request.local_rows)]
        return reader

    def _end_fenced_reads(self) -> None:
        fences = {}
        for position, action in enumerate(self.pull.log):
            if isinstance(action, ClosePeer):
                fences[action.peer] = position
        for read_id, read in list(self.pull.open_reads.items()):
            if self.pull.log.index(read) < fences.get(read.peer, -1):
                self._end_read(read_id, PeerUnreachable("fenced"))

    def _check_end(self, request_id: str, ended: LoadEnded) -> None:
        request = self.pull.requests[request_id]
        if ended.usage is None:
            assert request_id in self.pull.failed or request_id in self.aborted, "a load ended for no reason"
            return
        assert request_id not in self.aborted
        wanted = set(zip(request.remote_rows, request.local_rows, strict=True))
        assert self.good_rows.get(request_id, set()) == wanted, "success without all the bytes"


class LeasesOverASlowNetwork(RuleBasedStateMachine):
    """A real owner's lease table behind queues: no load succeeds unless the owner held the blocks until then."""

    make_pull = None

    def __init__(self) -> None:
        super().__init__()
        self.pull = LeasesOverASlowNetwork.make_pull(lease_renew_interval_s=2.0, transfer_deadline_s=60.0)
        self.table = LeaseTable(self.pull.clock, LeaseTerms(grant_s=6.0, renew_s=4.0, max_s=30.0))
        self.to_owner: deque[object] = deque()
        self.to_reader: deque[LeaseState] = deque()
        self.num_seen = 0
        self.num_started = 0
        self.table.grant("t", "request", 1)
        self.pull.start("first", 1)
        self.pull.accept()

    @rule()
    def start(self) -> None:
        self.num_started += 1
        self.pull.start(f"r{self.num_started}", 3)

    @precondition(lambda self: self.to_owner)
    @rule(count=st.integers(1, 3))
    def reach_owner(self, count: int) -> None:
        for _ in range(min(count, len(self.to_owner))):
            message = self.to_owner.popleft()
            if isinstance(message, LeaseRenew):
                self.to_reader.append(LeaseState(incarnation=1, left_ms=self.table.renew(message.transfer_ids)))

    @precondition(lambda self: self.to_reader)
    @rule()
    def reach_reader(self) -> None:
        self.pull.receive(self.to_reader.popleft())

    @precondition(lambda self: self.pull.open_reads)
    @rule()
    def end_read(self) -> None:
        self.pull.end_read(min(self.pull.open_reads))

    @rule(halves=st.integers(1, 5))
    def wait(self, halves: int) -> None:
        self.pull.tick(halves / 2)
        self.table.expire()

    @invariant()
    def look(self) -> None:
        for action in self.pull.log[self.num_seen :]:
            if isinstance(action, SendControl) and not isinstance(action.message, Handshake | LeaseRelease):
                self.to_owner.append(action.message)
            if isinstance(action, LoadEnded) and action.usage is not None:
                assert len(self.table) == 1, f"{action.request_id} succeeded after its blocks were given up"
        self.num_seen = len(self.pull.log)


@pytest.mark.parametrize("machine", [HostileWorld, LeasesOverASlowNetwork])
def test_random_histories(machine, make_pull, monkeypatch):
    monkeypatch.setattr(machine, "make_pull", staticmethod(make_pull))
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
