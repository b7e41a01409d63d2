"""Builders for tests of the p2p connector: identities, and a ``PullProtocol`` with everything around it played by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

from connectors.p2p.actions import (
    Action,
    ClosePeer,
    HandoffRef,
    LoadEnded,
    LoadFailed,
    OpenPeer,
    PostRead,
    PullRequest,
    ReadEnded,
    SendControl,
)
from connectors.p2p.handshake import WorkerIdentity
from connectors.p2p.pull import PullProtocol, PullSettings
from core.errors import KVFerryError
from core.testing.clock import FakeClock
from core.transport import PeerId
from core.wire.kv import ControlMessage, HandshakeReply, KVLayoutInfo, LeaseState

ADDRESS = "tcp://10.0.0.1:5600"
ROW_BYTES = 1024
LAYOUT = KVLayoutInfo(
    dtype="float32", order="HND", block_size=32, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=ROW_BYTES
)
FINGERPRINT = b"model"

T = TypeVar("T")


def identity(engine_id: str = "decode-0", incarnation: int = 77, **changed: object) -> WorkerIdentity:
    values = {"model_fingerprint": FINGERPRINT, "layout": LAYOUT, "host_id": "host"} | changed
    return WorkerIdentity(engine_id=engine_id, incarnation=incarnation, **values)


class PullDriver:
    """A pull protocol whose engine, network, peers and clock are the test's.

    Keeps what any environment could hold against the protocol: reads only of open peers, a failure at most once, an end exactly
    once and only after the last read of the load is terminal.
    """

    def __init__(self, *, rows_per_read: int = 2, max_reads_in_flight: int = 2, **settings: float) -> None:
        durations = {"transfer_deadline_s": 30.0, "handshake_timeout_s": 5.0, "lease_renew_interval_s": 5.0} | settings
        self.clock = FakeClock()
        self.protocol = PullProtocol(
            identity(),
            ("shm", "tcp"),
            PullSettings(max_read_bytes=rows_per_read * ROW_BYTES, max_reads_in_flight=max_reads_in_flight, **durations),
        )
        self.log: list[Action] = []
        self.requests: dict[str, PullRequest] = {}
        self.open_peers: set[PeerId] = set()
        self.open_reads: dict[int, PostRead] = {}
        self.failed: dict[str, str] = {}  # request id → error code
        self.ended: dict[str, LoadEnded] = {}
        self._next_row = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    # ---- what the engine and the world do

    def start(
        self,
        request_id: str = "r",
        num_rows: int = 3,
        transfer_id: str = "t",
        incarnation: int = 1,
        address: str = ADDRESS,
    ) -> list[Action]:
        rows = tuple(range(self._next_row, self._next_row + num_rows))
        self._next_row += num_rows
        ref = HandoffRef(transfer_id, PeerId(address, incarnation))
        request = PullRequest(request_id, ref, tuple(row + 500 for row in rows), rows, 32 * num_rows)
        self.requests[request_id] = request
        return self.take(self.protocol.start(request, self.now))

    def hold(self, transfer_id: str = "t", incarnation: int = 1, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.hold(HandoffRef(transfer_id, PeerId(address, incarnation)), self.now))

    def release(self, transfer_id: str = "t", incarnation: int = 1, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.release(HandoffRef(transfer_id, PeerId(address, incarnation))))

    def abort(self, request_id: str = "r") -> list[Action]:
        return self.take(self.protocol.abort(request_id, self.now))

    def receive(self, message: ControlMessage, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.on_control(address, message, self.now))

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

    def grant(self, left_ms: int = 60_000, *transfer_ids: str, incarnation: int = 1, address: str = ADDRESS) -> list[Action]:
        """Let the peer say how long it holds these, by default ``t``."""
        left = dict.fromkeys(transfer_ids or ("t",), left_ms)
        return self.receive(LeaseState(incarnation=incarnation, left_ms=left), address)

    def start_reading(self, request_id: str = "r", num_rows: int = 3, **where) -> list[Action]:
        """Start a load and take it to its first reads."""
        self.start(request_id, num_rows, **where)
        self.accept()
        return self.grant(60_000, where.get("transfer_id", "t"))

    def end_read(self, read_id: int, error: KVFerryError | None = None) -> list[Action]:
        self.open_reads.pop(read_id, None)
        return self.take(self.protocol.on_transfer(ReadEnded(read_id, error), self.now))

    def end_reads(self, error: KVFerryError | None = None) -> None:
        """End open reads until there are none."""
        while self.open_reads:
            self.end_read(min(self.open_reads), error)

    def disconnect(self, address: str = ADDRESS) -> list[Action]:
        return self.take(self.protocol.on_disconnected(address, self.now))

    def tick(self, seconds: float = 0.0) -> list[Action]:
        self.clock.advance(seconds)
        actions = self.take(self.protocol.on_timer(self.now))
        due = self.protocol.next_timer()
        assert due is None or due > self.now, "the timer is due again at once: the event loop would spin"
        return actions

    # ---- what the protocol wants

    def take(self, actions: Iterable[Action]) -> list[Action]:
        actions = list(actions)
        for action in actions:
            self._check(action)
        self.log += actions
        return actions

    def messages(self, kind: type[T]) -> list[T]:
        """Control messages of a kind that were sent so far."""
        return [action.message for action in self.log if isinstance(action, SendControl) and isinstance(action.message, kind)]

    def actions(self, kind: type[T]) -> list[T]:
        """Actions of a kind so far."""
        return [action for action in self.log if isinstance(action, kind)]

    def reads_of(self, request_id: str) -> list[int]:
        """Open reads that write blocks of the request."""
        rows = set(self.requests[request_id].local_rows)
        return [read_id for read_id, read in self.open_reads.items() if rows & set(read.local_rows)]

    def _check(self, action: Action) -> None:
        match action:
            case OpenPeer():
                assert action.peer not in self.open_peers, "opened twice"
                self.open_peers.add(action.peer)
            case ClosePeer():
                assert action.peer in self.open_peers, "closed without being open"
                self.open_peers.discard(action.peer)
            case PostRead():
                assert action.peer in self.open_peers, "a read of a peer that is not open"
                assert action.read_id not in self.open_reads
                self.open_reads[action.read_id] = action
            case LoadFailed():
                assert action.request_id not in self.failed, "failed twice"
                assert action.request_id not in self.ended, "failed after its end"
                self.failed[action.request_id] = action.error.code
            case LoadEnded():
                assert action.request_id not in self.ended, "ended twice"
                assert not self.reads_of(action.request_id), "ended while a read may still write"
                assert action.usage is None or action.request_id not in self.failed, "failed and succeeded"
                self.ended[action.request_id] = action


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
def layout() -> KVLayoutInfo:
    return LAYOUT


@pytest.fixture
def address() -> str:
    return ADDRESS
