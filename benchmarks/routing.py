"""Compare routing policies on request traces, by simulating the prefill workers of a cluster.

Runs published policies and the functions that kvferry's router calls (``router.routing``) in the same simulation: 6 prefill
workers, exact contents of all caches, jittered arrivals, the same seeds for all. ``--goals`` checks kvferry's goals; it takes
up to 30 minutes on two cores.

The traces are those of the Mooncake project, ``FAST25-release/traces`` of https://github.com/kvcache-ai/Mooncake (Apache-2.0):
``--traces`` names a folder with ``mooncake_conversation.jsonl`` and ``mooncake_synthetic.jsonl``
(there ``conversation_trace.jsonl`` and ``synthetic_trace.jsonl``).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from common import Table, at_least, at_most, goal_notes
from routing_policies import BASELINES, OURS, ROUTERS, PredictedTime, RestartedRouter
from routing_simulation import (
    Results,
    Scenario,
    mocker_prefill_ms,
    qwen_prefill_ms,
    simulate,
)

from kvferry.advise.trace import TraceRequest, read_trace, spread_arrivals

NUM_WORKERS = 6
MODELS = {"qwen": qwen_prefill_ms, "mocker": mocker_prefill_ms}
TRACES = ("conversation", "synthetic")
SPEEDS = {
    ("conversation", "qwen"): 1.0,
    ("synthetic", "qwen"): 1.5,
    ("conversation", "mocker"): 4.0,
    ("synthetic", "mocker"): 5.0,
}
FIRST_BRACKET = {"qwen": (0.8, 2.4), "mocker": (3.0, 9.0)}  # speeds; widened if the capacity lies outside
REPORT_MS = 250.0  # with other routers, a worker tells of their prompts so often; contents each 200 ms
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # 95 %, two-sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One simulation, or with ``is_capacity`` one bisection of the speed."""

    folder: Path
    trace: str
    model: str
    policy: str
    seed: int
    speed: float = 0.0  # 0 = that of the table
    num_blocks: int = 6000
    time_error: float = 0.0
    num_routers: int = 1
    report_ms: float = 0.0
    restart_share: float = 0.0  # of the trace, after which the router restarts
    is_capacity: bool = False
    limit: int = 0  # requests; 0 = the whole trace


@dataclass(frozen=True, slots=True)
class Figures:
    """What a task found; of a bisection only ``capacity``."""

    hit_rate: float = 0.0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    slowdown_p99: float = 0.0
    ok_share: float = 0.0
    capacity: float = 0.0
    hit_rate_after: float = 0.0  # from two seconds after the restart, for 60 s


@cache
def _requests(folder: Path, trace: str, seed: int, limit: int) -> list[TraceRequest]:
    found = read_trace(folder / f"mooncake_{trace}.jsonl").requests
    return spread_arrivals(found[:limit] if limit else found, seed)


def _simulate(task: Task, speed: float, until_ok: float = 0.0) -> Results:
    requests, model = _requests(task.folder, task.trace, task.seed, task.limit), MODELS[task.model]
    scenario = Scenario(
        requests=requests,
        prefill_ms=model,
        num_workers=NUM_WORKERS,
        num_blocks=task.num_blocks,
        speed=speed,
        time_error=task.time_error,
        report_ms=task.report_ms,
        seed=task.seed,
        until_ok=until_ok,
    )
    if task.num_routers > 1:
        routers = [
            PredictedTime(NUM_WORKERS, model, task.seed, rank=(rank, task.num_routers)) for rank in range(task.num_routers)
        ]
        return simulate(scenario, routers)
    if task.restart_share:
        return simulate(scenario, [RestartedRouter(NUM_WORKERS, model, task.seed, _restart_ms(task, speed, requests))])
    return simulate(scenario, [ROUTERS[task.policy](NUM_WORKERS, model, task.seed)])


def _restart_ms(task: Task, speed: float, requests: Sequence[TraceRequest]) -> float:
    return 0.4 * requests[-1].arrival_ms / speed


def run_task(task: Task) -> Figures:
    """Run one simulation, or one bisection."""
    if task.is_capacity:
        return Figures(capacity=find_capacity(task))
    speed = task.speed or SPEEDS[task.trace, task.model]
    results = _simulate(task, speed)
    restart_ms = _restart_ms(task, speed, _requests(task.folder, task.trace, task.seed, task.limit))
    after_ms = restart_ms + 2 * task.report_ms
    return Figures(
        results.hit_rate,
        results.mean_ttft_ms,
        results.ttft_quantile(0.5),
        results.ttft_quantile(0.9),
        results.ttft_quantile(0.99),
        results.slowdown_quantile(0.99),
        results.ok_share,
        hit_rate_after=results.hit_rate_between(after_ms, after_ms + 60_000),
    )


def find_capacity(task: Task, share: float = 0.95, precision: float = 0.01) -> float:
    """Return the largest speed of the trace at which this share of the requests is in time, by bisection."""

    def holds(speed: float) -> bool:
        return _simulate(task, speed, until_ok=share).ok_share >= share

    low, high = FIRST_BRACKET[task.model]
    while not holds(low):
        low, high = low / 3, low
    while holds(high):
        low, high = high, high * 1.5
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and half the width of its 95 % confidence interval (Student's t)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        if len(values) < 2:
            return cls(values[0], 0.0)
        factor = T_QUANTILE.get(len(values), 2.0)
        return cls(statistics.mean(values), factor * statistics.stdev(values) / math.sqrt(len(values)))

    def show(self, digits: int = 2) -> str:
        return f"{self.mean:,.{digits}f} ± {self.half_width:,.{digits}f}"


@dataclass(slots=True)
class Goals:
    """The goals' figures, for ``--json``: a goal is met if its mean over the seeds is on the right side."""

    found: list[dict[str, object]] = field(default_factory=list)
    half_widths: dict[str, float] = field(default_factory=dict)  # of the intervals, by the goal's name

    def add(self, name: str, interval: Interval, goal: float, *, is_floor: bool = False, unit: str = "ratio") -> None:
        aim = (at_least if is_floor else at_most)(name, interval.mean, goal, unit)
        self.found.append(aim)
        self.half_widths[name] = interval.half_width
        print(f"{goal_notes([aim])[0]}; 95 % interval {interval.show(3)}")
        sys.stdout.flush()


class Bench:
    """Runs tasks in processes and remembers their figures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder: Path = arguments.traces
        self.seeds = list(range(1, arguments.seeds + 1))
        self.limit: int = 600 if arguments.quick else 0
        self._pool = ProcessPoolExecutor(arguments.jobs) if arguments.jobs > 1 else None
        self.figures: dict[Task, Figures] = {}

    def task(self, trace: str, model: str, policy: str, seed: int, **rest: float) -> Task:
        return Task(folder=self.folder, trace=trace, model=model, policy=policy, seed=seed, limit=self.limit, **rest)  # type: ignore[arg-type]

    def run(self, tasks: Iterable[Task]) -> None:
        missing = [task for task in dict.fromkeys(tasks) if task not in self.figures]
        run: Callable[..., Iterable[Figures]] = self._pool.map if self._pool is not None else map
        for task, figures in zip(missing, run(run_task, missing), strict=True):
            self.figures[task] = figures

    def all_seeds(self, policy: str, trace: str, model: str, **rest: float) -> list[Figures]:
        """Return the figures of a policy, one of each seed."""
        tasks = [self.task(trace, model, policy, seed, **rest) for seed in self.seeds]
        self.run(tasks)
        return [self.figures[task] for task in tasks]

    def prepare(self, policies: Iterable[str], **rest: float) -> None:
        """Run all traces, models and seeds at once, so that no process waits for another."""
        self.run(
            self.task(trace, model, policy, seed, **rest)
            for policy in policies
            for trace in TRACES
            for model in MODELS
            for seed in self.seeds
        )


def ratios(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the interval of the ratios of the same seeds."""
    return Interval.of([one / other for one, other in zip(above, below, strict=True)])


def table(bench: Bench, trace: str, model: str, policies: Sequence[str], **rest: float) -> Table:
    rows = []
    for policy in policies:
        figures = bench.all_seeds(policy, trace, model, **rest)
        cells = [
            ("hit_rate", 3),
            ("mean_ms", 0),
            ("p50_ms", 0),
            ("p90_ms", 0),
            ("p99_ms", 0),
            ("slowdown_p99", 1),
            ("ok_share", 3),
        ]
        rows.append([policy, *(Interval.of([getattr(one, name) for one in figures]).show(digits) for name, digits in cells)])
    title = f"{trace}, {model}"
    return Table([title, "hit", "TTFT mean", "p50", "p90", "p99", "slowdown p99", "in time"], rows)


def best_of(bench: Bench, trace: str, model: str, name: str, *, highest: bool, **rest: float) -> list[str]:
    """Return the baselines by the mean of a figure, best first."""
    means = {
        policy: statistics.mean(getattr(one, name) for one in bench.all_seeds(policy, trace, model, **rest))
        for policy in BASELINES
    }
    return sorted(means, key=lambda policy: means[policy], reverse=highest)


def check_capacity(bench: Bench, goals: Goals) -> None:
    """Compare capacities. A baseline that is 15 % below the best one with the first seed gets no further seeds."""
    first = {key: bench.task(*key, seed=1, is_capacity=True) for key in _keys(BASELINES)}
    bench.run(first.values())
    rivals = {}
    for trace in TRACES:
        for model in MODELS:
            found = {policy: bench.figures[first[trace, model, policy]].capacity for policy in BASELINES}
            rivals[trace, model] = [policy for policy, value in found.items() if value >= 0.85 * max(found.values())]
    ours = list(OURS)[:2]
    bench.run(
        bench.task(trace, model, policy, seed, is_capacity=True)
        for (trace, model), names in rivals.items()
        for policy in (*ours, *names)
        for seed in bench.seeds
    )
    for (trace, model), names in rivals.items():
        found = {
            policy: [one.capacity for one in bench.all_seeds(policy, trace, model, is_capacity=True)]
            for policy in (*ours, *names)
        }
        best = max(names, key=lambda policy: statistics.mean(found[policy]))
        rest = {policy: bench.figures[first[trace, model, policy]].capacity for policy in BASELINES if policy not in names}
        rows = [[policy, Interval.of(values).show()] for policy, values in found.items()]
        rows += [[policy, f"{value:.2f} (one seed)"] for policy, value in rest.items()]
        print(Table([f"capacity, {trace}, {model}", "speed"], rows).text(), end="\n\n")
        goals.add(f"capacity, {trace}, {model}, against {best}", ratios(found[ours[0]], found[best]), 1.08, is_floor=True)
        arrival = ratios(found[ours[1]], found[best])
        print(f"       for comparison, kvferry with workers that serve in order of arrival: {arrival.show(3)} x")


def _keys(policies: Iterable[str]) -> list[tuple[str, str, str]]:
    return [(trace, model, policy) for policy in policies for trace in TRACES for model in MODELS]


def check_times(bench: Bench, goals: Goals) -> None:
    """Compare mean TTFT on both traces under both models, and the tail of the slowdown."""
    bench.prepare(ROUTERS)
    for trace in TRACES:
        for model in MODELS:
            ours = bench.all_seeds("kvferry", trace, model)
            best = best_of(bench, trace, model, "mean_ms", highest=False)[0]
            ratio = ratios([one.mean_ms for one in ours], [one.mean_ms for one in bench.all_seeds(best, trace, model)])
            goals.add(f"mean TTFT, {trace}, {model}, against {best}", ratio, round(1 + ratio.half_width, 4))
            if trace == "conversation":
                best = best_of(bench, trace, model, "slowdown_p99", highest=False)[0]
                rival = [one.slowdown_p99 for one in bench.all_seeds(best, trace, model)]
                goals.add(
                    f"p99 slowdown, {trace}, {model}, against {best}", ratios([one.slowdown_p99 for one in ours], rival), 0.6
                )


def check_routers(bench: Bench, goals: Goals) -> None:
    """Compare two routers with one, a restarted router with one that is not, and routers with a false index."""
    for trace, goal in (("conversation", 1.05), ("synthetic", 1.08)):
        one = [figures.mean_ms for figures in bench.all_seeds("kvferry", trace, "qwen", speed=1.0)]
        for report_ms in (REPORT_MS, 1000.0):
            two = [
                figures.mean_ms
                for figures in bench.all_seeds("kvferry", trace, "qwen", speed=1.0, num_routers=2, report_ms=report_ms)
            ]
            if report_ms == REPORT_MS:
                goals.add(f"two routers, {trace}, reports each {report_ms:g} ms: mean TTFT", ratios(two, one), goal)
            else:
                print(f"       for comparison, reports each {report_ms:g} ms: {ratios(two, one).show(3)} x")
        steady = bench.all_seeds("kvferry", trace, "qwen", speed=1.0, report_ms=1000.0)
        restarted = bench.all_seeds("kvferry", trace, "qwen", speed=1.0, report_ms=1000.0, restart_share=0.4)
        lost = [100 * (a.hit_rate_after - b.hit_rate_after) for a, b in zip(steady, restarted, strict=True)]
        goals.add(f"restart, {trace}: hit rate lost after two report intervals", Interval.of(lost), 2.0, unit="points")
        for policy in ("kvferry, blind to a worker", "kvferry, lied to by a worker", "kvferry, learned times"):
            found = [figures.mean_ms for figures in bench.all_seeds(policy, trace, "qwen", speed=1.0)]
            print(f"       {policy}, {trace}: mean TTFT {ratios(found, one).show(3)} x")


def show_variants(bench: Bench, _goals: Goals) -> None:
    """Print kvferry and the two best baselines with small caches and with errors of the time."""
    for trace in TRACES:
        policies = ["kvferry", *best_of(bench, trace, "qwen", "mean_ms", highest=False)[:2]]
        for note, rest in (
            ("600 blocks", {"num_blocks": 600, "speed": 1.0}),
            ("times ± 30 %", {"time_error": 0.3}),
            ("times ± 60 %", {"time_error": 0.6}),
        ):
            bench.run(bench.task(trace, "qwen", policy, seed, **rest) for policy in policies for seed in bench.seeds)
            print(f"{note}:\n{table(bench, trace, 'qwen', policies, **rest).text()}\n", flush=True)


PARTS: dict[str, Callable[[Bench, Goals], None]] = {
    "times": check_times,
    "capacity": check_capacity,
    "routers": check_routers,
    "variants": show_variants,
}


def main() -> None:
    """Print the comparison, or check the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the two traces")
    parser.add_argument("--goals", action="store_true", help="check the goals; all else is printed for comparison")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this part of the goals")
    parser.add_argument("--seeds", type=int, default=5, help="jittered arrivals of each arm (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="600 requests of each trace: figures without meaning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the goals here")
    arguments = parser.parse_args()
    began = time.monotonic()
    bench, goals = Bench(arguments), Goals()
    if arguments.goals or arguments.part:
        for name, check in PARTS.items():
            if name in (arguments.part or PARTS):
                check(bench, goals)
    else:
        bench.prepare(ROUTERS)
        for trace, model in SPEEDS:
            print(table(bench, trace, model, list(ROUTERS)).text(), end="\n\n", flush=True)
    print(f"- {NUM_WORKERS} prefill workers, {len(bench.seeds)} seeds, 95 % intervals; {time.monotonic() - began:.0f} s")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"goals": goals.found, "half_widths": goals.half_widths}, indent=1) + "\n")


if __name__ == "__main__":
    main()
