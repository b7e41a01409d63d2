"""The environment of a simulated process: the loop, the network, the memory of others, and the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvferry.sim.eventlog import EventLog
from kvferry.sim.loop import EventLoop, Process, Queue
from kvferry.sim.network import Network
from kvferry.sim.transport import SimFabric
from kvferry.sim.troubles import Troubles


@dataclass(slots=True)
class World:
    """The shared state of all processes of a simulation."""

    loop: EventLoop
    network: Network
    fabric: SimFabric
    random: Random  # for durations inside a process
    log: EventLog
    on_progress: Callable[[str, str], None] = lambda worker, request_id: None  # a prefill worker announces a chunk


@dataclass(slots=True)
class Host:
    """One process's view of the world. ``from_engine`` is the queue from its engine thread to its event loop."""

    world: World
    process: Process
    from_engine: Queue = field(init=False)

    def __post_init__(self) -> None:
        """Make the queue."""
        self.from_engine = Queue(self.process, self.world.loop, self.thread_delay_s)

    @property
    def loop(self) -> EventLoop:
        """The virtual time."""
        return self.world.loop

    @property
    def network(self) -> Network:
        """The links."""
        return self.world.network

    @property
    def fabric(self) -> SimFabric:
        """The readable memory of all processes."""
        return self.world.fabric

    @property
    def troubles(self) -> Troubles:
        """The troubles so far."""
        return self.world.network.troubles

    def log(self, what: str, value: object = None) -> None:
        """Write a line of the event log about this process."""
        self.world.log.write(self.process.name, what, value)

    def thread_delay_s(self) -> float:
        """Draw the delay of a message from one thread to another."""
        return self.world.random.uniform(0.0, 0.0005)
