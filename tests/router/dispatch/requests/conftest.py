"""A router core with workers played by the test; its messages, updates and ends are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.messages import (
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    PrefillChoice,
    PrefillDone,
    Register,
    RegisterEncoder,
    RequestFailed,
    Tokens,
)
from core.wire.sampling import SamplingParams
from router.dispatch.core import RouterCore, RouterLimits, Transmit
from router.dispatch.engine_calls import Answered
from router.dispatch.request_state import Deliver, DeliverTokens, EncodeEnded, Ended, Moved, RequestPhase, Retried
from router.dispatch.types import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
ROLES = {"p": "prefill", "d": "decode", "a": "aggregated"}


class Bench:
    """A router core with workers whose connections have the workers' names; the first letter is the role."""

    def __init__(self, *workers: str, **limits) -> None:
        defaults = {
            "heartbeat_interval_s": 1.0,
            "heartbeat_timeout_s": 5.0,
            "request_timeout_s": 60.0,
            "max_requests": 3,
            "max_retries": 2,
            "worker_wait_s": 10.0,
        }
        self.core = RouterCore("tiny", "router-1", RouterLimits(**{**defaults, **limits}))
        self.now = 0.0
        self.sent: list[tuple[str, object]] = []
        self.updates: dict[str, list] = {}
        self.retries: list[Retried] = []
        self.moves: list[Moved] = []
        self.encodes: list[tuple[str, str, int]] = []
        self.ended: dict[str, Ended] = {}
        self.answered: list[Answered] = []  # parts of answers to calls
        self.stalled: dict[str, float] = {}  # ms by worker, for tests of progress
        for name in workers:
            self.join(name)

    # ---- what happens

    def join(self, name: str, **facts) -> None:
        register = Register(
            engine_id=name,
            incarnation=1,
            role=ROLES[name[0]],
            model="tiny",
            model_fingerprint=b"w",
            layout=LAYOUT,
            max_model_len=100,
            max_num_seqs=4,
            num_blocks=10,
            transports=("shm",),
        )
        self.receive(name, msgspec.structs.replace(register, **facts))

    def join_encoder(self, name: str, **facts) -> None:
        """Let an encode worker in whose embeddings the other workers can load."""
        register = RegisterEncoder(
            engine_id=name, incarnation=1, model="tiny", model_fingerprint=b"w", ec_connector="shared", max_num_images=4
        )
        self.receive(name, msgspec.structs.replace(register, **facts))

    def leave(self, name: str) -> None:
        """Let a worker go; to the requests it is no matter whether it said so."""
        self.receive(name, Goodbye(engine_id=name, incarnation=1))

    def heartbeat(self, name: str, **load) -> None:
        self.receive(name, Heartbeat(engine_id=name, incarnation=1, **load))

    def tick(self, until: float) -> None:
        """Let time pass; every worker sends its heartbeats."""
        for _ in self._seconds(until):
            for worker in list(self.core.membership.members):
                self.receive(
                    worker.peer.decode(), Heartbeat(engine_id=worker.key.engine_id, incarnation=worker.key.incarnation)
                )
            self.do(self.core.on_timer(self.now))

    def wait(self, until: float) -> None:
        """Let time pass in which no worker says anything."""
        for _ in self._seconds(until):
            self.do(self.core.on_timer(self.now))

    def _seconds(self, until: float) -> Iterator[None]:
        while self.now + 1.0 < until:
            self.now += 1.0
            yield
        self.now = until
        yield

    def submit(self, request_id: str = "r1", n: int = 1, prompt: int = 10, **sampling) -> None:
        params = SamplingParams(seed=7, **{"max_tokens": 20, **sampling})
        self.do(self.core.submit(self.submission(request_id, n=n, prompt=prompt, sampling=params), self.now))

    def submission(self, request_id: str = "r1", *, prompt: int = 10, **fields) -> Submission:
        defaults = {"sampling": SamplingParams(seed=7, max_tokens=20)}
        return Submission(request_id=request_id, prompt_token_ids=tuple(range(prompt)), **{**defaults, **fields})

    def count(self, phase: RequestPhase) -> int:
        return sum(request.phase is phase for request in self.core.dispatcher.requests.values())

    def receive(self, peer: str, message) -> None:
        self.do(self.core.on_message(peer.encode(), message, self.now))

    def prefill_done(self, request_id: str = "r1", peer: str = "p0", n: int = 1, **changes) -> None:
        done = PrefillDone(
            request_id=request_id,
            choices=tuple(PrefillChoice(index=index, token_id=50 + index) for index in range(n)),
            kv_handoff=self.handoff(request_id, peer),
            num_cached_tokens=4,
            queue_ms=1.0,
            prefill_ms=2.0,
        )
        self.receive(peer, msgspec.structs.replace(done, **changes))

    def handoff(self, request_id: str = "r1", peer: str = "p0") -> KVHandoff:
        return KVHandoff(
            transfer_id=f"t-{request_id}",
            engine_id=peer,
            incarnation=1,
            control_address="tcp://127.0.0.1:1",
            model_fingerprint=b"w",
            layout=LAYOUT,
            groups=(GroupBlocks(group_id=0, block_ids=(1,), generations=(1,), block_hashes=(bytes(16),)),),
            num_tokens=10,
            lease_ms=30_000,
        )

    def tokens(self, position: int, *token_ids: int, request_id: str = "r1", peer: str = "d0", **fields) -> None:
        index = fields.pop("index", 0)
        self.receive(peer, [msgspec.structs.replace(Tokens(request_id, index, position, token_ids), **fields)])

    def fails(self, peer: str, error: ErrorInfo, request_id: str = "r1") -> None:
        self.receive(peer, RequestFailed(request_id=request_id, error=error))

    # ---- what came out

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Transmit(peer, message):
                    self.sent.append((peer.decode(), message))
                case Deliver(request_id, update):
                    assert request_id not in self.ended, "an update after the end"
                    self.updates.setdefault(request_id, []).append(update)
                case DeliverTokens():
                    self.do(action.updates())
                case EncodeEnded():
                    assert action.request_id not in self.ended, "images after the end"
                    self.encodes.append((action.worker.engine_id, action.outcome, action.num_images))
                case Answered():
                    self.answered.append(action)
                case Retried():
                    assert action.request_id not in self.ended, "a retry after the end"
                    self.retries.append(action)
                case Moved():
                    assert action.request_id not in self.ended, "a move after the end"
                    self.moves.append(action)
                case Ended(request):
                    assert request.request_id not in self.ended, "two ends"
                    self.ended[request.request_id] = action

    def to(self, peer: str, kind: type) -> list:
        return [message for name, message in self.sent if name == peer and isinstance(message, kind)]

    def generated(self, peer: str) -> Generate:
        """Return the newest request that a worker was given."""
        return self.to(peer, Generate)[-1]

    def output(self, request_id: str = "r1", index: int = 0) -> list[int]:
        choices = [choice for update in self.updates.get(request_id, []) for choice in update.choices]
        return [token for choice in choices if choice.index == index for token in choice.token_ids]

    def error(self, request_id: str = "r1") -> ErrorInfo | None:
        return self.updates[request_id][-1].error

    def kinds(self) -> list[str]:
        return [retried.kind for retried in self.retries]

    def assert_idle(self) -> None:
        assert len(self.core.dispatcher) == 0
        assert [member.num_inflight for member in self.core.membership.members if member.num_inflight] == []


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def pair() -> Bench:
    """Return a bench with one prefill and one decode worker."""
    return Bench("p0", "d0")


@pytest.fixture
def after_handoff() -> Bench:
    """Return a bench whose request r1 has two choices and a handoff from p0 to d0."""
    bench = Bench("p0", "d0")
    bench.submit(n=2)
    bench.prefill_done(n=2)
    return bench
