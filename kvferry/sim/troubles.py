"""The real troubles of a run: which process or link, from when to when, after-effects included.

A fault of the plan is an intention; a *trouble* is its effect. A freeze of a dead process is none, and a frozen process
that is killed does not thaw. ``kvferry.sim.strikes`` records troubles as they happen, and so do network, transports and
stores with random faults. ``kvferry.sim.oracle`` explains errors by them: a trouble is a cause only for a request that needs
all of its names, at that time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvferry.sim.role_history import RoleHistory


class Kind(StrEnum):
    """Kinds of troubles."""

    DOWN = "down"  # a process is dead, or has not joined its peers yet
    PAUSED = "paused"  # a router is frozen
    FROZEN = "frozen"  # any other process is frozen
    HUNG = "hung"  # its engine hangs, the rest of the process runs
    DRAINING = "draining"
    REPLACED = "replaced"  # by a twin, until routers and peers know which is which
    JUMPED = "jumped"  # its clock
    CUT = "cut"  # the connections between two processes
    PARTED = "parted"  # no frame passes between two processes, or only in one direction
    DATA_PARTED = "data_parted"  # no reads pass between two processes; messages do
    LATE = "late"  # a frame between two processes
    DROPPED = "dropped"  # a frame between two processes
    UNANSWERED = "unanswered"  # a read of one process's memory by another, whose answer was dropped, until the reader ends it
    STALLED = "stalled"  # a read of one process's memory by another
    FAILED = "failed"  # such a read
    CORRUPTED = "corrupted"  # such a read, or data of a process
    BAD_LOAD = "bad_load"  # a load of a worker for a request, within a step, that brought garbage
    STORE = "store"  # a store refuses, loses or delays requests, or holds little


@dataclass(slots=True)
class Trouble:
    """A trouble for requests that need all of ``names``. ``end`` is infinite while it lasts."""

    kind: Kind
    names: frozenset[str]
    start: float
    end: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(sorted(self.names))} {self.start:.3f}-{self.end:.3f}"


class Troubles:
    """All troubles of a run, by what they concern. ``now`` is the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.roles = RoleHistory(now)
        self.steps: defaultdict[str, list[float]] = defaultdict(list)  # by worker, when each of its steps began
        self._by_name: defaultdict[str, list[Trouble]] = defaultdict(list)  # under the first of its names

    def note(self, kind: Kind, names: Iterable[str], seconds: float = math.inf) -> Trouble:
        """Record a trouble that begins now; it lasts this long, or until its ``end`` is set."""
        trouble = Trouble(kind, frozenset(names), self._now(), self._now() + seconds)
        self._by_name[min(trouble.names)].append(trouble)
        return trouble

    def note_step(self, name: str) -> None:
        """Record that a worker begins to compute."""
        self.steps[name].append(self._now())

    def find(self, kinds: Collection[Kind], names: Collection[str], start: float, end: float) -> list[Trouble]:
        """Return the troubles of these kinds that concern only these names, at some moment of a period."""
        return [
            trouble
            for name in sorted(names)
            for trouble in self._by_name.get(name, ())
            if trouble.kind in kinds and trouble.start <= end and trouble.end >= start and trouble.names.issubset(names)
        ]

    def touching(self, kinds: Collection[Kind], name: str, start: float, end: float) -> list[Trouble]:
        """Return the troubles of these kinds that concern this name among others, at some moment of a period."""
        return [
            trouble
            for found in self._by_name.values()
            for trouble in found
            if name in trouble.names and trouble.kind in kinds and trouble.start <= end and trouble.end >= start
        ]

    def longest_without(self, kinds: Collection[Kind], names: Collection[str], start: float, end: float) -> float:
        """Return the longest time within a period without troubles of these kinds for these names."""
        longest, free_since = 0.0, start
        for trouble in sorted(self.find(kinds, names, start, end), key=lambda trouble: trouble.start):
            longest = max(longest, trouble.start - free_since)
            free_since = max(free_since, trouble.end)
        return max(longest, end - free_since)
