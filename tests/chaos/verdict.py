"""The verdict about a run: which errors, pauses, tokens and leftovers are our bugs.

One fault at a time: no error, and no pause of a stream above ``MAX_PAUSE_S`` beyond the time in which the router itself was
frozen. Densely: every error must have a cause: a fault that can produce it and that lasted while the request ran.
Always: no wrong token, flat memory, nothing held at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.local import ROUTER
from tests.chaos.faults import Incident
from tests.chaos.load import Answer
from tests.chaos.watch import Growth

MAX_PAUSE_S = 10.0
AFTER_EFFECT_S = 30.0  # how long a fault that is over may still show in a dense run: a restart under load
MAX_MORE_SHARE = 0.08  # of a process's memory, or
MAX_MORE_BYTES = 48 << 20
MAX_MORE_FDS = 24  # connections that other processes made again
MAX_MORE_THREADS = 4

_ENDS_PROCESSES = frozenset({"kill", "freeze", "hang", "cut", "reset", "drain"})
_STOPS_TRANSFERS = _ENDS_PROCESSES | {"blackhole", "cut-data", "cut-control"}
# code of an error → kinds of faults that can make it
CAUSES: Mapping[str, frozenset[str]] = {
    "no_worker": _ENDS_PROCESSES | {"freeze-router"},
    "overloaded": _ENDS_PROCESSES | {"freeze-router"},
    "peer_lost": _STOPS_TRANSFERS | {"freeze-router"},
    "router_silent": frozenset({"freeze-router", "cut", "freeze"}),
    "deadline_exceeded": _STOPS_TRANSFERS | {"freeze-router"},
}


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest time in which a client got nothing, less what the router was frozen of it."""

    client_id: str
    began_at: float
    duration_s: float
    after_tokens: int


def longest_pause(answer: Answer, frozen: Sequence[tuple[float, float]]) -> Pause:
    """Return the longest pause of an answer, the wait for its first token and for its end included."""
    moments = [answer.started_at, *answer.times, answer.ended_at]
    pauses = [
        Pause(answer.client_id, begin, end - begin - _overlap(begin, end, frozen), index)
        for index, (begin, end) in enumerate(itertools.pairwise(moments))
    ]
    return max(pauses, key=lambda pause: pause.duration_s)


def _overlap(begin: float, end: float, spans: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)


def router_freezes(incidents: Iterable[Incident]) -> list[tuple[float, float]]:
    """Return when the router stood still."""
    return [(each.began_at, each.ended_at) for each in incidents if each.target == ROUTER and each.kind == "freeze-router"]


def uncaused(answers: Iterable[Answer], incidents: Sequence[Incident]) -> list[str]:
    """Return the errors that no fault at work during the request can have made."""
    found = []
    for answer in answers:
        if not answer.error:
            continue
        code = answer.error.split(":")[0].split()[-1]
        kinds = {
            each.kind
            for each in incidents
            if each.began_at <= answer.ended_at and answer.started_at <= max(each.ended_at, each.whole_at) + AFTER_EFFECT_S
        }
        if not CAUSES.get(code, frozenset()) & kinds:
            found.append(f"{answer.client_id}: {answer.error} (faults at the time: {', '.join(sorted(kinds)) or 'none'})")
    return found


def find_growth(growths: Iterable[Growth]) -> list[str]:
    """Return the processes that took more and more."""
    found = []
    for each in growths:
        if each.more_private_bytes > max(MAX_MORE_BYTES, MAX_MORE_SHARE * each.private_bytes):
            more = f"{each.more_private_bytes / 2**20:.0f} MiB"
            found.append(f"{each.name} ({each.pid}) took {more} more after {each.life_s:.0f} s")
        if each.more_fds > MAX_MORE_FDS:
            found.append(f"{each.name} ({each.pid}) had {each.more_fds:g} file descriptors more after {each.life_s:.0f} s")
        if each.more_threads > MAX_MORE_THREADS:
            found.append(f"{each.name} ({each.pid}) had {each.more_threads:g} threads more after {each.life_s:.0f} s")
    return found
