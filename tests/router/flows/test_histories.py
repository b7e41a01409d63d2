"""Random histories of clients and workers that die, refuse, freeze, come back, and of messages that are late or lost.

The workers are played honestly, each by the messages that have reached it. What they put out depends on seed, choice and
position only, as in the real engine, so the client must see exactly one sequence whoever computes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

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
from router.cluster import DUPLICATE_ENGINE_ID
from router.flow import Deliver, Ended
from router.machine import RouterLimits, RouterMachine, Transmit
from router.news import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode", "a0": "aggregated"}
FAILURES = [ErrorInfo.of(kind("it happens")) for kind in (EngineDead, NoWorker, Overloaded, StaleBlock)]
DECLARED = {"peer_lost", "no_worker", "overloaded", "cancelled", "deadline_exceeded", "engine_dead", "stale", "protocol_error"}
TIMEOUT_S = 60.0


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
        assert message.request_id not in self.jobs, "an id on the wire was used twice"
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
        self.machine = RouterMachine("tiny", "router-1", limits)
        self.now = 0.0
        self.workers = {name: FakeWorker(name) for name in ROLES}
        self.inboxes = {worker.peer: worker.inbox for worker in self.workers.values()}
        self.sizes: dict[str, int] = {}  # n of each request; its name holds its seed
        self.stopped: set[tuple[str, int]] = set()  # choices that ended by a stop string
        self.output: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[str, ErrorInfo | None] = {}
        self.num_faults = 0
        self.excused: set[str] = set()  # hand-overs that only their lease can end

    # ---- harness -----------------------------------------------------------------------------------------------------

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Transmit(peer, message):
                    inbox = self.inboxes.get(peer.decode())
                    if inbox is not None:
                        inbox.append(message)
                case Deliver(request_id, update):
                    assert request_id not in self.ended, "news after the end"
                    for choice in update.choices:
                        self.output[request_id, choice.index] += choice.token_ids
                case Ended(flow):
                    assert flow.request_id not in self.ended, "a request ended twice"
                    self.ended[flow.request_id] = flow.error

    def to_router(self, worker: FakeWorker) -> None:
        peer, message = worker.outbox.popleft()
        self.do(self.machine.on_message(peer.encode(), message, self.now))

    def reconnect(self, worker: FakeWorker) -> None:
        """Give a worker a new connection; what was under way to it is lost."""
        self.excused |= worker.leases.keys()
        for message in worker.inbox:
            self.excused |= {message.kv_handoff.transfer_id} if getattr(message, "kv_handoff", None) else set()
        worker.inbox.clear()
        self.inboxes.pop(worker.peer, None)
        worker.connection += 1
        self.inboxes[worker.peer] = worker.inbox

    def some(self, data, workers: list[FakeWorker]) -> FakeWorker | None:
        return data.draw(st.sampled_from(workers)) if workers else None

    def busy(self) -> Iterator[tuple[FakeWorker, str]]:
        for worker in self.workers.values():
            if worker.is_up:
                yield from ((worker, wire_id) for wire_id in worker.jobs)

    # ---- clients -----------------------------------------------------------------------------------------------------

    @initialize(ups=st.lists(st.booleans(), min_size=len(ROLES), max_size=len(ROLES)))
    def start(self, ups) -> None:
        for worker, is_up in zip(self.workers.values(), ups, strict=True):
            worker.is_alive = is_up
            if is_up:
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
            self.do(self.machine.submit(wanted, self.now))
        except KVFerryError:
            del self.sizes[request_id]

    @rule(data=st.data())
    def abort(self, data) -> None:
        if self.sizes:
            self.do(self.machine.abort(data.draw(st.sampled_from(sorted(self.sizes))), "client", self.now))

    @rule(data=st.data())
    def stop_string(self, data) -> None:
        shown = sorted(key for key, output in self.output.items() if output and key[0] not in self.ended)
        if shown:
            key = data.draw(st.sampled_from(shown))
            self.stopped.add(key)
            self.do(self.machine.finish_choice(*key, self.now))

    # ---- the network -------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def deliver_to_worker(self, data) -> None:
        worker = self.some(data, [worker for worker in self.workers.values() if worker.is_up and worker.inbox])
        if worker is not None:
            worker.receive(worker.inbox.popleft())

    @rule(data=st.data())
    def deliver_to_router(self, data) -> None:
        worker = self.some(data, [worker for worker in self.workers.values() if worker.outbox])
        if worker is not None:
            self.to_router(worker)

    @rule(data=st.data())
    def lose_tokens(self, data) -> None:
        """Drop a frame; a later one will show the gap."""
        worker = self.some(data, [worker for worker in self.workers.values() if worker.outbox])
        if worker is not None and isinstance(worker.outbox[0][1], list) and not worker.outbox[0][1][0].finish_reason:
            worker.outbox.popleft()
            self.num_faults += 1

    @rule(data=st.data(), is_late=st.booleans())
    def break_connection(self, data, is_late: bool) -> None:
        """What the worker said last is lost with the connection, or comes late."""
        worker = self.some(data, [worker for worker in self.workers.values() if worker.is_up])
        if worker is not None:
            if not is_late:
                worker.outbox.clear()
            self.reconnect(worker)
            worker.heartbeat()
            self.num_faults += 1

    # ---- workers at work ---------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 3))
    def work(self, data, count: int) -> None:
        jobs = list(self.busy())
        if jobs:
            worker, wire_id = data.draw(st.sampled_from(jobs))
            index = data.draw(st.sampled_from(sorted(worker.jobs[wire_id].positions)))
            self.advance(worker, wire_id, index, count)

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

    @rule(data=st.data(), error=st.sampled_from(FAILURES))
    def fail(self, data, error: ErrorInfo) -> None:
        jobs = list(self.busy())
        if jobs:
            worker, wire_id = data.draw(st.sampled_from(jobs))
            del worker.jobs[wire_id]
            worker.say(RequestFailed(request_id=wire_id, error=error))
            self.num_faults += 1

    # ---- workers come and go -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(sorted(ROLES)))
    def die(self, name: str) -> None:
        worker = self.workers[name]
        worker.is_alive, worker.is_frozen = False, False
        worker.jobs.clear()
        worker.leases.clear()
        worker.outbox.clear()
        self.reconnect(worker)
        self.num_faults += 1

    @rule(name=st.sampled_from(sorted(ROLES)))
    def restart(self, name: str) -> None:
        self.die(name)
        worker = self.workers[name]
        self.inboxes.pop(worker.peer)
        worker.is_alive = True
        worker.incarnation += 1
        self.inboxes[worker.peer] = worker.inbox
        worker.register()

    @rule(name=st.sampled_from(sorted(ROLES)))
    def leave(self, name: str) -> None:
        worker = self.workers[name]
        if worker.is_up:
            for wire_id in list(worker.jobs):
                worker.say(RequestFailed(request_id=wire_id, error=ErrorInfo.of(NoWorker("shuts down"))))
            worker.say(Goodbye(engine_id=name, incarnation=worker.incarnation))
            worker.jobs.clear()
            worker.leases.clear()
            worker.is_alive = False
            self.num_faults += 1

    @rule(name=st.sampled_from(sorted(ROLES)))
    def freeze(self, name: str) -> None:
        self.workers[name].is_frozen = self.workers[name].is_alive
        self.num_faults += 1

    @rule(name=st.sampled_from(sorted(ROLES)))
    def thaw(self, name: str) -> None:
        self.workers[name].is_frozen = False

    @rule(name=st.sampled_from(sorted(ROLES)))
    def drain(self, name: str) -> None:
        if self.workers[name].is_up:
            self.workers[name].heartbeat(is_draining=True)
            self.num_faults += 1

    @rule(seconds=st.floats(0.2, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            if worker.is_up and not worker.outbox:
                worker.heartbeat()
                self.to_router(worker)
        self.do(self.machine.on_timer(self.now))

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
        assert len(self.machine.flows) == len(self.sizes) - len(self.ended)
        for worker in self.machine.cluster.workers:
            assert worker.num_inflight >= 0
            if not len(self.machine.flows):
                assert worker.num_inflight == 0

    def teardown(self) -> None:
        """In a calm cluster every request ends before its deadline, and nothing is left anywhere."""
        for worker in self.workers.values():
            if not worker.is_alive:
                self.restart(worker.name)
            worker.is_frozen = False
        for _ in range(120):
            self.time_passes(0.25)
            for worker in self.workers.values():
                while worker.inbox:
                    worker.receive(worker.inbox.popleft())
                for wire_id in list(worker.jobs):
                    self.advance(worker, wire_id, min(worker.jobs[wire_id].positions), 1)
                while worker.outbox:
                    self.to_router(worker)
        assert self.ended.keys() == self.sizes.keys()
        self.counts_agree()
        self.requests_that_ended_well_are_whole()
        if not self.num_faults:
            assert {error.code for error in self.ended.values() if error} <= {"cancelled"}
        for worker in self.workers.values():
            assert not worker.jobs, "a worker was left with something that nobody waits for"
            assert worker.leases.keys() <= self.excused, "a hand-over was neither read nor released"


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase
