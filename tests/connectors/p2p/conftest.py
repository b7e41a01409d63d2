"""Builders for tests of the p2p connector: identities, and a ``PullProtocol`` with everything around it played by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import pytest

from connectors.p2p.actions import (
    Action,
    CancelRead,
    ClosePeer,
    ConsumerStep,
    ControlLost,
    ControlReceived,
    ExpectHandoff,
    HandoffRef,
    OpenPeer,
    PeerFailed,
    PeerLost,
    PostRead,
    PostSealRead,
    PullRequest,
    QuarantineEnded,
    ReadEnded,
    SendControl,
    TokenCopy,
    TransferReport,
    row_units,
)
from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.settings import PullSettings
from connectors.p2p.transport.interface import PeerId
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import KVFerryError, PeerUnreachable
from core.kv.seals import ExpectedSeal, SealTable, each_by_itself, layout_fingerprint, map_seal_memory
from core.machine_driver import TimerDue
from core.testing.clock import FakeClock
from core.wire.kv import ControlMessage, HandshakeReply, KVLayoutInfo, LeaseRenew, LeaseState

ADDRESS = "tcp://10.0.0.1:5600"
ROW_BYTES = 1024
LAYOUT = KVLayoutInfo(
    dtype="float32", order="HND", block_size=32, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=ROW_BYTES
)
FINGERPRINT = b"model"
NO_SEAL = bytes(64)

T = TypeVar("T")


def identity(engine_id: str = "decode-0", incarnation: int = 77, **changed: object) -> WorkerIdentity:
    values = {"model_fingerprint": FINGERPRINT, "layout": LAYOUT, "host_id": "host"} | changed
    return WorkerIdentity(engine_id=engine_id, incarnation=incarnation, **values)


def seal_row(expected: ExpectedSeal, incarnation: int = 1, digest: int | None = None) -> bytes:
    """Return what the owner writes for a block that is as expected."""
    digest_blocks = None if digest is None else each_by_itself(lambda block_id: digest)
    table = SealTable(map_seal_memory(1), incarnation, layout_fingerprint(LAYOUT), digest_blocks)
    table.seal(0, expected)
    return table.row(0)


def expected_seal(remote_row: int) -> ExpectedSeal:
    return ExpectedSeal(generation=remote_row + 7, group_id=0, block_hash=remote_row.to_bytes(16, "little"), num_tokens=32)


class PullDriver:
    """A pull protocol whose engine, network, peers and clock are the test's.

    Keeps what any environment could hold against the protocol: reads only of open peers; a load is reported exactly once; what
    it says may be used has been sealed by a seal read that began after the bytes had come; exactly what its open reads may
    write is quarantined, and let out of it once, when that read is terminal.
    """

    def __init__(self, *, rows_per_read: int = 2, **settings: object) -> None:
        values = {
            "transfer_deadline_s": 30.0,
            "handshake_timeout_s": 5.0,
            "lease_renew_interval_s": 5.0,
            "max_reads_in_flight": 2,
            "kv_verify": "identity",
        } | settings
        self.clock = FakeClock()
        self.protocol = PullProtocol(
            identity(), ("shm", "tcp"), PullSettings(max_read_bytes=rows_per_read * ROW_BYTES, **values)
        )
        self.log: list[Action] = []
        self.requests: dict[str, PullRequest] = {}
        self.held: set[str] = set()  # leases that a request holds
        self.open_peers: set[PeerId] = set()
        self.open_reads: dict[int, PostRead | PostSealRead] = {}
        self.ended: dict[str, LoadEnded] = {}
        self.quarantined: set[int] = set()
        self.bytes_here: set[int] = set()  # local rows whose last read of blocks ended well
        self.sealed: set[int] = set()  # those of them whose seal was read afterwards and is right
        self._next_row = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    @property
    def failed(self) -> dict[str, str]:
        """Error codes of the loads that were reported with one."""
        return {name: ended.error.code for name, ended in self.ended.items() if ended.error is not None}

    # ---- what the engine and the world do

    def start(
        self,
        request_id: str = "r",
        num_rows: int = 3,
        transfer_id: str = "t",
        incarnation: int = 1,
        address: str = ADDRESS,
        deadline: float | None = None,
        *,
        is_converted: bool = False,
        layout: KVLayoutInfo | None = None,
        is_leased: bool = True,
    ) -> list[Action]:
        rows = tuple(range(self._next_row, self._next_row + num_rows))
        self._next_row += num_rows
        ref = HandoffRef(transfer_id, PeerId(address, incarnation))
        remote = tuple(row + 500 for row in rows)
        expected = tuple(map(expected_seal, remote))
        units = row_units(remote, rows, expected)
        if is_converted:
            units = tuple(replace(unit, copies=(TokenCopy(*unit.remote_rows, 0, *unit.local_rows, 0, 32),)) for unit in units)
        request = PullRequest(request_id, ref, units, 32 * num_rows, deadline, layout, is_leased=is_leased)
        self.requests[request_id] = request
        if is_leased:
            self.held.add(transfer_id)
        return self.take(self.protocol.start(request, self.now))

    def expect(self, transfer_id: str = "t", incarnation: int = 1, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.expect(ExpectHandoff(HandoffRef(transfer_id, PeerId(address, incarnation))), self.now))

    def hold(self, transfer_id: str = "t", incarnation: int = 1, address: str = ADDRESS) -> list[Action]:
        self.held.add(transfer_id)
        step = ConsumerStep(holds=[HandoffRef(transfer_id, PeerId(address, incarnation))])
        return self.take(self.protocol.on_step(step, self.now))

    def release(self, transfer_id: str = "t", incarnation: int = 1, address: str = ADDRESS) -> list[Action]:
        self.held.discard(transfer_id)
        step = ConsumerStep(releases=[HandoffRef(transfer_id, PeerId(address, incarnation))])
        return self.take(self.protocol.on_step(step, self.now))

    def abort(self, request_id: str = "r") -> list[Action]:
        return self.take(self.protocol.abort(request_id, self.now))

    def receive(self, message: ControlMessage, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.on_control(ControlReceived(address, message), self.now))

    def accept(self, incarnation: int = 1, address: str = ADDRESS, **changed: object) -> list[Action]:
        """Let the peer accept the handshake."""
        values = {
            "engine_id": "prefill-0",
            "model_fingerprint": FINGERPRINT,
            "layout": LAYOUT,
            "transport": "tcp",
            "transport_metadata": b"metadata",
            "num_blocks": 100_000,
        } | changed
        return self.receive(HandshakeReply(incarnation=incarnation, **values), address)

    def grant(
        self,
        left_ms: int = 60_000,
        *transfer_ids: str,
        incarnation: int = 1,
        address: str = ADDRESS,
        number: int | None = None,
    ) -> list[Action]:
        """Let the peer say how long it holds these, by default ``t``; by default in answer to the last question."""
        left = dict.fromkeys(transfer_ids or ("t",), left_ms)
        if number is None:
            number = max((question.number for question in self.messages(LeaseRenew)), default=0)
        return self.receive(LeaseState(incarnation=incarnation, left_ms=left, number=number), address)

    def start_reading(self, request_id: str = "r", num_rows: int = 3, **where) -> list[Action]:
        """Start a load and take it to its first reads."""
        self.start(request_id, num_rows, **where)
        self.accept()
        return self.grant(60_000, where.get("transfer_id", "t"))

    def end_read(
        self,
        read_id: int,
        error: KVFerryError | None = None,
        *,
        seals: dict[int, bytes] | None = None,
        digests: dict[int, int] | None = None,
        at: float | None = None,
    ) -> list[Action]:
        """Let a read end. Seals are right, but for the remote rows in ``seals``; digests are 9 but for the rows there."""
        assert read_id not in self.open_reads or read_id in self.endable, "no transfer thread begins a seal read so early"
        read = self.open_reads.pop(read_id, None)
        event = ReadEnded(read_id, error)
        if isinstance(read, PostRead):
            self.sealed.difference_update(read.local_rows)
            if error is None:
                self.bytes_here.update(read.local_rows)
        elif isinstance(read, PostSealRead) and error is None:
            event = self._seals_read(read, seals or {}, digests or {})
        return self.take(self.protocol.on_transfer(TransferReport(event, self.now if at is None else at), self.now))

    def fail_to_open(self, how: OpenPeer | None = None, error: KVFerryError | None = None) -> list[Action]:
        """Let the transfer thread fail to open a peer, by default the one of the last order to open one."""
        event = PeerFailed(self.actions(OpenPeer)[-1] if how is None else how, error or PeerUnreachable("denied"))
        return self.take(self.protocol.on_transfer(TransferReport(event, self.now), self.now))

    def lose_peer(self, how: OpenPeer | None = None) -> list[Action]:
        """Let the data connection to a peer break, by default to the last one that was opened."""
        error = PeerUnreachable("the data connection was lost")
        event = PeerLost(self.actions(OpenPeer)[-1] if how is None else how, error)
        return self.take(self.protocol.on_transfer(TransferReport(event, self.now), self.now))

    def refuse_read(self, read_id: int) -> list[Action]:
        """Let a read have no room in the staging area."""
        del self.open_reads[read_id]
        return self.take(self.protocol.on_transfer(TransferReport(ReadEnded(read_id, has_no_room=True), self.now), self.now))

    @property
    def endable(self) -> list[int]:
        """The open reads that can end now: a seal read waits for those that it was ordered after, unless it is cancelled."""
        cancelled = {action.read_id for action in self.actions(CancelRead)}

        def may_end(read: PostRead | PostSealRead) -> bool:
            return isinstance(read, PostRead) or read.read_id in cancelled or not self.open_reads.keys() & read.after

        return [number for number, read in self.open_reads.items() if may_end(read)]

    def end_reads(self, error: KVFerryError | None = None) -> None:
        """End open reads until there are none."""
        while self.open_reads:
            self.end_read(min(self.open_reads), error)

    def data_reads(self, request_id: str = "r") -> list[int]:
        """Open reads that write blocks of the request."""
        return [read_id for read_id in self.reads_of(request_id) if isinstance(self.open_reads[read_id], PostRead)]

    def end_data_reads(self) -> int:
        """End reads of blocks until only the seal read is left; returns its id."""
        while data := [read_id for read_id, read in self.open_reads.items() if isinstance(read, PostRead)]:
            self.end_read(min(data))
        (seal_read,) = self.open_reads
        return seal_read

    def disconnect(self, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.on_disconnected(ControlLost(address), self.now))

    def tick(self, seconds: float = 0.0) -> list[Action]:
        self.clock.advance(seconds)
        actions = self.take(self.protocol.on_timer(TimerDue(), self.now))
        due = self.protocol.next_timer()
        assert due is None or due > self.now, "the timer is due again at once: the event loop would spin"
        sent = [action.message for action in actions if isinstance(action, SendControl)]
        renewed = {name for message in sent if isinstance(message, LeaseRenew) for name in message.transfer_ids}
        assert renewed <= self.held, "a lease is renewed that no request holds"
        return actions

    # ---- what the protocol wants

    def take(self, actions: Iterable[Action]) -> list[Action]:
        actions = list(actions)
        for action in actions:
            self._check(action)
        self.log += actions
        assert self.protocol.num_quarantined_blocks == len(self.quarantined)
        return actions

    def messages(self, kind: type[T]) -> list[T]:
        """Control messages of a kind that were sent so far."""
        return [action.message for action in self.log if isinstance(action, SendControl) and isinstance(action.message, kind)]

    def actions(self, kind: type[T]) -> list[T]:
        """Actions of a kind so far."""
        return [action for action in self.log if isinstance(action, kind)]

    def reads_of(self, request_id: str) -> list[int]:
        """Open reads that write blocks of the request, or their seals."""
        rows = set(self.requests[request_id].local_rows)
        return [read_id for read_id, read in self.open_reads.items() if rows & set(read.local_rows)]

    def usable_rows(self, request_id: str) -> set[int]:
        """Local rows that the engine may compute on, by what was reported."""
        ended, rows = self.ended[request_id], self.requests[request_id].local_rows
        if ended.usage is None or ended.invalid_block_ids is ALL_BLOCKS:
            return set()
        return set(rows) - set(ended.invalid_block_ids)

    def _seals_read(self, read: PostSealRead, wrong: dict[int, bytes], digests: dict[int, int]) -> ReadEnded:
        rows = []
        for remote, local in zip(read.remote_rows, read.local_rows, strict=True):
            right = seal_row(expected_seal(remote), read.peer.incarnation, 9 if read.wants_digests else None)
            rows.append(wrong.get(remote, right))
            if rows[-1] == right and digests.get(remote, 9) == 9 and local in self.bytes_here:
                self.sealed.add(local)
        found = tuple(digests.get(remote, 9) for remote in read.remote_rows) if read.wants_digests else ()
        return ReadEnded(read.read_id, seals=b"".join(rows), digests=found)

    def _check(self, action: Action) -> None:
        match action:
            case OpenPeer():
                assert action.peer not in self.open_peers, "opened twice"
                self.open_peers.add(action.peer)
            case ClosePeer():
                assert action.peer in self.open_peers, "closed without being open"
                self.open_peers.discard(action.peer)
            case PostRead() | PostSealRead():
                self._check_read(action)
            case LoadEnded():
                self._check_end(action)
            case QuarantineEnded():
                assert action.block_ids
                assert set(action.block_ids) <= self.quarantined, "out of quarantine without having been in it"
                open_rows = {row for read in self.open_reads.values() for row in read.local_rows}
                assert not open_rows & set(action.block_ids), "out of quarantine while a read may write"
                self.quarantined.difference_update(action.block_ids)

    def _check_read(self, read: PostRead | PostSealRead) -> None:
        assert read.peer in self.open_peers, "a read of a peer that is not open"
        assert read.read_id not in self.open_reads
        assert not self.quarantined & set(read.local_rows), "a read into a quarantined block"
        if isinstance(read, PostSealRead):
            awaited = {row for read_id in read.after for row in self.open_reads[read_id].local_rows}
            assert set(read.local_rows) <= self.bytes_here | awaited, "seals are asked for of blocks that nobody reads"
            for read_id, other in self.open_reads.items():
                is_awaited = read_id in read.after and isinstance(other, PostRead)
                assert is_awaited or not set(other.local_rows) & set(read.local_rows), "seals are read beside their blocks"
        else:
            self.bytes_here.difference_update(read.local_rows)
        self.open_reads[read.read_id] = read

    def _check_end(self, ended: LoadEnded) -> None:
        name = ended.request_id
        assert name not in self.ended, "reported twice"
        self.ended[name] = ended
        if ended.invalid_block_ids is not ALL_BLOCKS:
            assert set(ended.invalid_block_ids) <= set(self.requests[name].local_rows)
        assert self.usable_rows(name) <= self.sealed, "accepted without its seal"
        may_be_written = {row for read_id in self.reads_of(name) for row in self.open_reads[read_id].local_rows}
        assert set(ended.quarantined_block_ids) == may_be_written
        assert len(ended.quarantined_block_ids) == len(may_be_written)
        self.quarantined |= may_be_written


@pytest.fixture
def make_pull() -> Callable[..., PullDriver]:
    return PullDriver


@pytest.fixture
def pull() -> PullDriver:
    return PullDriver()


@pytest.fixture
def make_identity() -> Callable[..., WorkerIdentity]:
    return identity


@pytest.fixture
def make_seal() -> Callable[..., bytes]:
    return seal_row


@pytest.fixture
def layout() -> KVLayoutInfo:
    return LAYOUT


@pytest.fixture
def address() -> str:
    return ADDRESS
