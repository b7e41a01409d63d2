"""Many simulated runs: in sequence, or spread over processes; and their summary."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvferry.sim.chunk_plan import draw_chunk_plan
from kvferry.sim.cluster import RunResult, SimCluster
from kvferry.sim.faults import Fault
from kvferry.sim.race_plan import draw_any_plan

_SEEDS_PER_TASK = 50

Kinds = Sequence[Fault] | None  # None = what the seed draws


@dataclass(slots=True)
class Summary:
    """The totals of many runs."""

    num_runs: int = 0
    num_events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    failures: list[RunResult] = field(default_factory=list)

    def add(self, result: RunResult) -> None:
        """Count a run."""
        self.num_runs += 1
        self.num_events += result.num_events
        self.outcomes += result.outcomes
        self.happened += result.happened
        if not result.is_good:
            self.failures.append(result)

    def merge(self, other: Summary) -> None:
        """Count the runs of another summary."""
        self.num_runs += other.num_runs
        self.num_events += other.num_events
        self.outcomes += other.outcomes
        self.happened += other.happened
        self.failures += other.failures


def run_seed(seed: int, kinds: Kinds = None, *, is_chunked: bool = False, keeps_log: bool = False) -> RunResult:
    """Play one seed, with the kinds of faults that it draws or with these; or its run with faults at boundaries of chunks."""
    plan = draw_chunk_plan(seed) if is_chunked else draw_any_plan(seed, kinds)
    return SimCluster(plan, keeps_log=keeps_log).run()


def run_seeds(seeds: Iterable[int], kinds: Kinds = None, *, is_chunked: bool = False) -> Summary:
    """Play seeds in sequence."""
    summary = Summary()
    for seed in seeds:
        summary.add(run_seed(seed, kinds, is_chunked=is_chunked))
    return summary


def run_in_processes(
    first: int, num_runs: int, kinds: Kinds, num_processes: int, *, is_chunked: bool = False
) -> Iterator[Summary]:
    """Play seeds on several cores; yields a summary of each portion, in the order of the seeds."""
    ends = range(first + _SEEDS_PER_TASK, first + num_runs + _SEEDS_PER_TASK, _SEEDS_PER_TASK)
    portions = [range(end - _SEEDS_PER_TASK, min(end, first + num_runs)) for end in ends]
    with ProcessPoolExecutor(num_processes, initializer=_prepare) as pool:
        yield from pool.map(partial(run_seeds, kinds=kinds, is_chunked=is_chunked), portions)


def _prepare() -> None:
    """Get a process ready for many runs: collections of garbage look at what these leave, not at all modules."""
    silence()
    gc.collect()
    gc.freeze()


def silence() -> None:
    """Let the code under simulation log nothing: its warnings are about simulated faults."""
    logging.disable(logging.CRITICAL)


def command(seed: int, kinds: Kinds = None, *, is_chunked: bool = False) -> str:
    """Return the command that replays a seed."""
    if is_chunked:
        return f"kvferry sim --chunks --seed {seed}"
    chosen = "" if kinds is None else f" --faults {','.join(kinds) or 'none'}"
    return f"kvferry sim --seed {seed}{chosen}"
