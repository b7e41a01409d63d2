"""What the benchmark of a GPU has found, and the process that finds it: one that dies or hangs costs the part it was at.

An error of a kernel makes a device useless to its process, and a kernel that does not end makes the process useless. So the
measurements run in a process of their own, which sends all that it has found behind every part; where it ends early, another
one goes on with the parts that are left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from common import at_least

MAX_PROCESSES = 6
END_S = 10.0  # of a process that has nothing to do any more
LOST_DEVICE = 3  # exit status


@dataclass(slots=True)
class Report:
    """What was found, and what was not and why. Times are those of ``time.monotonic``, which all processes share."""

    deadline: float
    wanted: frozenset[str]
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)  # what, found, of the ceiling, aim
    goals: list[dict[str, object]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_failures: int = 0
    device: str = ""  # its description
    finished: set[str] = field(default_factory=set)  # parts that are not begun again
    running: str = ""  # the innermost part
    pipe: Connection | None = None
    is_device_lost: Callable[[], bool] = bool

    def add(self, section: str, case: str, found: str, share: float | None = None, aim: float | None = None) -> None:
        """Note one figure; ``share`` is that of its ceiling."""
        aimed = "" if aim is None or share is None else f"{100 * aim:.0f} % {'reached' if share >= aim else 'MISSED'}"
        if aim is not None and share is not None:
            self.goals.append(at_least(f"{section}: {case}", share, aim, "share"))
        self.rows.append((f"{section}: {case}", found, "" if share is None else f"{100 * share:.1f} %", aimed))

    def keep(self, section: str, case: str, value: Any) -> None:  # noqa: ANN401
        """Keep a measurement for the file."""
        self.figures.setdefault(section, {})[case] = value

    def fail(self, name: str, reason: str) -> None:
        """Note what a part has come to; it is not begun again."""
        self.num_failures += 1
        self.notes.append(f"{name}: FAILED: {reason}")
        self.finished.add(name)

    def send(self, *, has_ended: bool = False) -> None:
        """Tell the other process everything."""
        if self.pipe is not None:
            self.pipe.send((has_ended, replace(self, pipe=None, is_device_lost=bool)))

    def is_left(self, section: str, case: str) -> bool:
        """Say whether a part is wanted and has not been measured."""
        return section in self.wanted and f"{section} {case}" not in self.finished

    @contextmanager
    def part(self, section: str, case: str = "", *, is_needed: bool = False) -> Iterator[bool]:
        """Yield whether a part is to be measured; an error in it is noted, and stops no other.

        One that is needed by others is measured whether it is wanted or not, and again by the process that goes on.
        """
        name = f"{section} {case}".strip()
        if name in self.finished or (section not in self.wanted and not is_needed):
            yield False
        elif time.monotonic() > self.deadline:
            self.notes.append(f"{name}: no time was left")
            self.finished.add(name)
            yield False
        else:
            yield from self._measured(name, is_needed)

    def _measured(self, name: str, is_needed: bool) -> Iterator[bool]:
        begin, self.running = time.monotonic(), name
        self.send()
        try:
            yield True
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            if self.pipe is not None and self.is_device_lost():
                self.running = ""
                self.send()
                os._exit(LOST_DEVICE)  # closing what is still open would wait for the device
        if not is_needed:
            self.finished.add(name)
        self.keep("seconds", name, time.monotonic() - begin)
        self.running = ""
        self.send()


def measure_in_processes(
    target: Callable[..., None], arguments: tuple[Any, ...], report: Report, last_s: float, save: Callable[[Report], None]
) -> Report:
    """Run ``target(*arguments, report)`` in a process, and again until one has come to its end; return the last report.

    ``target`` ends with ``report.send(has_ended=True)``. What runs at ``last_s`` is killed. ``save`` sees every state.
    """
    context = multiprocessing.get_context("spawn")
    for _ in range(MAX_PROCESSES):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_begin, args=(target, arguments, report, theirs))
        process.start()
        theirs.close()
        has_ended, report = _listen(ours, report, last_s, save)
        why = _end(process, has_ended)
        ours.close()
        if has_ended:
            return report
        if report.running or process.exitcode != LOST_DEVICE:
            report.fail(report.running or "start", why)
        report.running = ""
        save(report)
        if time.monotonic() > min(report.deadline, last_s):
            break
    report.notes.append("not all was measured: the process has ended too often, or too late to begin another")
    return report


def _begin(target: Callable[..., None], arguments: tuple[Any, ...], report: Report, pipe: Connection) -> None:
    os.setsid()  # with all that it starts it can be killed at once
    report.pipe = pipe
    target(*arguments, report)


def _listen(pipe: Connection, report: Report, last_s: float, save: Callable[[Report], None]) -> tuple[bool, Report]:
    """Return whether the process says that it has come to its end, and the newest report."""
    has_ended = False
    while not has_ended and pipe.poll(max(0.0, last_s - time.monotonic())):
        try:
            has_ended, report = pipe.recv()
        except EOFError:
            break
        save(report)
    return has_ended, report


def _end(process: BaseProcess, has_ended: bool) -> str:
    """Wait for a process, or end it with all that it has started; return how it has ended."""
    process.join(END_S if has_ended else 1.0)
    is_late = process.is_alive()
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return "took too long and was killed" if is_late else f"its process has ended with status {process.exitcode}"
