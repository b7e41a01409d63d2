"""A whole cluster in one virtual time: starts the processes, sends the requests, injects the faults, and checks the end.

``SimCluster(plan).run()`` plays one plan and returns what happened. The same plan gives the same events, to the last byte of
the log. ``kvferry.sim.checks`` and ``kvferry.sim.client`` check a run while it lasts; this module checks its end: every request
has ended once and in time, and has left nothing in any process.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvferry.sim.checks import Oracle, WorkerChecks
from kvferry.sim.client import ROUTER_LOST, Client
from kvferry.sim.content_checks import differences_of_contents, differences_of_roles
from kvferry.sim.encoder import SimEncoder
from kvferry.sim.eventlog import EventLog
from kvferry.sim.faults import ChunkFault, Fault, FaultEvent
from kvferry.sim.host import Host, World
from kvferry.sim.idempotent_messages import may_drop, may_repeat
from kvferry.sim.loop import EventLoop, Process, ProcessClock
from kvferry.sim.network import Network
from kvferry.sim.oracle import CausalOracle
from kvferry.sim.plan import ClusterPlan, WorkerPlan
from kvferry.sim.router import SimRouter
from kvferry.sim.stalls import find_stalls
from kvferry.sim.stores import SimStores
from kvferry.sim.strikes import Strikes
from kvferry.sim.transport import SimFabric
from kvferry.sim.troubles import Troubles
from kvferry.sim.worker import SimWorker
from kvferry.sim.worker_protocol import FINGERPRINT
from router.dispatch.request_state import LOCAL_PREFILL

MAX_EVENTS = 100_000  # a run that needs more is in an endless loop
_CHECK_END_S = 0.25
_MAX_FRAMES = 6  # of the traceback of an exception
_ANSWER_BOUND_S = 2.0  # how much later than its deadline a request may end


@dataclass(slots=True)
class RunResult:
    """The result of one run. ``log`` is empty unless it was requested."""

    seed: int
    kinds: frozenset[Fault]
    violations: list[str]
    outcomes: Counter[str]
    happened: Counter[str]  # events that a run may or may not have, by name
    num_events: int
    seconds: float
    log: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """True if nothing was violated."""
        return not self.violations


class SimCluster:
    """One run of a plan."""

    def __init__(self, plan: ClusterPlan, *, keeps_log: bool = False) -> None:
        self.plan = plan
        self.violations: list[str] = []
        self.loop = EventLoop()
        self.workers: dict[str, SimWorker | SimEncoder] = {}
        self.routers: dict[str, SimRouter] = {}
        has_tier = plan.tier is not None or plan.step_loads is not None or plan.config.connector.peer_prefixes
        self.clients = [Client(request, self.complain, has_tier=has_tier) for request in plan.requests]
        self.log = EventLog(lambda: self.loop.now, is_kept=keeps_log)
        self.troubles = Troubles(lambda: self.loop.now)
        network = Network(self.loop, Random(f"{plan.seed}/network"), plan.faults.network, may_repeat, self.troubles, may_drop)
        fabric = SimFabric(self.loop, network, Random(f"{plan.seed}/reads"), plan.faults.reads, plan.keeps_order)
        self._world = World(self.loop, network, fabric, Random(f"{plan.seed}/threads"), self.log, self._on_progress)
        self.stores = SimStores(self._world, plan.tier, plan.embedding_store)
        self._strikes = Strikes(plan, self, self.loop, network, self.troubles, self.log)
        self._oracle = Oracle(plan.requests, FINGERPRINT, plan.attentions)
        self._num_starts: Counter[str] = Counter()
        self._incarnations: list[SimWorker | SimEncoder] = []
        self._retries: Counter[str] = Counter()
        self._num_chunks: Counter[str] = Counter()  # that were announced, by request
        self._struck_at_chunks: list[FaultEvent] = []
        self._is_over = False
        self._wait_until = 0.0

    def complain(self, violation: str) -> None:
        """Record a violation; the run ends."""
        self.log.write("VIOLATION", violation)
        self.violations.append(violation)
        self._is_over = True

    def run(self) -> RunResult:
        """Play the plan to its end, or to the first violation."""
        for line in self.plan.describe():
            self.log.write("plan", line)
        self._plan_events()
        try:
            while not self._is_over and self.loop.run_next():
                if self.loop.num_events > MAX_EVENTS:
                    self.complain(f"still not at rest after {MAX_EVENTS} events")
        except Exception:  # a bug of ours, anywhere: it would have ended a process
            self.complain(traceback.format_exc(limit=-_MAX_FRAMES))
        self.violations += self.troubles.roles.find_abandoned()
        if not self.violations:
            oracle = CausalOracle(self.plan, self.troubles)
            for client in self.clients:
                self.violations += [*oracle.judge(client), *find_stalls(oracle.case(client))]
        return self._result()

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _plan_events(self) -> None:
        self.stores.start()
        for name in self.plan.routers:
            self.start_router(name)
        for spec in (*self.plan.workers, *self.plan.encoders):
            self.start_worker(spec.engine_id)
        for client in self.clients:
            self.loop.call_later(client.plan.at, lambda client=client: self._submit(client))  # type: ignore[misc]
        for event in self.plan.faults.events:
            self.loop.call_later(event.at, lambda event=event: self._strikes.strike(event))  # type: ignore[misc]
        self.loop.call_later(self.plan.faults.quiet_at, self._calm_down)

    def start_worker(self, name: str) -> None:
        """Start the next incarnation of a worker."""
        spec = self._spec(name)
        seed = self._next_seed(name)
        process = Process(self.loop, spec.engine_id, ProcessClock(self.loop, spec.clock_origin, spec.clock_rate))
        worker: SimWorker | SimEncoder
        if spec.role == "encode":
            worker = SimEncoder(Host(self._world, process), self.plan, spec, seed, self.complain, self.stores)
        else:
            checks = WorkerChecks(spec.engine_id, self._oracle, self.complain)
            worker = SimWorker(Host(self._world, process), self.plan, spec, seed, checks, self.stores)
        self.workers[spec.engine_id] = worker
        self._incarnations.append(worker)
        self._strikes.note_start(name)

    def start_router(self, name: str) -> None:
        """Start the next incarnation of a router."""
        seed = self._next_seed(name)
        host = Host(self._world, Process(self.loop, name, ProcessClock(self.loop, 5000.0)))
        encode_timeout_s = self.plan.images.encode_timeout_s if self.plan.images is not None else 20.0
        self.routers[name] = SimRouter(host, self.plan.config.router, seed, self._retries, self.complain, encode_timeout_s)
        self._strikes.note_start(name)

    def _next_seed(self, name: str) -> int:
        """Return a seed that no other incarnation has."""
        self._num_starts[name] += 1
        self.log.write(name, f"starts, life {self._num_starts[name]}")
        return Random(f"{self.plan.seed}/{name}/{self._num_starts[name]}").getrandbits(63)

    def _spec(self, name: str) -> WorkerPlan:
        return next(spec for spec in (*self.plan.workers, *self.plan.encoders) if spec.engine_id == name)

    # ---- clients -----------------------------------------------------------------------------------------------------

    def _submit(self, client: Client) -> None:
        router = self.routers[client.plan.router]
        if router.host.process.is_alive:
            router.connect(client)
        else:
            client.end(ROUTER_LOST, "connection refused", self.loop.now)
        if client.plan.abort_at is not None:
            self.loop.call_later(client.plan.abort_at - client.plan.at, lambda: self._leave(client))

    def _leave(self, client: Client) -> None:
        """Close a client's connection; the router notices when it next runs."""
        if not client.is_over:
            client.has_left = True
            self.routers[client.plan.router].disconnect(client)

    # ---- faults at boundaries of chunks ------------------------------------------------------------------------------

    def _on_progress(self, prefill: str, request_id: str) -> None:
        """Plan the faults that strike at this chunk."""
        name = request_id.partition(".")[0]  # without the number of the attempt
        self._num_chunks[name] += 1
        for fault in self.plan.faults.at_chunks:
            if (fault.request, fault.number) == (name, self._num_chunks[name]):
                self.loop.call_later(fault.delay_s, partial(self._strike_at_chunk, fault, prefill))

    def _strike_at_chunk(self, fault: ChunkFault, prefill: str) -> None:
        event = fault.event(self.loop.now, prefill)
        if self.loop.now + event.seconds >= self.plan.faults.quiet_at:
            return
        self._struck_at_chunks.append(event)
        if fault.kind is Fault.ABORT:
            self._leave(next(client for client in self.clients if client.plan.name == fault.target))
        else:
            self._strikes.strike(event)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _calm_down(self) -> None:
        """Stop all faults. The remaining requests must now end within bounds."""
        self.log.write("FAULT", "no more")
        self.plan.faults.calm_down()
        self.stores.calm_down()
        self._check_end()

    def _check_end(self) -> None:
        """End the run once everything has ended; complain when that takes too long."""
        late = [client for client in self.clients if not client.is_over and self.loop.now > self._latest_end(client)]
        for client in late:
            self.complain(f"{client.plan.name}: no end, {self.loop.now - client.plan.at:.1f} s after its submission")
        is_waiting = [client.plan.name for client in self.clients if not client.is_over]
        if is_waiting:
            self._wait_until = 0.0
        elif not self._wait_until:
            self._wait_until = self.loop.now + self._rest_s()
        leftovers = [] if is_waiting else self._leftovers()
        if not is_waiting and not leftovers:
            self._is_over = True
        elif not is_waiting and self.loop.now >= self._wait_until:
            for leftover in leftovers:
                self.complain(leftover)
        else:
            self.loop.call_later(_CHECK_END_S, self._check_end)

    def _latest_end(self, client: Client) -> float:
        """Return when a request must have ended. While the router is frozen its client gets nothing."""
        events = (*self.plan.faults.events, *self._struck_at_chunks)
        frozen_s = sum(event.seconds for event in events if client.plan.router in event.targets)
        reading, num_tokens = client.plan.reading, client.plan.n * client.plan.max_tokens
        reading_s = reading.longest_s(num_tokens) if reading is not None else 0.0
        return client.plan.at + self.plan.config.router.request_timeout_s + frozen_s + reading_s + _ANSWER_BOUND_S

    def _rest_s(self) -> float:
        """Return how long blocks may be held after the last request has ended: lease and deadline, by the slowest clock."""
        connector = self.plan.config.connector
        images = self.plan.images
        slowest = max(1 / spec.clock_rate for spec in (*self.plan.workers, *self.plan.encoders))
        longest_s = connector.lease_s + 2 * connector.transfer_deadline_s + connector.handshake_timeout_s
        if images is not None:
            longest_s += images.lease_s + 2 * images.deadline_s + images.encode_timeout_s
        return slowest * (longest_s + 10.0)

    def _leftovers(self) -> list[str]:
        found = [leftover for router in self.routers.values() for leftover in router.leftovers()]
        for worker in self._incarnations:
            if worker.host.process.is_alive:
                found += worker.leftovers()
        workers = [worker for worker in self._incarnations if isinstance(worker, SimWorker)]
        found += self.stores.leftovers() + differences_of_contents(self.routers.values(), workers)
        return found + differences_of_roles(self.routers.values(), workers)

    def _result(self) -> RunResult:
        outcomes = Counter(client.outcome or "unfinished" for client in self.clients)
        for client in self.clients:
            self.log.write(client.plan.name, f"{client.outcome or 'unfinished'} {client.message}")
        return RunResult(
            seed=self.plan.seed,
            kinds=self.plan.kinds,
            violations=self.violations,
            outcomes=outcomes,
            happened=self._count_what_happened(),
            num_events=self.loop.num_events,
            seconds=self.loop.now,
            log=self.log.lines,
        )

    def _count_what_happened(self) -> Counter[str]:
        """Count rare events of the run, so that tests can check that they occur."""
        reads = self.plan.faults.reads
        happened = Counter(
            lost_connections=self._world.network.num_lost_connections,
            stalled_reads=reads.num_stalled,
            failed_reads=reads.num_failed,
            corrupted_reads=reads.num_corrupted,
        )
        happened.update(f"fallback_{client.fallback_reason}" for client in self.clients if client.fallback_reason)
        reports = [client.report for client in self.clients if client.report is not None]
        happened["local_prefills"] = sum(report.outcome == LOCAL_PREFILL for report in reports)
        happened["slow_clients"] = sum(client.plan.reading is not None for client in self.clients)
        happened["role_switches"] = self.troubles.roles.num_switches
        happened["planned_switches"] = self.troubles.roles.num_planned
        happened["cut_clients"] = sum(client.was_cut for client in self.clients)
        happened.update(self._retries)
        happened.update(f"chunk_{event.kind}" for event in self._struck_at_chunks)
        happened.update(self.stores.count_what_happened())
        for worker in self._incarnations:
            happened.update(worker.count_what_happened())
        return +happened
