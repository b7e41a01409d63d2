"""Random histories of clients and workers that die, refuse, freeze, come back, and of messages that are late or lost.

The workers are played honestly, each by the messages that have reached it. What they put out depends on seed, choice and
position only, as in the real engine, so the client must see exactly one sequence, whichever worker computes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.errors import EngineDead, KVFerryError, NoWorker, Overloaded, StaleBlock
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.messages import (
    Abort,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    PrefillChoice,
    PrefillDone,
    Refused,
    Register,
    Release,
    RequestFailed,
    Tokens,
)
from core.wire.sampling import SamplingParams
from router.dispatch.core import RouterCore, RouterLimits, Transmit
from router.dispatch.membership import DUPLICATE_ENGINE_ID
from router.dispatch.request_state import Deliver, DeliverTokens, Ended
from router.dispatch.types import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "a0": "aggregated"}
FAILURES = [ErrorInfo.of(kind("it happens")) for kind in (EngineDead, NoWorker, Overloaded, StaleBlock)]
FAILURES.append(ErrorInfo.of(Overloaded("its grammar has to wait", param="structured_outputs")))
DECLARED = {"peer_lost", "no_worker", "overloaded", "cancelled", "deadline_exceeded", "engine_dead", "stale", "protocol_error"}
TIMEOUT_S = 300.0  # longer than any history
FAULTS = [
    "lose_tokens",
    "break_connection",
    "fail_a_request",
    "die",
    "restart",
    "leave",
    "freeze",
    "drain",
]


def expected(seed: int, index: int) -> list[int]:
    """Return the whole output of a choice; some end at their first token."""
    return [1000 * seed + 100 * index + position for position in range(1 + (7 * seed + 3 * index) % 6)]


@dataclass
class Job:
    """A request as a worker knows it: the position of each live choice."""

    seed: int
    positions: dict[int, int]
    transfer_id: str = ""
    owner: str = ""


@dataclass
class FakeWorker:
    """One instance and its connection to the router, a queue in each direction."""

    name: str
    incarnation: int = 1
    connection: int = 1
    is_alive: bool = True
    is_frozen: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)
    leases: dict[str, str] = field(default_factory=dict)  # transfer → wire id
    inbox: deque = field(default_factory=deque)
    outbox: deque = field(default_factory=deque)  # (peer, message)

    @property
    def peer(self) -> str:
        return f"{self.name}#{self.incarnation}#{self.connection}"

    @property
    def role(self) -> str:
        return ROLES[self.name]

    @property
    def is_up(self) -> bool:
        return self.is_alive and not self.is_frozen

    def say(self, message) -> None:
        self.outbox.append((self.peer, message))

    def register(self) -> None:
        self.say(
            Register(
                engine_id=self.name,
                incarnation=self.incarnation,
                role=self.role,
                model="tiny",
                model_fingerprint=b"w",
                layout=LAYOUT,
                max_model_len=100,
                max_num_seqs=4,
                num_blocks=10,
                max_num_choices=5,
            )
        )

    def heartbeat(self, *, is_draining: bool = False) -> None:
        num_choices = sum(len(job.positions) for job in self.jobs.values())
        self.say(Heartbeat(engine_id=self.name, incarnation=self.incarnation, num_running=num_choices, is_draining=is_draining))

    def receive(self, message) -> None:
        match message:
            case Generate():
                self._admit(message)
            case Abort():
                for wire_id in message.request_ids:
                    self._stop(wire_id)
            case Release():
                for transfer_id in message.transfer_ids:
                    self.leases.pop(transfer_id, None)
            case Refused(error=error) if error.code != DUPLICATE_ENGINE_ID:
                self.jobs.clear()
                self.register()

    def _admit(self, message: Generate) -> None:
        assert message.handoff == (self.role == "prefill")
        starts = {choice.index: list(choice.output_token_ids) for choice in message.choices}
        starts = starts or {index: [] for index in range(message.n)}
        num_held = sum(len(job.positions) for job in self.jobs.values())
        if num_held + len(starts) > 5:
            self.say(RequestFailed(request_id=message.request_id, error=ErrorInfo.of(Overloaded("full"))))
            return
        seed = message.sampling.seed
        for index, output in starts.items():
            whole = expected(seed, index)
            assert output == whole[: len(output)]
            assert len(output) < len(whole), "a choice that has ended was given away"
        handoff = message.kv_handoff
        self.jobs[message.request_id] = Job(
            seed=seed,
            positions={index: len(output) for index, output in starts.items()},
            transfer_id=handoff.transfer_id if handoff else "",
            owner=handoff.engine_id if handoff else "",
        )

    def _stop(self, name: str) -> None:
        self.jobs.pop(name, None)
        for transfer_id in [transfer for transfer, wire_id in self.leases.items() if wire_id == name]:
            del self.leases[transfer_id]
        wire_id, _, index = name.rpartition("/")
        if wire_id in self.jobs:
            self.jobs[wire_id].positions.pop(int(index), None)
            if not self.jobs[wire_id].positions:
                del self.jobs[wire_id]


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        limits = RouterLimits(
            heartbeat_interval_s=1.0,
            heartbeat_timeout_s=5.0,
            request_timeout_s=TIMEOUT_S,
            max_requests=6,
            max_retries=3,
            worker_wait_s=8.0,
        )
        self.core = RouterCore("tiny", "router-1", limits)
        self.now = 0.0
        self.workers = {name: FakeWorker(name) for name in ROLES}
        self.inboxes = {worker.peer: worker.inbox for worker in self.workers.values()}
        self.sizes: dict[str, int] = {}  # n of each request; its name holds its seed
        self.stopped: set[tuple[str, int]] = set()  # choices that ended by a stop string
        self.output: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[str, ErrorInfo | None] = {}
        self.attempts: dict[str, str] = {}  # request → its newest id on the wire
        self.generated: set[tuple[str, bool]] = set()  # (id on the wire, is prefill leg)
        self.num_faults = 0
        self.excused: set[str] = set()  # handoffs that only their lease can end
        self.lost_aborts: set[str] = set()  # requests whose worker gets another abort with its next message

    # ---- harness -----------------------------------------------------------------------------------------------------

    def do(self, actions) -> None:
        """Carry out actions as ``WorkerGateway`` does: those that follow from peers found gone come last."""
        queue = list(actions)
        for action in queue:  # grows while it is walked
            match action:
                case Transmit(peer, message):
                    if isinstance(message, Generate):
                        self.note_attempt(message)
                    if peer.decode() in self.inboxes:
                        self.inboxes[peer.decode()].append(message)
                    else:
                        queue += self.core.on_unreachable(peer, self.now)
                case Deliver(request_id, update):
                    assert request_id not in self.ended, "an update after the end"
                    for choice in update.choices:
                        self.output[request_id, choice.index] += choice.token_ids
                case DeliverTokens():
                    self.do(action.updates())
                case Ended(request):
                    assert request.request_id not in self.ended, "a request ended twice"
                    self.ended[request.request_id] = request.error

    def note_attempt(self, message: Generate) -> None:
        leg = (message.request_id, message.handoff)
        assert leg not in self.generated, "an id on the wire was used twice"
        self.generated.add(leg)
        self.attempts[message.request_id.partition(".")[0]] = message.request_id

    def to_router(self, worker: FakeWorker) -> None:
        peer, message = worker.outbox.popleft()
        self.do(self.core.on_message(peer.encode(), message, self.now))

    def reconnect(self, worker: FakeWorker) -> None:
        """Give a worker a new connection; what was under way to it is lost."""
        self.excused |= worker.leases.keys()
        for message in worker.inbox:
            self.lost_aborts |= set(message.request_ids) if isinstance(message, Abort) else set()
            self.excused |= {message.kv_handoff.transfer_id} if getattr(message, "kv_handoff", None) else set()
        worker.inbox.clear()
        self.inboxes.pop(worker.peer, None)
        worker.connection += 1
        self.inboxes[worker.peer] = worker.inbox

    def some(self, data, workers: list[FakeWorker]) -> FakeWorker | None:
        return data.draw(st.sampled_from(workers)) if workers else None

    # ---- clients -----------------------------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        self.workers["a0"].is_alive = False  # until a fault restarts it: it can do the work of all others
        for worker in self.workers.values():
            if worker.is_alive:
                worker.register()
                self.to_router(worker)

    @rule(n=st.integers(1, 3))
    def submit(self, n: int) -> None:
        seed = len(self.sizes) + 1
        request_id = f"r{seed}"
        sampling = SamplingParams(seed=seed, max_tokens=9)
        wanted = Submission(request_id=request_id, prompt_token_ids=(1, 2), sampling=sampling, n=n)
        self.output.update({(request_id, index): [] for index in range(n)})
        self.sizes[request_id] = n
        try:
            self.do(self.core.submit(wanted, self.now))
        except KVFerryError:
            del self.sizes[request_id]

    @rule(data=st.data(), is_abort=st.booleans())
    def client(self, data, is_abort: bool) -> None:
        """Let a client leave, or find a stop string."""
        shown = sorted(key for key, output in self.output.items() if output and key[0] not in self.ended)
        if is_abort and self.sizes:
            self.do(self.core.abort(data.draw(st.sampled_from(sorted(self.sizes))), "client", self.now))
        elif shown:
            key = data.draw(st.sampled_from(shown))
            self.stopped.add(key)
            self.do(self.core.finish_choice(*key, self.now))

    # ---- workers at work ---------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def deliver_to_worker(self, data) -> None:
        worker = self.some(data, [worker for worker in self.workers.values() if worker.is_up and worker.inbox])
        if worker is not None:
            worker.receive(worker.inbox.popleft())

    @rule(data=st.data(), is_repeated=st.booleans())
    def deliver_to_router(self, data, is_repeated: bool) -> None:
        worker = self.some(data, [worker for worker in self.workers.values() if worker.outbox])
        if worker is not None:
            if is_repeated and isinstance(worker.outbox[0][1], list):
                worker.outbox.appendleft(worker.outbox[0])
                self.to_router(worker)
            self.to_router(worker)

    @rule(data=st.data(), count=st.integers(1, 3))
    def work(self, data, count: int) -> None:
        jobs = [(worker, wire_id) for worker in self.workers.values() if worker.is_up for wire_id in worker.jobs]
        if jobs:
            worker, wire_id = data.draw(st.sampled_from(jobs))
            index = data.draw(st.sampled_from(sorted(worker.jobs[wire_id].positions)))
            self.advance(worker, wire_id, index, count)

    @rule(is_told=st.booleans())
    def everybody_reads_and_works(self, is_told: bool) -> None:
        self.go_on(is_told=is_told)

    @rule()
    def the_router_reads(self) -> None:
        for worker in self.workers.values():
            self.flush(worker)

    def everybody_reads(self) -> None:
        for worker in self.workers.values():
            while worker.is_up and worker.inbox:
                worker.receive(worker.inbox.popleft())
            self.flush(worker)

    def flush(self, worker: FakeWorker) -> None:
        while worker.outbox:
            self.to_router(worker)

    def go_on(self, *, is_told: bool) -> None:
        """Let each worker read what it was sent and do a piece of work, and tell the router of it."""
        for worker in self.workers.values():
            while worker.is_up and worker.inbox:
                worker.receive(worker.inbox.popleft())
            for wire_id in list(worker.jobs) if worker.is_up else ():
                self.advance(worker, wire_id, min(worker.jobs[wire_id].positions), 1)
            if is_told:
                self.flush(worker)

    def advance(self, worker: FakeWorker, wire_id: str, index: int, count: int) -> None:
        if worker.role == "prefill":
            self.finish_prefill(worker, wire_id)
        else:
            self.generate(worker, wire_id, index, count)

    def finish_prefill(self, worker: FakeWorker, wire_id: str) -> None:
        job = worker.jobs.pop(wire_id)
        choices = []
        for index in job.positions:
            whole = expected(job.seed, index)
            choices.append(PrefillChoice(index=index, token_id=whole[0], finish_reason="stop" if len(whole) == 1 else None))
        is_over = all(choice.finish_reason for choice in choices)
        handoff = None if is_over else self.lease(worker, wire_id)
        worker.say(PrefillDone(request_id=wire_id, choices=tuple(choices), kv_handoff=handoff))

    def lease(self, worker: FakeWorker, wire_id: str) -> KVHandoff:
        transfer_id = f"t-{wire_id}-{worker.peer}"
        worker.leases[transfer_id] = wire_id
        return KVHandoff(
            transfer_id=transfer_id,
            engine_id=worker.name,
            incarnation=worker.incarnation,
            control_address="tcp://127.0.0.1:1",
            model_fingerprint=b"w",
            layout=LAYOUT,
            groups=(GroupBlocks(group_id=0, block_ids=(1,), generations=(1,), block_hashes=(bytes(16),)),),
            num_tokens=2,
            lease_ms=30_000,
        )

    def generate(self, worker: FakeWorker, wire_id: str, index: int, count: int) -> None:
        job = worker.jobs[wire_id]
        if job.owner:  # read it, or find it gone and compute
            self.workers[job.owner].leases.pop(job.transfer_id, None)
        whole, position = expected(job.seed, index), job.positions[index]
        token_ids = tuple(whole[position : position + count])
        is_last = position + count >= len(whole)
        worker.say([Tokens(wire_id, index, position, token_ids, "stop" if is_last else None)])
        job.positions[index] += count
        if is_last:
            del job.positions[index]
            if not job.positions:
                del worker.jobs[wire_id]

    # ---- faults ------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), kind=st.sampled_from(FAULTS), name=st.sampled_from(sorted(ROLES)))
    def fault(self, data, kind: str, name: str) -> None:
        self.num_faults += 1
        getattr(self, kind)(self.workers[name], data)

    def lose_tokens(self, worker: FakeWorker, data) -> None:
        """Drop a frame; a later one will show the gap."""
        if worker.outbox and isinstance(worker.outbox[0][1], list) and not worker.outbox[0][1][0].finish_reason:
            worker.outbox.popleft()

    def break_connection(self, worker: FakeWorker, data) -> None:
        """Lose or delay the worker's last messages together with the connection."""
        if worker.is_up:
            if data.draw(st.booleans()):
                worker.outbox.clear()
            self.reconnect(worker)
            worker.heartbeat()

    def fail_a_request(self, worker: FakeWorker, data) -> None:
        if worker.is_up and worker.jobs:
            wire_id = data.draw(st.sampled_from(sorted(worker.jobs)))
            del worker.jobs[wire_id]
            worker.say(RequestFailed(request_id=wire_id, error=data.draw(st.sampled_from(FAILURES))))

    def die(self, worker: FakeWorker, data=None) -> None:
        worker.is_alive, worker.is_frozen = False, False
        worker.jobs.clear()
        worker.leases.clear()
        worker.outbox.clear()
        self.reconnect(worker)

    def restart(self, worker: FakeWorker, data=None) -> None:
        self.die(worker)
        self.inboxes.pop(worker.peer)
        worker.is_alive = True
        worker.incarnation += 1
        self.inboxes[worker.peer] = worker.inbox
        worker.register()

    def leave(self, worker: FakeWorker, data) -> None:
        if worker.is_up:
            for wire_id in worker.jobs:
                worker.say(RequestFailed(request_id=wire_id, error=ErrorInfo.of(NoWorker("shuts down"))))
            worker.say(Goodbye(engine_id=worker.name, incarnation=worker.incarnation))
            worker.jobs.clear()
            worker.leases.clear()
            worker.is_alive = False

    def freeze(self, worker: FakeWorker, data) -> None:
        worker.is_frozen = worker.is_alive and not worker.is_frozen

    def drain(self, worker: FakeWorker, data) -> None:
        if worker.is_up:
            worker.heartbeat(is_draining=True)

    @rule(seconds=st.floats(0.2, 4.0))
    def time_passes(self, seconds: float) -> None:
        """A worker's messages arrive before its heartbeat; only a frozen worker is late by seconds."""
        self.now += seconds
        for worker in self.workers.values():
            if worker.is_up:
                worker.heartbeat()
                self.flush(worker)
        self.do(self.core.on_timer(self.now))

    # ---- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def clients_see_what_one_worker_would_have_said(self) -> None:
        for (request_id, index), output in self.output.items():
            assert output == expected(int(request_id[1:]), index)[: len(output)]

    @invariant()
    def requests_that_ended_well_are_whole(self) -> None:
        for request_id, error in self.ended.items():
            if error is not None:
                assert error.code in DECLARED
                continue
            for index in range(self.sizes[request_id]):
                is_whole = self.output[request_id, index] == expected(int(request_id[1:]), index)
                assert is_whole or (request_id, index) in self.stopped

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.core.dispatcher) == len(self.sizes) - len(self.ended)
        for worker in self.core.membership.workers:
            assert worker.num_inflight >= 0
            if not len(self.core.dispatcher):
                assert worker.num_inflight == 0

    def teardown(self) -> None:
        """In a calm cluster every request ends before its deadline, and nothing is left anywhere."""
        for worker in self.workers.values():
            if not worker.is_alive:
                self.restart(worker)
            worker.is_frozen = False
        for _ in range(8):
            self.time_passes(0.25)
            self.everybody_reads()
        for worker in self.workers.values():
            for wire_id in worker.jobs.keys() - self.lost_aborts:
                request_id = wire_id.partition(".")[0]
                assert request_id not in self.ended, "a worker was left with a request that has ended"
                assert self.attempts[request_id] == wire_id, "a worker was left with an attempt that was given up"
        for _ in range(80):  # longer than a refused grammar waits for the next try
            self.time_passes(0.25)
            self.go_on(is_told=True)
        assert self.ended.keys() == self.sizes.keys()
        self.counts_agree()
        self.requests_that_ended_well_are_whole()
        if not self.num_faults:
            assert {error.code for error in self.ended.values() if error} <= {"cancelled"}
        for worker in self.workers.values():
            assert not worker.jobs, "a worker was left with a stale attempt"
            assert worker.leases.keys() <= self.excused, "a handoff was neither read nor released"


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestHistories = pytest.mark.slow(Histories.TestCase)
