"""Random histories of two clients, two prefill and two decode workers: what must hold whatever happens, in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import KVFerryError, ProtocolError
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.messages import (
    Abort,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    PrefillChoice,
    PrefillDone,
    Register,
    Rejected,
    Release,
    RequestFailed,
    Tokens,
)
from core.wire.sampling import SamplingParams
from router.flow import Deliver, Ended
from router.machine import RouterLimits, RouterMachine, Transmit
from router.news import Submission

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
WORKERS = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "a0": "aggregated"}
FAILURE = ErrorInfo(code="digest", message="corrupt", http_status=502)


class Histories(RuleBasedStateMachine):
    """Plays workers honestly (positions, ids), in any order, with deaths, restarts, aborts and garbage in between."""

    def __init__(self) -> None:
        super().__init__()
        limits = RouterLimits(heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=30.0, max_requests=6)
        self.machine = RouterMachine("tiny", "router-1", limits)
        self.now = 0.0
        self.incarnations = dict.fromkeys(WORKERS, 1)
        self.num_submitted = 0
        self.sizes: dict[str, int] = {}  # n of each request
        self.ended: set[str] = set()
        self.output: dict[tuple[str, int], list[int]] = {}
        self.jobs: dict[tuple[str, str], dict[int, int]] = {}  # (peer, request) → position of each live choice
        self.crossing: set[tuple[str, str]] = set()  # aborted prefills whose result may be under way
        self.leases: dict[str, tuple[str, str]] = {}  # transfer → (prefill worker that holds it, request)

    # ---- harness ---------------------------------------------------------------------------------------------------------

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Transmit(peer, message):
                    self.on_sent(peer.decode(), message)
                case Deliver(request_id, update):
                    assert request_id not in self.ended, "news after the end"
                    for choice in update.choices:
                        self.output[request_id, choice.index] += choice.token_ids
                case Ended(flow):
                    assert flow.request_id not in self.ended, "a request ended twice"
                    self.ended.add(flow.request_id)

    def on_sent(self, peer: str, message) -> None:
        match message:
            case Generate():
                starts = {choice.index: len(choice.output_token_ids) for choice in message.choices}
                self.jobs[peer, message.request_id] = starts or dict.fromkeys(range(message.n), 0)
            case Abort():
                for request_id in message.request_ids:
                    if self.jobs.pop((peer, request_id), None) and WORKERS[peer] == "prefill":
                        self.crossing.add((peer, request_id))
            case Release():
                for transfer_id in message.transfer_ids:
                    self.leases.pop(transfer_id, None)

    def send(self, peer: str, message) -> None:
        self.do(self.machine.on_message(peer.encode(), message, self.now))

    def pick(self, data, roles: tuple[str, ...]):
        jobs = sorted(job for job in self.jobs if WORKERS[job[0]] in roles)
        return data.draw(st.sampled_from(jobs)) if jobs else None

    def register(self, name: str) -> None:
        self.send(
            name,
            Register(
                engine_id=name,
                incarnation=self.incarnations[name],
                role=WORKERS[name],
                model="tiny",
                model_fingerprint=b"w",
                layout=LAYOUT,
                max_model_len=100,
                max_num_seqs=4,
                num_blocks=10,
            ),
        )

    def forget(self, name: str) -> None:
        """The process is gone, with all it held."""
        self.jobs = {job: state for job, state in self.jobs.items() if job[0] != name}
        self.crossing = {job for job in self.crossing if job[0] != name}
        self.leases = {transfer: lease for transfer, lease in self.leases.items() if lease[0] != name}

    def handoff(self, peer: str, request_id: str) -> KVHandoff:
        self.leases[f"t-{request_id}-{peer}"] = (peer, request_id)
        return KVHandoff(
            transfer_id=f"t-{request_id}-{peer}",
            engine_id=peer,
            incarnation=self.incarnations[peer],
            control_address="tcp://127.0.0.1:1",
            model_fingerprint=b"w",
            layout=LAYOUT,
            groups=(GroupBlocks(group_id=0, block_ids=(1,), generations=(1,), block_hashes=(bytes(16),)),),
            num_tokens=2,
            lease_ms=30_000,
        )

    # ---- events ----------------------------------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        for name in WORKERS:
            self.register(name)

    @rule(n=st.integers(1, 3))
    def submit(self, n: int) -> None:
        self.num_submitted += 1
        request_id = f"r{self.num_submitted}"
        wanted = Submission(request_id=request_id, prompt_token_ids=(1, 2), sampling=SamplingParams(seed=1, max_tokens=9), n=n)
        self.output.update({(request_id, index): [] for index in range(n)})
        try:
            self.do(self.machine.submit(wanted, self.now))
            self.sizes[request_id] = n
        except KVFerryError:
            pass

    @rule(data=st.data(), ends=st.lists(st.booleans(), min_size=3, max_size=3))
    def prefill_done(self, data, ends) -> None:
        job = self.pick(data, ("prefill",))
        if job is None:
            return
        peer, request_id = job
        live = self.jobs.pop(job)
        choices = tuple(PrefillChoice(index=index, token_id=0, finish_reason="stop" if ends[index] else None) for index in live)
        is_over = all(choice.finish_reason for choice in choices)
        handoff = None if is_over else self.handoff(peer, request_id)
        self.send(peer, PrefillDone(request_id=request_id, choices=choices, kv_handoff=handoff))

    @rule(data=st.data())
    def prefill_done_after_abort(self, data) -> None:
        if self.crossing:
            peer, request_id = data.draw(st.sampled_from(sorted(self.crossing)))
            self.crossing.remove((peer, request_id))
            choices = tuple(PrefillChoice(index=index, token_id=0) for index in range(self.sizes[request_id]))
            handoff = self.handoff(peer, request_id)
            self.send(peer, PrefillDone(request_id=request_id, choices=choices, kv_handoff=handoff))

    @rule(data=st.data(), count=st.integers(1, 2), is_last=st.booleans(), repeats=st.booleans())
    def tokens(self, data, count: int, is_last: bool, repeats: bool) -> None:
        job = self.pick(data, ("decode", "aggregated"))
        if job is None:
            return
        peer, request_id = job
        self.leases = {transfer: lease for transfer, lease in self.leases.items() if lease[1] != request_id}  # loaded
        index = data.draw(st.sampled_from(sorted(self.jobs[job])))
        position = self.jobs[job][index]
        frame = [Tokens(request_id, index, position, tuple(range(position, position + count)), "stop" if is_last else None)]
        self.jobs[job][index] += count
        if is_last:
            del self.jobs[job][index]
            if not self.jobs[job]:
                del self.jobs[job]
        self.send(peer, frame)
        if repeats:
            self.send(peer, frame)

    @rule(data=st.data())
    def lose_a_frame(self, data) -> None:
        job = self.pick(data, ("decode", "aggregated"))
        if job is not None:
            self.jobs[job][min(self.jobs[job])] += 1

    @rule(data=st.data())
    def fail(self, data) -> None:
        job = self.pick(data, ("prefill", "decode", "aggregated"))
        if job is not None:
            del self.jobs[job]
            self.send(job[0], RequestFailed(request_id=job[1], error=FAILURE))

    @rule(name=st.sampled_from(sorted(WORKERS)))
    def reject(self, name: str) -> None:
        self.send(name, Rejected(error=FAILURE))

    @rule(data=st.data())
    def abort(self, data) -> None:
        if self.sizes:
            self.do(self.machine.abort(data.draw(st.sampled_from(sorted(self.sizes))), "client", self.now))

    @rule(data=st.data())
    def stop_string(self, data) -> None:
        if self.sizes:
            request_id = data.draw(st.sampled_from(sorted(self.sizes)))
            index = data.draw(st.integers(0, self.sizes[request_id] - 1))
            self.do(self.machine.finish_choice(request_id, index, self.now))

    @rule(name=st.sampled_from(sorted(WORKERS)))
    def restart(self, name: str) -> None:
        self.forget(name)
        self.incarnations[name] += 1
        self.register(name)

    @rule(name=st.sampled_from(sorted(WORKERS)), is_draining=st.booleans())
    def heartbeat(self, name: str, is_draining: bool) -> None:
        beat = Heartbeat(engine_id=name, incarnation=self.incarnations[name], is_draining=is_draining)
        self.send(name, beat)

    @rule(name=st.sampled_from(sorted(WORKERS)))
    def leave(self, name: str) -> None:
        self.forget(name)
        self.send(name, Goodbye(engine_id=name, incarnation=self.incarnations[name]))

    @rule(name=st.sampled_from(sorted(WORKERS)))
    def garbage(self, name: str) -> None:
        self.forget(name)  # a refused worker drops what it was doing
        self.do(self.machine.on_malformed(name.encode(), ProtocolError("malformed frame"), self.now))

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        members = {worker.key.engine_id for worker in self.machine.cluster.workers}
        self.do(self.machine.on_timer(self.now))
        for name in members - {worker.key.engine_id for worker in self.machine.cluster.workers}:
            self.forget(name)

    @precondition(lambda self: self.sizes)
    @rule()
    def deadline(self) -> None:
        """After the request timeout, nothing is left, whatever happened before."""
        self.now += 30.0
        self.do(self.machine.on_timer(self.now))
        for name in WORKERS:
            self.forget(name)
        assert self.ended == set(self.sizes)

    # ---- what holds ------------------------------------------------------------------------------------------------------

    @invariant()
    def tokens_arrive_in_order_without_gaps(self) -> None:
        for output in self.output.values():
            assert output == list(range(len(output)))

    @invariant()
    def counts_agree(self) -> None:
        num_live = len(self.sizes) - len(self.ended)
        assert len(self.machine.flows) == num_live
        for worker in self.machine.cluster.workers:
            if worker.role == "prefill":
                assert worker.num_inflight == sum(peer == worker.key.engine_id for peer, _ in self.jobs)
        counts = [worker.num_inflight for worker in self.machine.cluster.workers]
        assert all(0 <= count <= num_live for count in counts)
        if not num_live:
            assert not any(counts)

    @invariant()
    def no_worker_works_for_nobody(self) -> None:
        for _, request_id in self.jobs:
            assert request_id not in self.ended, "a worker was left with a request that has ended"

    @invariant()
    def no_lease_outlives_its_request(self) -> None:
        for _, request_id in self.leases.values():
            assert request_id not in self.ended, "a hand-over was neither loaded nor released"


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
