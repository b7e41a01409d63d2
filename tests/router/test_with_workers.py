"""The router's core and the workers' own state machines and role handlers, joined by queues; only the engines are played."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput, NewRequest
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import Register
from core.wire.sampling import SamplingParams
from core.worker.actions import AdmissionLimits, EngineLoad, ReleaseTransfers, Send, SubmitAbort, SubmitAdd
from core.worker.role import EngineFacts
from core.worker.state import WorkerState
from decode.role import DecodeHandler
from prefill.role import PrefillHandler
from router.dispatch.core import RouterCore, RouterLimits, Transmit
from router.dispatch.request_state import Deliver, DeliverTokens, Ended
from router.dispatch.types import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
ROLES = {"p": "prefill", "d": "decode", "a": "aggregated"}
FACTS = EngineFacts(max_model_len=512, eos_token_ids=frozenset())
HEARTBEAT_TIMEOUT_S = 5.0


def token(choice_index: int, position: int) -> int:
    """Return what any engine samples there."""
    return 100 * choice_index + position


@dataclass
class PlayedEngine:
    """Samples one token per request and step; keeps handoffs until they are released."""

    name: str
    live: dict[str, tuple[NewRequest, int]] = field(default_factory=dict)  # engine id → (request, next position)
    leased: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)

    def add(self, requests: list[NewRequest]) -> None:
        for new in requests:
            assert new.request_id not in self.live
            self.live[new.request_id] = (new, len(new.output_token_ids))

    def abort(self, ids: list[str]) -> None:
        for engine_id in ids:
            if self.live.pop(engine_id, None):
                self.aborted.append(engine_id)

    def step(self) -> list[EngineCoreOutput]:
        outputs = []
        for engine_id, (new, position) in list(self.live.items()):
            is_last = position + 1 >= new.sampling.max_tokens
            output = EngineCoreOutput(engine_id, [token(new.choice_index, position)], "length" if is_last else None)
            self.live[engine_id] = (new, position + 1)
            if is_last:
                del self.live[engine_id]
                output.kv_handoff = self._lease(new) if new.needs_handoff else None
            outputs.append(output)
        return outputs

    def _lease(self, new: NewRequest) -> KVHandoff:
        self.leased.add(f"t-{new.request_id}")
        return KVHandoff(
            transfer_id=f"t-{new.request_id}",
            engine_id=self.name,
            incarnation=1,
            control_address="tcp://127.0.0.1:1",
            model_fingerprint=b"w",
            layout=LAYOUT,
            groups=(),
            num_tokens=len(new.prompt_token_ids),
            lease_ms=30_000,
        )


class PlayedWorker:
    def __init__(self, name: str, now: float) -> None:
        role = ROLES[name[0]]
        self.name = name
        self.engine = PlayedEngine(name)
        self.outbox: deque = deque()
        registration = Register(
            engine_id=name,
            incarnation=1,
            role=role,
            model="tiny",
            model_fingerprint=b"w",
            layout=LAYOUT,
            max_model_len=512,
            max_num_seqs=8,
            num_blocks=64,
            max_num_choices=8,
        )
        self.state = WorkerState(
            registration,
            PrefillHandler(FACTS) if role == "prefill" else DecodeHandler(FACTS),
            AdmissionLimits(max_num_seqs=8, max_waiting_requests=0, drain_timeout_s=5.0),
            lambda: EngineLoad(num_running=len(self.engine.live), num_leased_blocks=len(self.engine.leased)),
            WorkerMetrics(CollectorRegistry(), {}),
        )
        self.do(self.state.connect("router", now))

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self.outbox.append(message)
                case SubmitAdd(requests=requests):
                    self.engine.add(requests)
                case SubmitAbort(engine_request_ids=ids):
                    self.engine.abort(ids)
                case ReleaseTransfers(transfer_ids=ids):
                    self.engine.leased.difference_update(ids)


class Cluster:
    """One router and its workers under one clock. Messages wait in queues until ``deliver``."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.output: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.workers = {name: PlayedWorker(name, self.now) for name in names}
        self.start_router("router-1")
        self.deliver()

    def start_router(self, router_id: str) -> None:
        limits = RouterLimits(
            heartbeat_interval_s=1.0, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, request_timeout_s=60.0, max_requests=9
        )
        self.router = RouterCore("tiny", router_id, limits)
        self.inboxes: dict[str, deque] = {name: deque() for name in self.workers}

    def submit(self, request_id: str = "r1", n: int = 1, max_tokens: int = 6) -> None:
        self.output.update({(request_id, index): [] for index in range(n)})
        sampling = SamplingParams(seed=1, max_tokens=max_tokens)
        wanted = Submission(request_id=request_id, prompt_token_ids=(1, 2, 3), sampling=sampling, n=n)
        self.do(self.router.submit(wanted, self.now))

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Transmit(peer, message) if peer.decode() in self.workers:
                    self.inboxes[peer.decode()].append(message)
                case Deliver(request_id, update):
                    for choice in update.choices:
                        self.output[request_id, choice.index] += choice.token_ids
                case DeliverTokens():
                    self.do(action.updates())
                case Ended(request):
                    self.ended[request.request_id] = action

    def to_worker(self, name: str) -> None:
        """Let a worker read what the router has sent it."""
        worker, inbox = self.workers[name], self.inboxes[name]
        while inbox:
            worker.do(worker.state.on_router_message("router", inbox.popleft(), self.now))

    def to_router(self, name: str) -> None:
        """Let the router read what a worker has sent it."""
        worker = self.workers[name]
        while worker.outbox:
            self.do(self.router.on_message(name.encode(), worker.outbox.popleft(), self.now))

    def deliver(self) -> None:
        """Carry messages until there are none."""
        while any(self.inboxes.values()) or any(worker.outbox for worker in self.workers.values()):
            for name in self.workers:
                self.to_router(name)
                self.to_worker(name)

    def step(self, name: str) -> None:
        """Run one step of a worker's engine; a decode worker reads its handoffs, and lets them go, before the first."""
        worker = self.workers[name]
        for new, _ in worker.engine.live.values():
            if new.kv_handoff is not None and new.kv_handoff.engine_id in self.workers:
                self.workers[new.kv_handoff.engine_id].engine.leased.discard(new.kv_handoff.transfer_id)
        worker.do(worker.state.on_outputs(worker.engine.step(), self.now))

    def run(self) -> None:
        """Step and deliver until every request has ended."""
        for _ in range(50):
            self.deliver()
            for name in self.workers:
                self.step(name)

    def stop_choice(self, index: int) -> None:
        self.do(self.router.finish_choice("r1", index, self.now))

    def abort(self) -> None:
        self.do(self.router.abort("r1", "client disconnected", self.now))

    def kill(self, name: str) -> None:
        del self.workers[name], self.inboxes[name]
        self.do(self.router.on_unreachable(name.encode(), self.now))

    def assert_idle(self) -> None:
        self.deliver()
        assert len(self.router.dispatcher) == 0
        assert [worker.num_inflight for worker in self.router.membership.workers if worker.num_inflight] == []
        for worker in self.workers.values():
            assert worker.state.num_requests == 0
            assert worker.engine.live == {}
            assert worker.engine.leased == set()


def whole(index: int, num_tokens: int = 6) -> list[int]:
    return [token(index, position) for position in range(num_tokens)]


@pytest.mark.parametrize("names", [("p0", "d0"), ("a0",)])
def test_every_choice_is_served_to_its_end(names):
    cluster = Cluster(*names)
    cluster.submit(n=3)
    cluster.run()
    assert [cluster.output["r1", index] for index in range(3)] == [whole(0), whole(1), whole(2)]
    cluster.assert_idle()


# ---- one choice ends by its text -----------------------------------------------------------------------------------------


def cluster_after_prefill(*names: str, n: int = 3) -> Cluster:
    """Return a cluster whose r1 has its first tokens; the decode worker has not read its message yet."""
    cluster = Cluster(*names)
    cluster.submit(n=n)
    for _ in range(3):  # the choice that computes the prompt, those that find it, the one that keeps the blocks
        cluster.deliver()
        cluster.step("p0")
    cluster.to_router("p0")
    assert len(cluster.output["r1", 0]) == 1
    return cluster


@pytest.mark.parametrize("when", ["before the decode worker has it", "while it loads", "in mid-stream"])
def test_a_stopped_choice_ends_on_the_decode_worker_and_the_others_continue(when):
    cluster = cluster_after_prefill("p0", "d0")
    if when != "before the decode worker has it":
        cluster.deliver()
    if when == "in mid-stream":
        cluster.step("d0")
        cluster.deliver()
    cluster.stop_choice(1)
    cluster.deliver()
    assert cluster.workers["d0"].engine.aborted == ["r1/1"]
    num_shown = len(cluster.output["r1", 1])
    cluster.run()
    assert [cluster.output["r1", index] for index in (0, 2)] == [whole(0), whole(2)]
    assert len(cluster.output["r1", 1]) == num_shown
    assert cluster.ended["r1"].request.error is None
    cluster.assert_idle()


def test_the_last_choice_that_is_stopped_takes_the_request_along():
    cluster = cluster_after_prefill("p0", "d0", n=2)
    cluster.deliver()
    cluster.stop_choice(0)
    cluster.stop_choice(1)
    assert cluster.ended["r1"].request.error is None
    cluster.assert_idle()


def test_a_choice_is_stopped_on_the_worker_that_took_over():
    cluster = cluster_after_prefill("p0", "d0", "d1")
    cluster.deliver()
    cluster.step("d0")
    cluster.deliver()
    cluster.kill("d0")
    cluster.deliver()
    cluster.stop_choice(2)
    cluster.run()
    assert [cluster.output["r1", index] for index in range(2)] == [whole(0), whole(1)]
    assert cluster.output["r1", 2] == whole(2)[:2]
    cluster.assert_idle()


# ---- the client leaves ---------------------------------------------------------------------------------------------------


def test_an_abort_before_the_prefill_worker_has_the_request():
    cluster = Cluster("p0", "d0")
    cluster.submit()
    cluster.abort()
    cluster.assert_idle()


def test_an_abort_while_the_prompt_is_computed():
    cluster = Cluster("p0", "d0")
    cluster.submit(n=2)
    cluster.deliver()
    cluster.abort()
    cluster.deliver()
    assert cluster.workers["p0"].engine.aborted == ["r1/0"]
    cluster.assert_idle()


def test_an_abort_that_crosses_the_first_token():
    cluster = Cluster("p0", "d0")
    cluster.submit()
    cluster.deliver()
    cluster.step("p0")
    cluster.abort()
    assert cluster.workers["p0"].engine.leased == {"t-r1/0"}
    cluster.assert_idle()


def test_an_abort_before_the_decode_worker_has_the_request():
    cluster = cluster_after_prefill("p0", "d0")
    cluster.abort()
    cluster.assert_idle()


def test_an_abort_during_the_read_and_in_mid_stream():
    for num_steps in (0, 1, 2):
        cluster = cluster_after_prefill("p0", "d0")
        for _ in range(num_steps):
            cluster.deliver()
            cluster.step("d0")
        cluster.deliver()
        cluster.abort()
        cluster.deliver()
        assert cluster.workers["d0"].engine.aborted == ["r1/0", "r1/1", "r1/2"]
        cluster.assert_idle()


def test_an_abort_that_crosses_a_refusal_for_lack_of_room():
    cluster = Cluster("p0", "d0")
    cluster.submit("r1", n=1)
    cluster.workers["d0"].state.serving._limits = AdmissionLimits(max_num_seqs=0, max_waiting_requests=0, drain_timeout_s=5.0)
    cluster.deliver()
    cluster.step("p0")
    cluster.deliver()
    assert cluster.router.dispatcher.num_waiting == 1
    cluster.abort()
    cluster.assert_idle()


# ---- workers die ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(6))
def test_a_stream_continues_where_its_worker_died(num_steps):
    cluster = cluster_after_prefill("p0", "d0", "d1")
    for _ in range(num_steps):
        cluster.deliver()
        cluster.step("d0")
    cluster.to_router("d0")
    cluster.kill("d0")
    cluster.run()
    assert [cluster.output["r1", index] for index in range(3)] == [whole(0), whole(1), whole(2)]
    assert cluster.ended["r1"].request.error is None
    cluster.assert_idle()


@pytest.mark.parametrize("num_steps", range(4))
def test_an_aggregated_stream_continues_where_its_worker_died(num_steps):
    cluster = Cluster("a0", "a1")
    cluster.submit(n=2)
    for _ in range(num_steps):
        cluster.deliver()
        cluster.step("a0")
    cluster.to_router("a0")
    cluster.kill("a0")
    cluster.run()
    assert [cluster.output["r1", index] for index in range(2)] == [whole(0), whole(1)]
    cluster.assert_idle()


# ---- the router dies -----------------------------------------------------------------------------------------------------


def test_a_router_that_falls_silent_loses_its_requests_within_its_heartbeat_timeout():
    cluster = cluster_after_prefill("p0", "d0")
    cluster.submit("r2")
    cluster.deliver()
    cluster.step("d0")
    workers = list(cluster.workers.values())
    heard_at = cluster.now
    while any(worker.engine.live for worker in workers):
        cluster.now = min(worker.state.next_timer(cluster.now) for worker in workers)
        assert cluster.now <= heard_at + HEARTBEAT_TIMEOUT_S
        for worker in workers:
            worker.do(worker.state.on_timer(cluster.now))
    assert all(worker.state.num_requests == 0 for worker in workers)
    assert all(worker.state.num_registered_routers == 0 for worker in workers)


def test_a_router_that_comes_back_finds_its_workers_and_none_of_its_old_requests():
    cluster = cluster_after_prefill("p0", "d0")
    cluster.submit("r2")
    cluster.deliver()
    for worker in cluster.workers.values():
        worker.outbox.clear()
    cluster.start_router("router-2")
    cluster.now = 1.0
    for worker in cluster.workers.values():
        worker.do(worker.state.on_timer(cluster.now))
    cluster.deliver()
    assert [worker.engine.live for worker in cluster.workers.values()] == [{}, {}], "orphans live on"
    cluster.now = 1.5
    for worker in cluster.workers.values():
        worker.do(worker.state.on_timer(cluster.now))
    cluster.deliver()
    assert all(worker.state.num_registered_routers == 1 for worker in cluster.workers.values())
    cluster.submit("r3")
    cluster.run()
    assert cluster.output["r3", 0] == whole(0)
