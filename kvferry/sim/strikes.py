"""Carries out the faults of a plan, and records the effect of each: the process or link that was hit, and how long it showed.

Records the troubles that ``kvferry.sim.oracle`` accepts as causes; ``kvferry.sim.cluster`` starts processes. After-effects
belong to a trouble: a worker that was silent for longer than the router's patience has to be found again, and a new process has
to join. The timeouts of the network and of the plan bound how long that may take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from core.wire.messages import Role
from core.worker.router_membership import REGISTER_INTERVAL_S
from kvferry.sim.encoder import SimEncoder
from kvferry.sim.eventlog import EventLog
from kvferry.sim.faults import Fault, FaultEvent
from kvferry.sim.loop import EventLoop, Process
from kvferry.sim.network import HEARTBEAT_TIMEOUT_S, RECONNECT_MAX_S, Network
from kvferry.sim.plan import ClusterPlan
from kvferry.sim.router import SimRouter
from kvferry.sim.stores import SimStores
from kvferry.sim.tier_plan import TierPlan
from kvferry.sim.troubles import Kind, Trouble, Troubles
from kvferry.sim.worker import SimWorker

_STARTING_S = 0.01  # a starting worker has not joined its routers yet
_SOON_S = 0.5  # until a cut connection is made again, and a message is answered


class Processes(Protocol):
    """The processes of a run."""

    workers: dict[str, SimWorker | SimEncoder]
    routers: dict[str, SimRouter]
    stores: SimStores

    def start_worker(self, name: str) -> None:
        """Start the next incarnation of a worker."""

    def start_router(self, name: str) -> None:
        """Start the next incarnation of a router."""


class Strikes:
    """Injects faults. ``patience_s`` is how long a router waits for a silent worker."""

    def __init__(
        self, plan: ClusterPlan, processes: Processes, loop: EventLoop, network: Network, troubles: Troubles, log: EventLog
    ) -> None:
        router = plan.config.router
        self.patience_s = min(router.heartbeat_timeout_s, HEARTBEAT_TIMEOUT_S)
        self._soon_s = _SOON_S + router.heartbeat_interval_s + 2 * (plan.faults.network.spike_s + plan.faults.network.delay_s)
        self.rejoin_s = 1.5 * RECONNECT_MAX_S + REGISTER_INTERVAL_S + self._soon_s
        self._processes = processes
        self._loop = loop
        self._network = network
        self._troubles = troubles
        self._log = log
        self._started_at: dict[str, float] = {}
        self._down: dict[str, Trouble] = {}
        self._draining: dict[str, Trouble] = {}
        self._note_tier(plan)
        self._carry_out: dict[Fault, Callable[[FaultEvent], None]] = {
            Fault.CUT: self._cut,
            Fault.PARTITION: self._part,
            Fault.ONE_WAY: self._close_way,
            Fault.DATA_PARTITION: self._close_to_reads,
            Fault.HANG: self._hang,
            Fault.EARLY_TERM: self._crash_and_terminate,
            Fault.FREEZE: lambda event: self._freeze(self._process(event.targets[0]), event.seconds),
            Fault.CRASH: self._crash,
            Fault.ROUTER_CRASH: self._crash_router,
            Fault.TWIN: self._start_twin,
            Fault.JUMP: self._jump,
            Fault.SQUEEZE: self._squeeze,
            Fault.DRAIN: self._drain,
            Fault.SWITCH: self._switch,
            Fault.STORE_CRASH: self._crash_store,
            Fault.STORE_FREEZE: lambda event: self._freeze(processes.stores.shared[event.targets[0]].process, event.seconds),
            Fault.STORE_CORRUPT: self._corrupt,
            Fault.TIER_FULL: self._fail_tier,
            Fault.TIER_UNREADABLE: self._fail_tier,
            Fault.TIER_LOSS: self._fail_tier,
        }

    def strike(self, event: FaultEvent) -> None:
        """Inject a fault now."""
        self._log.write("FAULT", str(event))
        self._carry_out[event.kind](event)

    def note_start(self, name: str) -> None:
        """Record the start of a process: others can use it once it has joined them."""
        self._started_at[name] = self._loop.now
        is_router = name in self._processes.routers
        trouble = self._down.pop(name, None) or self._troubles.note(Kind.DOWN, [name])
        has_to_be_found = is_router and self._loop.now > 0
        trouble.end = self._loop.now + (self.rejoin_s if has_to_be_found else self._soon_s)
        draining = self._draining.pop(name, None)
        if draining is not None:
            draining.end = trouble.end

    # ---- links -------------------------------------------------------------------------------------------------------

    def _cut(self, event: FaultEvent) -> None:
        if self._network.cut(*event.targets):
            self._troubles.note(Kind.CUT, event.targets, self._soon_s)

    def _part(self, event: FaultEvent) -> None:
        one, other = event.targets
        self._network.partition(one, other, event.seconds)
        self._troubles.note(Kind.PARTED, event.targets, event.seconds + self._aftermath_s(event.seconds))

    def _close_way(self, event: FaultEvent) -> None:
        sender, receiver = event.targets
        self._network.close_way(sender, receiver, event.seconds)
        self._troubles.note(Kind.PARTED, event.targets, event.seconds + self._aftermath_s(event.seconds))

    def _close_to_reads(self, event: FaultEvent) -> None:
        one, other = event.targets
        self._network.close_to_reads(one, other, event.seconds)
        self._troubles.note(Kind.DATA_PARTED, event.targets, event.seconds + self._soon_s)

    def _aftermath_s(self, silent_s: float) -> float:
        """Return how long it takes until a process that was silent for this long is found again."""
        return self.rejoin_s if silent_s >= self.patience_s else self._soon_s

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _process(self, name: str) -> Process:
        found = self._processes.routers.get(name) or self._processes.workers[name]
        return found.host.process

    def _freeze(self, process: Process, seconds: float) -> None:
        if not process.is_alive or process.is_frozen:
            return
        is_router = process.name in self._processes.routers
        trouble = self._troubles.note(Kind.PAUSED if is_router else Kind.FROZEN, [process.name])
        start = self._loop.now
        process.freeze()
        self._network.note_freeze(process, seconds)

        def end() -> None:
            trouble.end = min(trouble.end, self._loop.now + self._aftermath_s(self._loop.now - start))

        def thaw() -> None:
            end()
            if is_router:
                self._note_not_joined(process.name, start - self._soon_s)
            if process.is_alive:
                self._log.write(process.name, "thaws")
                process.thaw()

        process.on_death(end)
        self._loop.call_later(seconds, thaw)

    def _note_not_joined(self, router: str, since: float) -> None:
        """Record that processes which started during a router's pause have yet to join it."""
        for name in [name for name in self._processes.workers if self._started_at[name] >= since]:
            self._troubles.note(Kind.DOWN, [router, name], self.rejoin_s)

    def _crash(self, event: FaultEvent) -> None:
        name = event.targets[0]
        worker = self._processes.workers[name]
        if worker.is_serving:
            worker.host.process.kill()
            self._note_down(name)
            self._loop.call_later(event.seconds, lambda: self._processes.start_worker(name))

    def _hang(self, event: FaultEvent) -> None:
        """Let an engine hang; if the process dies meanwhile, its successor does not hang."""
        worker = self._processes.workers[event.targets[0]]
        if not worker.is_serving:
            return
        worker.engine.hang()
        trouble = self._troubles.note(Kind.HUNG, event.targets)

        def end() -> None:
            worker.engine.resume()
            trouble.end = min(trouble.end, self._loop.now + self._soon_s)

        worker.host.process.on_death(end)
        self._loop.call_later(event.seconds, end)

    def _crash_and_terminate(self, event: FaultEvent) -> None:
        """Kill a worker, and send its successor SIGTERM before it has joined a router."""
        self._crash(event)
        terminate = FaultEvent(event.at, Fault.DRAIN, event.targets, event.seconds)
        self._loop.call_later(event.seconds + _STARTING_S, lambda: self._drain(terminate))

    def _crash_router(self, event: FaultEvent) -> None:
        name = event.targets[0]
        process = self._processes.routers[name].host.process
        if process.is_alive:
            process.kill()
            self._note_down(name)
            self._loop.call_later(event.seconds, lambda: self._processes.start_router(name))

    def _note_down(self, name: str) -> None:
        if name not in self._down:
            self._down[name] = self._troubles.note(Kind.DOWN, [name])

    def _start_twin(self, event: FaultEvent) -> None:
        self._troubles.note(Kind.REPLACED, event.targets, self.rejoin_s)
        self._processes.start_worker(event.targets[0])

    def _jump(self, event: FaultEvent) -> None:
        self._troubles.note(Kind.JUMPED, event.targets, self._soon_s)
        self._processes.workers[event.targets[0]].jump(event.seconds)

    def _squeeze(self, event: FaultEvent) -> None:
        worker = self._processes.workers[event.targets[0]]
        if worker.is_serving and isinstance(worker, SimWorker):
            worker.manager.num_refusals += 1

    def _drain(self, event: FaultEvent) -> None:
        """Ask a worker to leave; its supervisor starts another when it has gone."""
        name = event.targets[0]
        worker = self._processes.workers[name]
        process = worker.host.process
        if not worker.is_serving or worker.state.is_draining:
            return

        def restart() -> None:
            if self._processes.workers[name] is worker:
                self._note_down(name)
                self._loop.call_later(event.seconds, lambda: self._processes.start_worker(name))

        def drain() -> None:
            self._draining[name] = self._troubles.note(Kind.DRAINING, [name])
            process.on_death(restart)
            worker.drain()

        process.call_later(0.0, drain)

    def _switch(self, event: FaultEvent) -> None:
        """Let a worker take another role; a frozen one does so when it continues."""
        name, role = event.targets
        worker = self._processes.workers[name]

        def switch() -> None:
            if not worker.is_stopped and worker.switch_role(cast(Role, role)):
                self._log.write(name, f"is {role} now")

        if worker.is_serving:
            worker.host.process.call_later(0.0, switch)

    # ---- stores ------------------------------------------------------------------------------------------------------

    def _note_tier(self, plan: ClusterPlan) -> None:
        """Record a tier with little room as trouble for the whole run."""
        if plan.tier is not None and Fault.STORE_FULL in plan.tier.kinds:
            for name in self._owners_of(plan.tier):
                self._troubles.note(Kind.STORE, [name])

    def _owners_of(self, tier: TierPlan) -> tuple[str, ...]:
        return (tier.process,) if tier.name == "store" else tier.workers

    def _crash_store(self, event: FaultEvent) -> None:
        self._troubles.note(Kind.STORE, event.targets, event.seconds + self.rejoin_s)
        self._processes.stores.shared[event.targets[0]].crash(event.seconds)

    def _fail_tier(self, event: FaultEvent) -> None:
        """Let a lower tier of a store fail. It is no trouble by itself: only a block that is missing because of it is."""
        name, tier = event.targets
        index = int(tier.removeprefix("tier-"))
        self._processes.stores.fail_tier(name, index, event.kind, event.seconds)

    def _corrupt(self, event: FaultEvent) -> None:
        """Change a bit in a store, in a worker's own tier, or in its embeddings for readers."""
        name, stores = event.targets[0], self._processes.stores
        self._troubles.note(Kind.CORRUPTED, [name])
        if name in stores.shared:
            stores.corrupt(stores.shared[name])
            return
        worker = self._processes.workers[name]
        if isinstance(worker, SimEncoder):
            worker.embeddings.corrupt()
        elif worker.tier is not None and worker.host.process.is_alive:
            stores.corrupt(worker.tier)
