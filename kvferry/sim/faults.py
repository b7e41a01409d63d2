"""The faults of a simulation, drawn from a seed.

``draw_faults`` turns a set of kinds into a ``FaultSchedule``: bad weather for the network and for reads, which strikes by
chance while the simulation runs, and events at fixed times that hit processes or pairs of them. Knows processes by name
only; ``kvferry.sim.strikes`` carries the events out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from kvferry.sim.network import NetworkWeather
from kvferry.sim.transport import ReadWeather


class Fault(StrEnum):
    """Kinds of faults, grouped by their targets."""

    # links
    DELAY = "delay"  # frames that take long
    REPEAT = "repeat"  # messages that arrive twice, if a peer may send them twice
    CUT = "cut"  # connections that break, with all frames under way
    PARTITION = "partition"  # no frame passes between two processes for a while
    ONE_WAY = "one_way"  # no frame passes from one process to another; the other direction works
    DATA_PARTITION = "data_partition"  # no reads pass between two processes for a while; messages do
    DROP = "drop"  # answers of an owner of KV that are dropped silently, as by a full queue
    # reads
    STALL = "stall"  # reads that stop half-way; where cancelling does nothing, their bytes come late
    READ_ERROR = "read_error"  # reads that end in an error, or cannot be posted
    CORRUPT = "corrupt"  # bytes that arrive wrong
    STEP_LOAD = "step_load"  # workers with a connector that loads within a step, and sometimes brings garbage
    # processes
    CRASH = "crash"  # a worker dies, and starts again as a new process at the same address
    ROUTER_CRASH = "router_crash"
    FREEZE = "freeze"  # a process stops, and continues later
    HANG = "hang"  # the engine of a worker hangs; its event loop continues, and so do its heartbeats
    EARLY_TERM = "early_term"  # a worker dies, and its successor gets SIGTERM while it starts
    DRIFT = "drift"  # clocks that run fast or slow
    JUMP = "jump"  # clocks that jump ahead, as after a pause of the machine
    SLOW = "slow"  # steps that take long
    LAYOUT = (
        "layout"  # workers of a second KV layout, as in the midst of an upgrade; the others and they read nothing of each other
    )
    DRAIN = "drain"  # a worker gets SIGTERM, and is replaced
    SWITCH = "switch"  # a worker takes another role, by command, while it serves
    TWIN = "twin"  # a worker is replaced without a signal
    SQUEEZE = "squeeze"  # for a moment a pool has no block for a running request: others give way, or one is preempted
    # load
    PRESSURE = "pressure"  # pools that hold little more than one request
    SHORT_LEASE = "short_lease"  # leases and deadlines as short as other delays
    ABORT = "abort"  # clients that leave
    DEADLINE = "deadline"  # requests with little time
    SLOW_CLIENT = "slow_client"  # clients that read slowly, or stop reading for a while
    # the tier below the workers' pools, in runs with one
    STORE_CRASH = "store_crash"  # the store dies, and starts again as a new process with its disk
    STORE_FREEZE = "store_freeze"
    STORE_LOSS = "store_loss"  # its replies are lost, or late
    STORE_CORRUPT = "store_corrupt"  # bits of stored blocks change
    STORE_FULL = "store_full"  # little memory, all of which may be in use
    # the disk or the server below a store's memory, in runs with one
    TIER_FULL = "tier_full"  # it stores nothing new for a while
    TIER_UNREADABLE = "tier_unreadable"  # its reads fail for a while
    TIER_LOSS = "tier_loss"  # its blocks vanish; a disk still announces them


STORE_FAULTS = (Fault.STORE_CRASH, Fault.STORE_FREEZE, Fault.STORE_LOSS, Fault.STORE_CORRUPT, Fault.STORE_FULL)
TIER_FAULTS = (Fault.TIER_FULL, Fault.TIER_UNREADABLE, Fault.TIER_LOSS)
GRAY_FAULTS = (Fault.ONE_WAY, Fault.DATA_PARTITION, Fault.DROP, Fault.HANG, Fault.EARLY_TERM)  # a part of a process or a link
_DRAWN_APART = (
    *STORE_FAULTS,
    *TIER_FAULTS,
    *GRAY_FAULTS,
    Fault.LAYOUT,
    Fault.SLOW_CLIENT,
    Fault.STEP_LOAD,
    Fault.SWITCH,
    Fault.SQUEEZE,
)
CLUSTER_FAULTS = tuple(kind for kind in Fault if kind not in _DRAWN_APART)
_BETWEEN_TWO = frozenset({Fault.CUT, Fault.PARTITION, Fault.ONE_WAY, Fault.DATA_PARTITION})
_GRAY_SHARE = 0.4  # of runs with faults


_RATES = ("spike_rate", "repeat_rate", "drop_rate", "stall_rate", "error_rate", "corrupt_rate", "refuse_rate")


@dataclass(frozen=True, slots=True, order=True)
class FaultEvent:
    """An event that hits one or two processes, for a while; in seconds."""

    at: float
    kind: Fault
    targets: tuple[str, ...]
    seconds: float = 0.0

    @property
    def end(self) -> float:
        """When it is over."""
        return self.at if self.kind is Fault.JUMP else self.at + self.seconds

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"{self.at:.3f} {self.kind} {' '.join(self.targets)}{lasting}"


@dataclass(frozen=True, slots=True)
class ChunkFault:
    """A fault that strikes when a prefill worker has announced chunk ``number`` of a request, counted from 1, or a bit later.

    ``target`` is a process, and of faults between two processes the second one; empty = that prefill worker.
    """

    request: str
    number: int
    delay_s: float
    kind: Fault
    target: str
    seconds: float

    def event(self, at: float, prefill: str) -> FaultEvent:
        """Return the event, with the name of the prefill worker that computes the request."""
        targets = (prefill, self.target) if self.kind in _BETWEEN_TWO else (self.target or prefill,)
        return FaultEvent(at, self.kind, targets, self.seconds)

    def __str__(self) -> str:
        target, lasting = self.target or "its prefill worker", f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"{self.delay_s:.4f} s after chunk {self.number} of {self.request}: {self.kind} {target}{lasting}"


@dataclass(slots=True)
class FaultSchedule:
    """All faults of one run. After ``quiet_at`` there are no more faults, and the weather is good."""

    kinds: frozenset[Fault]
    network: NetworkWeather = field(default_factory=NetworkWeather)
    reads: ReadWeather = field(default_factory=ReadWeather)
    events: list[FaultEvent] = field(default_factory=list)
    at_chunks: list[ChunkFault] = field(default_factory=list)
    quiet_at: float = 0.0

    def add(self, kinds: frozenset[Fault], events: Sequence[FaultEvent]) -> None:
        """Add faults."""
        self.kinds |= kinds
        self.events = sorted([*self.events, *events])
        self.quiet_at = max([self.quiet_at, *(event.end + 1.0 for event in events)])

    def calm_down(self) -> None:
        """Stop all random faults."""
        for weather in (self.network, self.reads):
            for name in _RATES:
                if hasattr(weather, name):
                    setattr(weather, name, 0.0)


def draw_kinds(random: Random) -> frozenset[Fault]:
    """Choose the kinds of a run, except those of a tier: none, a few, many or all. Runs with few show most about a bug."""
    share = random.random()
    if share < 0.05:
        return frozenset()
    if share < 0.9:
        return frozenset(random.sample(CLUSTER_FAULTS, random.randint(1, 3 if share < 0.55 else 8)))
    return frozenset(CLUSTER_FAULTS)


def draw_faults(
    random: Random, kinds: frozenset[Fault], workers: Sequence[str], routers: Sequence[str], moments: Sequence[float]
) -> FaultSchedule:
    """Draw the faults of a run in which something begins at these ``moments``: faults hit hardest shortly after."""
    found = FaultSchedule(kinds)
    _draw_weather(random, found)
    everyone = [*workers, *routers]
    pairs = [(one, other) for index, one in enumerate(everyone) for other in everyone[index + 1 :]]

    def draw(kind: Fault, most: int, targets: Sequence[tuple[str, ...]], shortest_s: float, longest_s: float) -> None:
        for _ in range(random.randint(1, most) if kind in kinds else 0):
            duration_s = random.uniform(shortest_s, longest_s)
            at = random.choice(moments) + random.choice((0.1, 0.5, 2.0)) * random.random()
            found.events.append(FaultEvent(at, kind, random.choice(targets), duration_s))

    each_worker, each_router = [(worker,) for worker in workers], [(router,) for router in routers]
    draw(Fault.CUT, 8, pairs, 0.0, 0.0)
    draw(Fault.PARTITION, 3, pairs, 0.3, 8.0)
    draw(Fault.CRASH, 4, each_worker, 0.1, 3.0)
    draw(Fault.ROUTER_CRASH, 2, each_router, 0.1, 4.0)
    draw(Fault.FREEZE, 3, [*each_worker, *each_router], 0.1, 8.0)
    draw(Fault.DRAIN, 2, each_worker, 0.1, 2.0)
    draw(Fault.TWIN, 2, each_worker, 0.0, 0.0)
    draw(Fault.JUMP, 4, each_worker, 0.5, 9.0)
    draw(Fault.SQUEEZE, 8, each_worker, 0.0, 0.0)
    found.events.sort()
    found.quiet_at = max([*moments, *(event.end for event in found.events)]) + 1.0
    return found


def draw_gray_kinds(random: Random) -> frozenset[Fault]:
    """Choose the parts of processes and links that fail alone, in a run with other faults."""
    if random.random() >= _GRAY_SHARE:
        return frozenset()
    return frozenset(random.sample(GRAY_FAULTS, random.randint(1, len(GRAY_FAULTS))))


def draw_gray_faults(
    random: Random, found: FaultSchedule, kinds: frozenset[Fault], workers: Sequence[str], routers: Sequence[str]
) -> None:
    """Add the faults of parts of processes and links. ``workers`` are those with an engine."""
    moments = [1.5 + 0.5 * number for number in range(14)]
    everyone = [*workers, *routers]
    directions = [(one, other) for one in everyone for other in everyone if one != other]
    pairs = [(one, other) for one, other in directions if one < other and one in workers and other in workers]
    each_worker = [(worker,) for worker in workers]
    events: list[FaultEvent] = []

    def draw(kind: Fault, most: int, targets: Sequence[tuple[str, ...]], shortest_s: float, longest_s: float) -> None:
        for _ in range(random.randint(1, most) if kind in kinds and targets else 0):
            at = random.choice(moments) + random.choice((0.1, 0.5)) * random.random()
            events.append(FaultEvent(at, kind, random.choice(targets), random.uniform(shortest_s, longest_s)))

    draw(Fault.ONE_WAY, 3, directions, 0.3, 8.0)
    draw(Fault.DATA_PARTITION, 3, pairs, 1.0, 15.0)
    draw(Fault.HANG, 2, each_worker, 0.5, 30.0)
    draw(Fault.EARLY_TERM, 2, each_worker, 0.1, 1.0)
    if Fault.DROP in kinds:
        found.network.drop_rate = random.uniform(0.02, 0.2)
        found.reads.drop_rate = random.uniform(0.02, 0.2)
    found.add(kinds, events)


def _draw_weather(random: Random, found: FaultSchedule) -> None:
    network, reads, kinds = found.network, found.reads, found.kinds
    network.delay_s = random.choice((0.0005, 0.005, 0.05))
    reads.row_s = random.choice((0.0005, 0.005, 0.05))
    if Fault.DELAY in kinds:
        network.spike_rate, network.spike_s = random.uniform(0.02, 0.3), random.uniform(0.2, 1.0)
    if Fault.REPEAT in kinds:
        network.repeat_rate = random.uniform(0.05, 0.5)
    if Fault.STALL in kinds:
        reads.stall_rate, reads.stall_s = random.uniform(0.1, 0.6), random.uniform(0.5, 12.0)
    if Fault.READ_ERROR in kinds:
        reads.error_rate, reads.refuse_rate = random.uniform(0.05, 0.4), random.choice((0.0, 0.1))
    if Fault.CORRUPT in kinds:
        reads.corrupt_rate = random.uniform(0.1, 0.6)
