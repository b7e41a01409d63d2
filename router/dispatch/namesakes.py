"""Which of several processes with one name may have it: the newest of those that live.

Two processes that replaced each other in turn would lose each other's requests again and again. So a process is refused while a
newer one has the name, or was heard within the heartbeat timeout and has not said goodbye: it may be back in a moment. Then the
older one may have the name again, since otherwise nobody would have it; a newer one still replaces it at once. Newer is who
registered later here for the first time. Pure; times are seconds of the router's clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.dispatch.members import WorkerKey

# Remembered processes, of all names together. One that is forgotten and asks again is taken for the newest. So if more than
# this live and are refused, all of their names change hands again and again.
_MAX_FORMER = 1024


@dataclass(slots=True)
class _Former:
    """A process that was a member. It may be alive until ``until``; -inf if it has left for good, or was not waited for."""

    number: int
    until: float


class Namesakes:
    """The order of the processes of each name, of those that are members and of those that were."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_seen = 0
        self._holders: dict[str, int] = {}  # by engine_id: the number of the member
        self._former: dict[WorkerKey, _Former] = {}  # heard last, or left last, last

    def join(self, key: WorkerKey) -> None:
        """The process has its name from now on; one that was never seen before is the newest."""
        former = self._former.pop(key, None)
        if former is None:
            self._num_seen += 1
            self._holders[key.engine_id] = self._num_seen
            return
        self._holders[key.engine_id] = former.number
        for newer in self._newer_than(key, former.number):
            newer.until = -math.inf

    def leave(self, key: WorkerKey, last_seen: float, *, is_orderly: bool) -> None:
        """The process that has its name is lost, replaced, or has said goodbye."""
        until = -math.inf if is_orderly else last_seen + self._timeout_s
        self._former[key] = _Former(self._holders.pop(key.engine_id), until)
        while len(self._former) > _MAX_FORMER:
            del self._former[next(iter(self._former))]

    def will_not_return(self, key: WorkerKey) -> None:
        """The process that was a member has said goodbye: nobody waits for it."""
        former = self._former.get(key)
        if former is not None:
            former.until = -math.inf

    def must_wait(self, key: WorkerKey, now: float, *, is_settling: bool) -> bool:
        """A process without the name asks for it: return True if a newer one has it, or may come back to it.

        While the router ``is_settling`` after a pause of its own, messages of a newer one may be unread. A process that must
        wait is alive, so those that are older still must wait for it in turn.
        """
        former = self._former.get(key)
        if former is None or not self._has_newer(key, former.number, now, is_settling=is_settling):
            return False
        del self._former[key]
        self._former[key] = _Former(former.number, now + self._timeout_s)
        return True

    def _has_newer(self, key: WorkerKey, number: int, now: float, *, is_settling: bool) -> bool:
        holder = self._holders.get(key.engine_id)
        if holder is not None:
            return number < holder
        newer = [each.until for each in self._newer_than(key, number)]
        return any(now < until or (is_settling and until > -math.inf) for until in newer)

    def _newer_than(self, key: WorkerKey, number: int) -> list[_Former]:
        same_name = [former for other, former in self._former.items() if other.engine_id == key.engine_id]
        return [former for former in same_name if former.number > number]
