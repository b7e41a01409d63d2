"""How long the mistakes of the first minutes take to be told: from the command to its exit code.

    python benchmarks/first_minutes.py [--repeats N] [--quick] [--json FILE] [--markdown]

Each command line of ``benchmarks/mistakes.py`` is run as a process, ``--repeats`` times. Its exit code and its last line are
checked. The time is wall-clock time, import of the command included; the processor time beside it says what it would be on a
machine that does nothing else. Goal: 3 s at most for the longest. The exit code is 1 if a line or an exit code is not as
expected; the times are not judged.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import Machine, Outcome, Spread, Table, at_most, goal_notes, make_parser, publish
from mistakes import MISTAKES, Mistake, Surroundings, surroundings

GOAL_S = 3.0
_TIMEOUT_S = 120.0
_NUM_QUICK = 3


class NotAsExpected(Exception):
    """A command has ended otherwise than the table says."""


def measure(mistake: Mistake, found: Surroundings) -> tuple[float, float]:
    """Run a command line and return its seconds, and those of processor time.

    Raises:
        NotAsExpected: its exit code or its last line is another one.
    """
    command = [sys.executable, "-P", "-m", "kvferry", *(found.fill(argument) for argument in mistake.arguments)]
    begin, cpu_begin = time.perf_counter(), _cpu_s()
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    seconds, cpu_s = time.perf_counter() - begin, _cpu_s() - cpu_begin
    last_line = (result.stderr.splitlines() or [""])[-1]
    if result.returncode != mistake.exit_code or not re.search(found.fill(mistake.last_line, is_pattern=True), last_line):
        raise NotAsExpected(f"{mistake.name}: exit code {result.returncode}, last line {last_line!r}")
    return seconds, cpu_s


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def benchmark(mistakes: Sequence[Mistake], repeats: int) -> Outcome:
    """Measure every mistake, all once and then all again, so that a disturbance of the machine hits different ones."""
    seconds: dict[str, list[float]] = {mistake.name: [] for mistake in mistakes}
    cpu_s: dict[str, list[float]] = {mistake.name: [] for mistake in mistakes}
    with tempfile.TemporaryDirectory() as folder, surroundings(Path(folder)) as found:
        for _ in range(repeats):
            for mistake in mistakes:
                wall, cpu = measure(mistake, found)
                seconds[mistake.name].append(wall)
                cpu_s[mistake.name].append(cpu)
    names = sorted(seconds, key=lambda name: -Spread.of(seconds[name]).median)
    rows = [[name, Spread.of(seconds[name]).show(2), Spread.of(cpu_s[name]).show(2)] for name in names]
    longest = max(value for values in seconds.values() for value in values)
    goals = [at_most("the longest run", longest, GOAL_S, "s")]
    notes = [f"{len(mistakes)} mistakes, {repeats} runs each: median (smallest..largest)", *goal_notes(goals)]
    table = Table(["mistake", "seconds", "of processor time"], rows)
    return Outcome([table], notes, {"seconds": seconds, "cpu_s": cpu_s}, goals)


def main() -> int:
    parser = make_parser(__doc__ or "", repeats=3, takes_model=False)
    arguments: argparse.Namespace = parser.parse_args()
    machine = Machine.now()
    mistakes, repeats = (MISTAKES[:_NUM_QUICK], 1) if arguments.quick else (MISTAKES, arguments.repeats)
    try:
        publish(benchmark(mistakes, repeats), machine, arguments)
    except NotAsExpected as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
