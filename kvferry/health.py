"""Replaces processes that hang: requests the health of each, and judges the answers.

Owns when a process counts as hung, and the threads that send the requests. Knows nothing of how processes are ended and started
(``kvferry.processes``). ``HealthJudge`` is pure: answers and times go in, a reason to replace the process comes out. A pause of
the supervisor itself, such as a frozen machine, proves nothing about its children: their earlier silence is forgotten.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar

from core.clock import Clock
from core.log import event
from kvferry.http_get import NoAnswer, get

logger = logging.getLogger(__name__)

_PAUSE_SLACK_S = 2.0  # a check that begins or ends later than this was delayed by the supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """When a process is checked, and when it counts as hung; seconds, and checks in a row."""

    interval_s: float
    timeout_s: float
    max_failures: int
    max_silence_s: float
    max_start_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one check. ``is_silent``: no answer at all; else ``reason`` is "" from a healthy process."""

    reason: str = ""
    is_silent: bool = False


class HealthJudge:
    """Judges the answers of one process; ``started_at`` and all other times are seconds of the supervisor's clock."""

    def __init__(self, limits: HealthLimits, started_at: float, *, has_started: bool = False) -> None:
        self._limits = limits
        self._start_deadline = started_at + limits.max_start_s
        self._has_started = has_started
        self._num_failures = 0
        self._silent_since: float | None = None
        self._last_seen_at: float | None = None

    @property
    def has_started(self) -> bool:
        """True once the process has reported that it is up; until then it may be silent or refuse."""
        return self._has_started

    def judge(self, answer: ProbeResult, asked_at: float, now: float) -> str | None:
        """Process an answer that arrived at ``now``; return why the process must be replaced, or None."""
        paused_s = self._own_pause_s(asked_at, now)
        self._last_seen_at = now
        if paused_s:
            self._start_deadline += paused_s
            self._num_failures, self._silent_since = 0, None
            return None
        if not self._has_started:
            return self._judge_start(answer, now)
        if answer.is_silent:
            if self._silent_since is None:
                self._silent_since = asked_at
            silent_s = now - self._silent_since
            return f"no answer to /health for {silent_s:.0f} s" if silent_s >= self._limits.max_silence_s else None
        self._silent_since = None
        self._num_failures = self._num_failures + 1 if answer.reason else 0
        return answer.reason if self._num_failures >= self._limits.max_failures else None

    def _judge_start(self, answer: ProbeResult, now: float) -> str | None:
        self._has_started = not answer.reason and not answer.is_silent
        if self._has_started or now < self._start_deadline:
            return None
        return f"not started after {self._limits.max_start_s:g} s"

    def _own_pause_s(self, asked_at: float, now: float) -> float:
        """Return how long the supervisor itself was paused around this check; 0 if it was not."""
        late_s = 0.0 if self._last_seen_at is None else asked_at - self._last_seen_at - self._limits.interval_s
        overlong_s = now - asked_at - self._limits.timeout_s
        return sum(delay for delay in (late_s, overlong_s) if delay > _PAUSE_SLACK_S)


class Watched(Protocol):
    """A child process as the watch sees it (``kvferry.processes.Child`` has these fields)."""

    @property
    def pid(self) -> int:
        """The process."""

    started_at: float  # by the supervisor's clock


WatchedT = TypeVar("WatchedT", bound=Watched)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedProcess(Generic[WatchedT]):
    """One process by name: how to find its present process, its health URL, and how to replace it.

    ``question`` returns the URL for a child that has started or has not; "" if there is none.
    """

    name: str
    current: Callable[[], WatchedT | None]
    question: Callable[[WatchedT, bool], str]
    replace: Callable[[WatchedT, str], None]


class HealthWatch(Generic[WatchedT]):
    """Checks each process from a thread of its own, so that a hung process delays no other check.

    ``started_pids`` are processes that are known to have started: they get no start time any more.
    """

    def __init__(
        self,
        processes: Sequence[WatchedProcess[WatchedT]],
        limits: HealthLimits,
        clock: Clock,
        started_pids: Collection[int] = (),
    ) -> None:
        self._limits = limits
        self._started_pids = frozenset(started_pids)
        self._clock = clock
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(process,), name=f"health-{process.name}", daemon=True)
            for process in processes
        ]

    def start(self) -> None:
        """Begin to check."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop checking and replacing; waits for a running check."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, process: WatchedProcess[WatchedT]) -> None:
        pid, judge = 0, None
        while not self._is_stopping.wait(self._limits.interval_s):
            child = process.current()
            if child is None:
                continue
            if judge is None or child.pid != pid:
                pid = child.pid
                judge = HealthJudge(self._limits, child.started_at, has_started=pid in self._started_pids)
            asked_at = self._clock.now()
            answer = self._ask(process.question(child, judge.has_started))
            reason = judge.judge(answer, asked_at, self._clock.now())
            if reason is not None and not self._is_stopping.is_set():
                logger.error(event("unhealthy", child=process.name, pid=child.pid, reason=reason))
                process.replace(child, reason)
                judge = None

    def _ask(self, url: str) -> ProbeResult:
        if not url:
            return ProbeResult(is_silent=True)
        try:
            status, body = get(url, self._limits.timeout_s)
            return ProbeResult() if status == HTTPStatus.OK else ProbeResult(reason=_reason_of(status, body))
        except NoAnswer:
            return ProbeResult(is_silent=True)
        except OSError:  # it closed the connection, so it is alive, if only to limit its connections
            return ProbeResult()
        except Exception as bug:  # a process whose watch has ended would never be judged again
            logger.exception(event("health_check_failed", url=url))
            return ProbeResult(reason=f"its health check failed: {bug!r}")


def _reason_of(status: int, body: str) -> str:
    """Return the ``status`` of an operations port's answer, or the HTTP status where there is none."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return str(found["status"]) if isinstance(found, dict) and "status" in found else f"HTTP {status}"
