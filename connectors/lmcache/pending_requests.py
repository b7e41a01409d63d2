"""Requests to the server that have no reply yet, each with its deadline, and the actions that gather meanwhile.

Shared by the parts of the node. The server has no error reply: what it fails to handle is never answered, and only time tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from connectors.lmcache.actions import Action, SendToServer, ServerSession
from connectors.lmcache.wire import Namespace
from core.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class LMCacheSettings:
    """Deadlines, in seconds, and what this worker registers."""

    namespace: Namespace
    block_size: int
    windows: tuple[int, ...]  # of the KV cache groups, -1 = full attention
    lookup_timeout_s: float
    request_timeout_s: float
    transfer_deadline_s: float
    heartbeat_interval_s: float
    retry_interval_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    """A request without a reply. A vital one that stays without is a reason to leave the server."""

    deadline: float
    is_vital: bool
    on_reply: Callable[[object], None]
    on_lost: Callable[[], None]
    what: str


class PendingRequests:
    """The requests of one attempt, and the actions that gather. Shared by the parts of the node."""

    def __init__(self, clock: Clock, settings: LMCacheSettings) -> None:
        self.clock = clock
        self.settings = settings
        self.server: ServerSession | None = None
        self.instance_id = 0
        self.attempt = 0
        self.counts: dict[str, int] = {}
        self._actions: list[Action] = []
        self._open: dict[int, _Call] = {}
        self._num_calls = 0

    def act(self, action: Action) -> None:
        """Have something done."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """Return what is to be done since the last time."""
        actions, self._actions = self._actions, []
        return actions

    def count(self, what: str, number: int = 1) -> None:
        """Count an event."""
        self.counts[what] = self.counts.get(what, 0) + number

    def send(
        self,
        frames_of: Callable[[int], list[bytes]],
        on_reply: Callable[[object], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        *,
        what: str,
        timeout_s: float | None = None,
        is_vital: bool = False,
    ) -> None:
        """Send a request; ``frames_of`` makes its frames from its number.

        ``on_reply`` is called at most once, ``on_lost`` if no reply has come in time; neither once the server is left.
        """
        self._num_calls += 1
        timeout = self.settings.request_timeout_s if timeout_s is None else timeout_s
        self._open[self._num_calls] = _Call(
            self.clock.now() + timeout, is_vital, on_reply or _ignore_result, on_lost or _ignore_loss, what
        )
        self.act(SendToServer(self.attempt, frames_of(self._num_calls)))

    def on_reply(self, uid: int, result: object) -> None:
        """Pass a reply to its callback; count a reply after the deadline as late."""
        call = self._open.pop(uid, None)
        if call is None:
            self.count("late_replies")
            return
        call.on_reply(result)

    def next_deadline(self) -> float:
        """Return when the first request has waited too long."""
        return min((call.deadline for call in self._open.values()), default=math.inf)

    def expire(self, now: float) -> str | None:
        """Forget requests that have waited too long; say what a vital one was about, if there is one."""
        vital = None
        for uid in [uid for uid, call in self._open.items() if call.deadline <= now]:
            call = self._open.pop(uid)
            self.count("unanswered_requests")
            if call.is_vital:
                vital = call.what
            else:
                call.on_lost()
        return vital

    def forget(self) -> None:
        """Forget all requests, since the connection is closed."""
        self._open.clear()


def _ignore_result(result: object) -> None:
    """Take a reply that says nothing."""


def _ignore_loss() -> None:
    """Nothing waits for the reply."""
