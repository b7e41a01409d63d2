"""A worker's membership at one router: register until accepted, heartbeat, notice that the router is gone or another one.

Owns when what is sent to the router; one of another wire version is asked again less and less often. Knows nothing of sockets
and of the requests that came by it: ``core.worker.state`` sends what is asked for here, and aborts the requests of a
router that was lost.
"""

from __future__ import annotations

from enum import Enum

from core.wire.messages import Registered
from core.wire.version import RetryBackoff

REGISTER_INTERVAL_S = 0.2
DEFAULT_TIMEOUT_S = 5.0


class MembershipDuty(Enum):
    """What a link has to do at a moment."""

    NOTHING = "nothing"
    REGISTER = "register"
    HEARTBEAT = "heartbeat"


class RouterMembership:
    """What is known of one router address. ``router_id`` is that of the process that answered last, "" if none does."""

    def __init__(self, now: float) -> None:
        self.router_id = ""
        self._interval_s = REGISTER_INTERVAL_S
        self._timeout_s = DEFAULT_TIMEOUT_S
        self._heard_at = now
        self._due_at = now
        self._refusal = ""
        self._other_version = RetryBackoff()

    @property
    def is_registered(self) -> bool:
        """True while the router has this worker in its membership."""
        return bool(self.router_id)

    def on_registered(self, message: Registered, now: float) -> bool:
        """Take the router's answer; returns True if another router process answered before, which is gone then."""
        has_changed = self.is_registered and message.router_id != self.router_id
        was_registered = self.is_registered
        self.router_id = message.router_id
        self._refusal = ""
        self._interval_s = max(0.01, message.heartbeat_interval_ms / 1e3)
        self._timeout_s = max(self._interval_s, message.heartbeat_timeout_ms / 1e3)
        self._heard_at = now
        if not was_registered:
            self._due_at = now + self._interval_s
        return has_changed

    def on_refused(self, reason: str, now: float) -> bool:
        """Register again at the usual pace; the router does not know this worker, or does not take it.

        Returns True if the reason is news, worth a line in the log.
        """
        is_news = reason != self._refusal
        self._refusal = reason
        self.router_id = ""
        self._heard_at = now
        self._due_at = now + REGISTER_INTERVAL_S
        return is_news

    def on_other_version(self, now: float) -> bool:
        """The router speaks another wire version, so it does not know this worker; returns True if that is news."""
        self.router_id = ""
        self._heard_at = now
        is_news = self._other_version.start()
        if is_news:
            self._due_at = now + self._other_version.next_delay_s()
        return is_news

    def on_heard(self, now: float) -> None:
        """Any frame in our version proves that the router lives, and understands this worker."""
        self._heard_at = now
        self._other_version.end()

    def lose_if_silent(self, now: float) -> bool:
        """Forget a router that has been silent for its timeout; returns True at the moment of losing it.

        Call it when ``next_timer`` says so. If that was some time ago this worker stood still: what the router said meanwhile
        may lie unread, and is no silence of its.
        """
        if not self.is_registered:
            return False
        self._heard_at = min(now, self._heard_at + max(0.0, now - self._due_at))
        if now < self._heard_at + self._timeout_s:
            return False
        self.router_id = ""
        self._due_at = now
        return True

    def take_duty(self, now: float) -> MembershipDuty:
        """Return what is due now, and plan the next time."""
        if now < self._due_at:
            return MembershipDuty.NOTHING
        self._due_at = now + self._pause_s()
        return MembershipDuty.HEARTBEAT if self.is_registered else MembershipDuty.REGISTER

    def _pause_s(self) -> float:
        if self.is_registered:
            return self._interval_s
        return self._other_version.next_delay_s() if self._other_version.is_active else REGISTER_INTERVAL_S

    def hurry(self, now: float) -> None:
        """Make the next duty due at once: the worker has news, such as that it drains."""
        self._due_at = now

    def next_timer(self) -> float:
        """Return when this link needs attention next."""
        return min(self._due_at, self._heard_at + self._timeout_s) if self.is_registered else self._due_at
