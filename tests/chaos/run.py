"""One chaos run from start to report."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.chaos import verdict
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import Incident, Injector
from tests.chaos.load import Answer, Load
from tests.chaos.questions import load_questions
from tests.chaos.watch import Growth, Watch
from tests.support import shared_memory

_RELEASE_TIMEOUT_S = 60.0
_MAX_LONGER = 3.0  # a run lasts at most this many times its minutes, to reach ``min_answers``


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The options of a run. ``num_at_a_time`` 1 = each fault once the cluster is whole again; more = densely."""

    transport: str
    minutes: float
    num_pairs: int
    num_at_a_time: int
    kinds: tuple[str, ...]
    num_clients: int
    min_answers: int
    seed: int

    @property
    def calm_s(self) -> float:
        """Seconds between two faults; without survivors as long as a stream takes: it outlives one restart, not any number."""
        return 1.0 if self.num_pairs > 1 else 20.0

    @property
    def has_survivors(self) -> bool:
        """True if one fault at a time leaves a worker of each role."""
        return self.num_pairs > 1 and self.num_at_a_time == 1


@dataclass(slots=True)
class Report:
    """The result of a run; it was good if there are no ``problems``."""

    plan: ChaosPlan
    duration_s: float
    answers: list[Answer]
    incidents: list[Incident]
    growths: list[Growth]
    held: dict[str, float]
    leftovers: list[str]
    problems: list[str] = field(default_factory=list)

    @property
    def complete(self) -> list[Answer]:
        """The whole answers."""
        return [answer for answer in self.answers if not answer.error and not answer.has_left]

    @property
    def errors(self) -> list[Answer]:
        """The answers that ended with an error."""
        return [answer for answer in self.answers if answer.error]

    @property
    def num_wrong(self) -> int:
        """How many answers, whole or not, hold a wrong token."""
        return sum(each.is_wrong for each in self.answers)

    @property
    def longest_pause_s(self) -> float:
        """The longest pause of any answer without an error."""
        frozen = verdict.router_freezes(self.incidents)
        return max((verdict.longest_pause(each, frozen).duration_s for each in self.answers if not each.error), default=0.0)

    def text(self) -> str:
        """Return the report in lines."""
        num_left = sum(each.has_left for each in self.answers)
        plan, kinds = self.plan, Counter(incident.kind for incident in self.incidents)
        handoffs = sum(bool(each.transfer) and not each.transfer.get("fallback_reason") for each in self.complete)
        reasons = Counter(reason for each in self.complete if (reason := each.transfer.get("fallback_reason")))
        frozen = verdict.router_freezes(self.incidents)
        pauses = sorted(verdict.longest_pause(each, frozen).duration_s for each in self.complete) or [0.0]
        lines = [
            f"chaos: transport {plan.transport}, {plan.num_pairs}P + {plan.num_pairs}D, seed {plan.seed}, "
            f"{self.duration_s:.0f} s, {'one fault' if plan.num_at_a_time == 1 else f'{plan.num_at_a_time} faults'} at a time",
            f"faults: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items())) or 'none'}",
            f"answers: {len(self.complete)} whole and compared, {num_left} left by the client, {len(self.errors)} errors, "
            f"{self.num_wrong} wrong",
            f"refused once, then served: {sum(bool(each.num_refused) for each in self.complete)}",
            f"handoffs: {handoffs}; computed instead: {dict(reasons) or 'none'}",
            f"longest pause of a stream, without the router's own: median {median(pauses):.2f} s, longest {pauses[-1]:.2f} s",
            *(
                f"{each.name} ({each.pid}): {each.life_s:.0f} s, {each.private_bytes / 2**20:.0f} MiB, then "
                f"{each.more_private_bytes / 2**20:+.0f} MiB, {each.more_fds:+g} fds, {each.more_threads:+g} threads"
                for each in self.growths
            ),
            *(f"BAD: {problem}" for problem in self.problems),
            "good" if not self.problems else f"{len(self.problems)} problems; again with --seed {plan.seed}",
        ]
        return "\n".join(lines)

    def json(self) -> str:
        """Return the goals as JSON."""
        num_compared, wanted = len(self.complete), self.plan.min_answers
        goals = [
            _goal("wrong answers", self.num_wrong, 0, "answers"),
            _goal("problems", len(self.problems), 0, "problems"),
            _goal("gauges held at the end", len(self.held), 0, "gauges"),
            _goal("answers compared", num_compared, wanted, "answers", is_met=num_compared >= wanted),
        ]
        if self.plan.has_survivors:
            goals += [
                _goal("client-visible errors", len(self.errors), 0, "answers"),
                _goal("longest pause of a stream", round(self.longest_pause_s, 3), verdict.MAX_PAUSE_S, "s"),
            ]
        return json.dumps({"goals": goals}, indent=1)


def _goal(name: str, value: float, goal: float, unit: str, *, is_met: bool | None = None) -> dict[str, Any]:
    """Return a goal that is met by a value of at most ``goal``, if ``is_met`` does not say otherwise."""
    return {"name": name, "value": value, "goal": goal, "unit": unit, "met": value <= goal if is_met is None else is_met}


def run(plan: ChaosPlan, folder: Path) -> Report:
    """Start a cluster, load it, make faults, and judge what came of it."""
    questions = load_questions()
    shared_before = shared_memory.files()
    began_at = time.monotonic()
    with ChaosCluster(plan.transport, plan.num_pairs, folder) as cluster:
        load = Load(cluster.base_url, questions, plan.seed, plan.num_clients, retries_refusals=not plan.has_survivors)
        watch = Watch(lambda: cluster.pids)
        injector = Injector(cluster, plan.kinds, plan.seed, plan.calm_s)
        watch.start()
        load.start()
        injector.start(plan.num_at_a_time)
        try:
            _wait(plan, load)
        finally:
            injector.stop()
            load.stop()
            watch.stop()
        held = _wait_released(cluster)
        report = Report(
            plan=plan,
            duration_s=time.monotonic() - began_at,
            answers=load.answers,
            incidents=injector.incidents,
            growths=watch.growths(),
            held=held,
            leftovers=[],
            problems=injector.problems,
        )
        logs = {name: cluster.log_tail(name) for name in ("router", *cluster.workers)}
    report.leftovers = _leftovers(shared_before)
    _judge(report)
    if report.problems:
        (folder / "tails.txt").write_text("\n".join(f"---- {name}\n{tail}" for name, tail in logs.items()))
    return report


def _wait(plan: ChaosPlan, load: Load) -> None:
    began_at = time.monotonic()
    duration_s = 60.0 * plan.minutes
    while (now := time.monotonic()) < began_at + _MAX_LONGER * duration_s:
        if now >= began_at + duration_s and len(load.answers) >= plan.min_answers:
            return
        time.sleep(0.2)


def _wait_released(cluster: ChaosCluster) -> dict[str, float]:
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while (held := cluster.held()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


def _leftovers(shared_before: set[str]) -> list[str]:
    children = [f"process {child.pid} {child.name()}" for child in psutil.Process().children(recursive=True)]
    return children + [f"/dev/shm/{name}" for name in sorted(shared_memory.left_since(shared_before))]


def _judge(report: Report) -> None:
    plan, problems = report.plan, report.problems
    problems += [
        f"{each.client_id}: wrong tokens {each.token_ids}, expected {list(each.expected)}"
        for each in report.answers
        if each.is_wrong
    ]
    if plan.has_survivors:
        problems += [f"{each.client_id}: {each.error}{_around(report, each)}" for each in report.errors]
        frozen = verdict.router_freezes(report.incidents)
        pauses = [(each, verdict.longest_pause(each, frozen)) for each in report.answers if not each.error]
        problems += [
            f"{pause.client_id}: a pause of {pause.duration_s:.1f} s after {pause.after_tokens} tokens{_around(report, each)}"
            for each, pause in pauses
            if pause.duration_s > verdict.MAX_PAUSE_S
        ]
    elif plan.num_at_a_time == 1:
        problems += [f"{each.client_id}: {each.error}{_around(report, each)}" for each in report.errors]
    else:
        problems += verdict.uncaused(report.answers, report.incidents)
    problems += verdict.find_growth(report.growths)
    problems += [f"held at the end: {name} = {value:g}" for name, value in report.held.items()]
    problems += [f"left behind: {each}" for each in report.leftovers]
    if len(report.complete) < plan.min_answers:
        problems.append(f"only {len(report.complete)} whole answers, {plan.min_answers} were wanted")


def _around(report: Report, answer: Answer) -> str:
    """Say which faults were made during a request or shortly before."""
    found = [
        f"{each.kind} of {each.target} {each.began_at - answer.started_at:+.1f}..{each.ended_at - answer.started_at:+.1f} s"
        for each in report.incidents
        if each.began_at <= answer.ended_at and answer.started_at - 10.0 <= max(each.ended_at, each.whole_at)
    ]
    return f" [{answer.ended_at - answer.started_at:.1f} s long; {'; '.join(found) or 'no fault'}]"
