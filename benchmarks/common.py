"""Common parts of the benchmarks of processes: arguments, facts about the machine, statistics, aims, and output of results.

Knows nothing of what is measured. A script prints its tables as text, or as Markdown for ``docs/benchmarks.md``; ``--json``
writes every single measurement, and under ``goals`` each aim that the script states, as ``at_most`` and ``at_least`` make it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

MODEL = "smollm2-135m"


class NothingMeasured(Exception):
    """A measurement has seen nothing of what it counts: its time was too short for this machine and its load."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of some measurements, in their unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """Each ratio is one of two measurements of the same repeat, so that a change of the machine's pace cancels out.

        Raises:
            NothingMeasured: one of the repeats has nothing to compare with.
        """
        if not all(denominators):
            raise NothingMeasured(f"a repeat has measured nothing, so there is no ratio to it: {list(denominators)}")
        return cls.of([above / below for above, below in zip(numerators, denominators, strict=True)])

    def show(self, digits: int = 1, factor: float = 1.0) -> str:
        median, low, high = (f"{factor * value:,.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low}..{high})"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown; the first column is aligned to the left, the others to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        return "\n".join("  ".join(cells).rstrip() for cells in self._aligned([self.columns, *self.rows]))

    def markdown(self) -> str:
        widths = self._widths()
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in self._aligned([self.columns, rule, *self.rows]))

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]

    def _aligned(self, rows: Sequence[Sequence[str]]) -> list[list[str]]:
        widths = self._widths()
        return [
            [
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            for row in rows
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a benchmark found. ``figures`` is everything that was measured and ``goals`` every aim, for ``--json``."""

    tables: Sequence[Table]
    notes: Sequence[str] = ()
    figures: dict[str, object] = field(default_factory=dict)
    goals: Sequence[Mapping[str, object]] = ()  # as ``at_most`` and ``at_least`` make them


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and on what a benchmark ran, taken before it started."""

    cpu: str
    cores: int
    load: float  # over the last minute
    python: str
    torch: str

    @classmethod
    def now(cls) -> Machine:
        cores = len(os.sched_getaffinity(0))
        return cls(_cpu_model(), cores, os.getloadavg()[0], platform.python_version(), version("torch"))

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, load {self.load:.2f} at the start and {os.getloadavg()[0]:.2f} at the end; "
            f"Python {self.python}, torch {self.torch}"
        )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that more than this share of all values do not exceed, at most the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed_ms(call: Callable[[], object]) -> float:
    """Return how long a call takes, in milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def at_most(name: str, value: float | None, goal: float, unit: str) -> dict[str, object]:
    """Return the entry of ``--json`` for an aim that is met by values up to the goal; None: nothing was measured."""
    return _aim(name, value, goal, unit, is_met=value is not None and value <= goal)


def at_least(name: str, value: float | None, goal: float, unit: str) -> dict[str, object]:
    """Return the entry of ``--json`` for an aim that is met by values from the goal on; None: nothing was measured."""
    return _aim(name, value, goal, unit, is_met=value is not None and value >= goal)


def _aim(name: str, value: float | None, goal: float, unit: str, *, is_met: bool) -> dict[str, object]:
    value = None if value is None else _plain(value)
    return {"name": name, "value": value, "goal": _plain(goal), "unit": unit, "met": bool(is_met)}


def _plain(value: float) -> float:
    """Return the number as JSON takes it; numpy's are not all floats of Python."""
    return value if isinstance(value, int) else float(value)


def goal_notes(aims: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a line for each aim of ``--json``: its value, the goal, and whether it is met."""
    lines = []
    for aim in aims:
        verdict = "met" if aim["met"] else "MISSED"
        value = "not measured" if aim["value"] is None else f"{aim['value']:,.4g} {aim['unit']}"
        lines.append(f"{aim['name']}: {value} (goal {aim['goal']:,g}): {verdict}")
    return lines


def make_parser(doc: str, repeats: int, *, takes_model: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all have; ``quick`` means: show that the script works; figures do not count."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if takes_model:
        parser.add_argument("--model", default=MODEL, help="alias, folder or GGUF file (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=repeats, help="measurements of each figure (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: little of everything, figures without meaning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return parser


def publish(outcome: Outcome, machine: Machine, arguments: argparse.Namespace) -> None:
    """Print the tables and notes, and write the figures and aims if asked to."""
    for table in outcome.tables:
        print(table.markdown() if arguments.markdown else table.text(), end="\n\n")
    for note in (*outcome.notes, str(machine)):
        print(f"- {note}")
    if arguments.quick:
        print("- a smoke run (--quick): the figures mean nothing")
    if arguments.json is not None:
        content = {
            "machine": {name: getattr(machine, name) for name in machine.__slots__},
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            **outcome.figures,
            "goals": list(outcome.goals),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
