"""Faults drawn from a seed, injected one at a time or densely, each kept as an incident with its times."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.local import ROUTER
from tests.chaos.cluster import ChaosCluster

WHOLE_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Incident:
    """One fault as it was made. Times are of the monotonic clock; ``whole_at`` is when every worker served again."""

    kind: str
    target: str
    began_at: float
    ended_at: float = 0.0
    whole_at: float = 0.0


class Injector:
    """Makes faults in a cluster until ``stop``. ``kinds`` are names of ``FAULTS``.

    ``calm_s`` is the time from the moment that the cluster is whole again to the next fault, if they come one at a time.
    """

    def __init__(self, cluster: ChaosCluster, kinds: Sequence[str], seed: int, calm_s: float) -> None:
        self._calm_s = calm_s
        self.incidents: list[Incident] = []
        self.problems: list[str] = []
        self._cluster = cluster
        self._kinds = list(kinds)
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, num_at_a_time: int) -> None:
        """Make faults from now on: one at a time, each once the cluster is whole again, or so many without waiting."""
        target = self._one_at_a_time if num_at_a_time == 1 else self._densely
        self._threads = [threading.Thread(target=target, name=f"faults-{index}") for index in range(num_at_a_time)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the faults in progress, heal everything, and wait until the cluster is whole."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._cluster.heal()
        missing = self._cluster.wait_whole(WHOLE_TIMEOUT_S)
        if missing:
            self.problems.append(f"{WHOLE_TIMEOUT_S:g} s after the last fault: {missing}")

    def _one_at_a_time(self) -> None:
        """Make every kind once, in a drawn order, then again."""
        order: list[str] = []
        while not self._stop.wait(self._calm_s):
            if not order:
                order = self._rng.sample(self._kinds, len(self._kinds))
            incident = self._make(order.pop())
            missing = self._cluster.wait_whole(WHOLE_TIMEOUT_S)
            incident.whole_at = time.monotonic()
            if missing:
                self.problems.append(f"{incident.kind} of {incident.target}: after {WHOLE_TIMEOUT_S:g} s {missing}")
                return

    def _densely(self) -> None:
        """Make faults in any state of the cluster."""
        while not self._stop.wait(self._draw(0.5, 4.0)):
            incident = self._make(self._choose(self._kinds))
            incident.whole_at = incident.ended_at

    def _make(self, kind: str) -> Incident:
        incident = Incident(kind, "", time.monotonic())
        with self._lock:
            self.incidents.append(incident)
        try:
            FAULTS[kind](self, incident)
        except (KeyError, OSError) as error:  # its target has just ended, by another fault
            incident.target = f"{incident.target} (not made: {error!r})"
        incident.ended_at = time.monotonic()
        return incident

    # ---- kinds ---------------------------------------------------------------------------------------------------------

    def _kill(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.workers)
        self._cluster.kill(incident.target)

    def _freeze(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.workers)
        self._freeze_for(incident.target, self._draw(1.0, 15.0))

    def _freeze_router(self, incident: Incident) -> None:
        incident.target = ROUTER
        self._freeze_for(ROUTER, self._draw(1.0, 15.0))

    def _freeze_for(self, name: str, duration_s: float) -> None:
        pid = self._cluster.freeze(name)
        self._stop.wait(duration_s)
        self._cluster.thaw(name, pid)

    def _hang(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.workers)
        self._switch_for(incident.target, "hang")

    def _blackhole(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.decodes)
        self._switch_for(incident.target, "blackhole")

    def _switch_for(self, name: str, kind: str) -> None:
        self._cluster.switch(name, kind, on=True)
        self._stop.wait(self._draw(3.0, 15.0))
        self._cluster.switch(name, kind, on=False)

    def _cut(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.workers)
        self._cluster.cut(incident.target)
        self._stop.wait(self._draw(1.0, 12.0))
        self._cluster.heal_wires(incident.target)

    def _cut_data(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.prefills)
        self._cluster.cut_data(incident.target)
        self._stop.wait(self._draw(3.0, 12.0))
        self._cluster.heal_wires(incident.target)

    def _cut_control(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.prefills)
        self._cluster.cut_control(incident.target)
        self._stop.wait(self._draw(3.0, 12.0))
        self._cluster.heal_wires(incident.target)

    def _reset(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.workers)
        self._cluster.reset(incident.target)

    def _drain(self, incident: Incident) -> None:
        incident.target = self._choose(self._cluster.workers)
        pid = self._cluster.pids[incident.target]
        self._cluster.drain(incident.target)
        deadline = time.monotonic() + WHOLE_TIMEOUT_S
        while self._cluster.pids.get(incident.target) == pid:
            if time.monotonic() > deadline:
                self.problems.append(f"{incident.target} did not leave within {WHOLE_TIMEOUT_S:g} s of its drain")
                return
            time.sleep(0.1)

    def _choose(self, names: Sequence[str]) -> str:
        with self._lock:
            return self._rng.choice(names)

    def _draw(self, low: float, high: float) -> float:
        with self._lock:
            return self._rng.uniform(low, high)


FAULTS: Mapping[str, Callable[[Injector, Incident], None]] = {
    "kill": Injector._kill,
    "freeze": Injector._freeze,
    "freeze-router": Injector._freeze_router,
    "hang": Injector._hang,
    "blackhole": Injector._blackhole,
    "cut": Injector._cut,
    "cut-data": Injector._cut_data,
    "cut-control": Injector._cut_control,
    "reset": Injector._reset,
    "drain": Injector._drain,
}
