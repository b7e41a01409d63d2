"""A worker and a router of different wire versions: few frames and two log lines, however long they talk."""

from __future__ import annotations

from collections import deque

import pytest
from prometheus_client import CollectorRegistry

from core.errors import ProtocolError
from core.metrics import WorkerMetrics
from core.testing.clock import FakeClock
from core.wire import codec
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Generate, Register, Rejected
from core.wire.sampling import SamplingParams
from core.wire.version import MAX_RETRY_S, REFUSAL_INTERVAL_S
from core.worker.actions import AdmissionLimits, EngineLoad, Send, SubmitAbort
from core.worker.role import EngineFacts
from core.worker.state import WorkerState
from decode.role import DecodeHandler
from router.dispatch.core import RefuseVersion, RouterCore, RouterLimits, Transmit
from router.dispatch.peer_log import PeerLog

LAYOUT = KVLayoutInfo(
    dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024, num_groups=1
)
REGISTRATION = Register(
    engine_id="w", incarnation=1, role="aggregated", model="tiny", model_fingerprint=b"w", layout=LAYOUT,
    max_model_len=64, max_num_seqs=2, num_blocks=8,
)  # fmt: skip
LIMITS = RouterLimits(heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=60.0, max_requests=9)
MAX_FRAMES = 10_000  # of one run: a storm ends the test


class Router:
    def __init__(self, version: int, clock: FakeClock) -> None:
        self.version, self.clock = version, clock
        self.core = RouterCore("tiny", f"router of {version}", LIMITS)
        self.log = PeerLog(clock)

    def receive(self, frame: bytes) -> list[bytes]:
        try:
            actions = self.core.on_message(b"w", codec.decode_worker_frame(frame, self.version), self.clock.now())
        except ProtocolError as error:
            self.log.bad_frame(b"w", error)
            actions = self.core.on_malformed(b"w", error, self.clock.now())
        return self.frames_of(actions)

    def tick(self) -> list[bytes]:
        return self.frames_of(self.core.on_timer(self.clock.now()))

    def frames_of(self, actions) -> list[bytes]:
        sent = [action for action in actions if isinstance(action, Transmit | RefuseVersion)]
        return [
            action.frame if isinstance(action, RefuseVersion) else codec.encode_router_message(action.message, self.version)
            for action in sent
        ]


class Worker:
    def __init__(self, version: int, clock: FakeClock) -> None:
        self.version, self.clock = version, clock
        self.aborted: list[str] = []
        self.state = WorkerState(
            REGISTRATION,
            DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset({2}))),
            AdmissionLimits(max_num_seqs=2, max_waiting_requests=1, drain_timeout_s=10.0),
            EngineLoad,
            WorkerMetrics(CollectorRegistry(), {}),
        )

    def connect(self) -> list[bytes]:
        return self.frames_of(self.state.connect("router", self.clock.now()))

    def receive(self, frame: bytes) -> list[bytes]:
        try:
            message = codec.decode_router_frame(frame, self.version)
        except ProtocolError as error:
            return self.frames_of(self.state.on_bad_frame("router", error, self.clock.now()))
        return self.frames_of(self.state.on_router_message("router", message, self.clock.now()))

    def tick(self) -> list[bytes]:
        return self.frames_of(self.state.on_timer(self.clock.now()))

    def frames_of(self, actions) -> list[bytes]:
        self.aborted += [name for action in actions if isinstance(action, SubmitAbort) for name in action.engine_request_ids]
        return [codec.encode_worker_message(action.message, self.version) for action in actions if isinstance(action, Send)]


class AnswersAll(Worker):
    """A worker of the first release: it knows no refusal, and answers even messages it cannot read."""

    def receive(self, frame: bytes) -> list[bytes]:
        try:
            codec.decode_router_frame(frame, self.version)
        except ProtocolError as error:
            return [codec.encode_worker_message(Rejected(error={"code": "protocol_error", "message": error.message[:9]}), 1)]
        return []


class Talk:
    """Both under one clock; every frame arrives at once."""

    def __init__(self, worker_version: int, router_version: int, worker_type: type[Worker] = Worker) -> None:
        self.clock = FakeClock()
        self.router = Router(router_version, self.clock)
        self.worker = worker_type(worker_version, self.clock)
        self.num_from_worker = self.num_from_router = 0
        self.exchange(self.worker.connect())

    def exchange(self, to_router: list[bytes] = (), to_worker: list[bytes] = ()) -> None:
        queue = deque([*((self.router, frame) for frame in to_router), *((self.worker, frame) for frame in to_worker)])
        while queue:
            receiver, frame = queue.popleft()
            is_router = receiver is self.router
            self.num_from_worker += is_router
            self.num_from_router += not is_router
            assert self.num_from_worker + self.num_from_router < MAX_FRAMES, "a storm"
            sender = self.worker if is_router else self.router
            queue += [(sender, answer) for answer in receiver.receive(frame)]

    def run(self, seconds: float, step_s: float = 0.05) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            self.exchange(to_worker=self.router.tick())
            self.exchange(to_router=self.worker.tick())

    def restart_router(self, version: int) -> None:
        self.router = Router(version, self.clock)


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.slow
@pytest.mark.parametrize("versions", [(2, 1), (1, 2), (255, 1), (1, 255)])
def test_ten_minutes_of_skew_cost_few_frames_and_two_lines(caplog, versions):
    talk = Talk(*versions)
    talk.run(600)
    assert talk.num_from_worker <= 6 + 600 / MAX_RETRY_S + 1
    assert talk.num_from_router <= talk.num_from_worker
    theirs_at_worker, theirs_at_router = (line for line in lines(caplog) if "other_wire_version" in line)
    assert sorted([theirs_at_worker, theirs_at_router]) == sorted(lines(caplog))
    for line in lines(caplog):
        assert {f"={version}" in line for version in versions} == {True}


def test_a_worker_is_accepted_once_the_router_speaks_its_version(caplog):
    talk = Talk(2, 1)
    talk.run(100)
    talk.restart_router(2)
    talk.run(MAX_RETRY_S)
    assert [worker.key.engine_id for worker in talk.router.core.membership.workers] == ["w"]
    talk.run(10)
    assert talk.worker.state.num_registered_routers == 1
    assert len(lines(caplog)) == 2


def test_a_worker_loses_its_requests_to_a_router_of_another_version():
    talk = Talk(1, 1)
    assert talk.worker.state.num_registered_routers == 1
    request = Generate(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    talk.worker.frames_of(talk.worker.state.on_router_message("router", request, 0.0))
    talk.restart_router(2)
    talk.run(10)
    assert talk.worker.state.num_registered_routers == 0
    assert talk.worker.aborted == ["r/0"]
    talk.restart_router(1)
    talk.run(MAX_RETRY_S)
    assert talk.worker.state.num_registered_routers == 1


def test_a_worker_that_answers_every_refusal_is_refused_once_per_interval(caplog):
    talk = Talk(1, 2, AnswersAll)
    talk.run(100)
    assert talk.num_from_router <= 100 / REFUSAL_INTERVAL_S + 1
    assert len([line for line in lines(caplog) if "other_wire_version" in line]) <= 2


def test_a_member_that_turns_to_another_version_is_dropped():
    talk = Talk(1, 1)
    assert len(talk.router.core.membership.workers) == 1
    talk.exchange(to_router=[codec.encode_worker_message(REGISTRATION, 2)])
    assert talk.router.core.membership.workers == []
