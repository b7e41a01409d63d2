"""A worker's membership at one router: register until accepted, heartbeat, detect that the router is gone or was replaced.

Owns the times of registrations and heartbeats; a router of another wire version is asked again with growing pauses. Several
addresses may lead to one router: the first link whose registration it answers is in use, and the others are *spare*, without
heartbeats, until that one is lost. A spare link registers now and then, since its address may lead to another router by then.
Knows nothing of sockets and requests: ``core.worker.state`` sends the messages, and aborts the requests of a lost router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

from core.wire.messages import Registered
from core.wire.version import RetryBackoff

REGISTER_INTERVAL_S = 0.2
DEFAULT_TIMEOUT_S = 5.0
_SPARE_INTERVALS = 10  # of heartbeats: from one registration by a spare link to the next
_LEAST_SHARE = 0.25  # of the interval of heartbeats: an early one leaves no sooner after the one before


class MembershipDuty(Enum):
    """The message that is due at a router."""

    NOTHING = "nothing"
    REGISTER = "register"
    HEARTBEAT = "heartbeat"


class RouterMembership:
    """The membership at one router address. ``router_id`` is that of the process that answered last, "" without one.

    ``spare_of`` is the id of the router to which another link in use leads as well; "" if the link is not spare. ``takeover``
    is the number of the worker's takeover by which this link came into use, 0 without one. The id of a router that was lost is
    kept until the next answer: if another process answers, that router's late requests end.
    """

    def __init__(self, now: float) -> None:
        self.router_id = ""
        self.spare_of = ""
        self.takeover = 0
        self._last_spare_of = ""
        self._last_router_id = ""  # of the process whose requests may be here; "" if there can be none
        self._interval_s = REGISTER_INTERVAL_S
        self._timeout_s = DEFAULT_TIMEOUT_S
        self._heard_at = now
        self._due_at = now
        self._sent_at = now
        self._early_at = math.inf  # of a heartbeat between two regular ones
        self._refusal = ""
        self._other_version = RetryBackoff()

    @property
    def is_registered(self) -> bool:
        """True while the router has this worker in its membership, and this link is in use."""
        return bool(self.router_id)

    def on_registered(self, message: Registered, now: float) -> bool:
        """Process the router's answer; returns True if it replaces another router process, which is gone then.

        That process may have been lost before, because it was silent.
        """
        has_changed = self._last_router_id not in ("", message.router_id)
        was_registered = self.is_registered
        self.router_id = self._last_router_id = message.router_id
        self.spare_of = ""
        self._refusal = ""
        self._interval_s = max(0.01, message.heartbeat_interval_ms / 1e3)
        self._timeout_s = max(self._interval_s, message.heartbeat_timeout_ms / 1e3)
        self._heard_at = now
        if not was_registered:
            self._due_at = now + self._interval_s
        return has_changed

    @property
    def heard_at(self) -> float:
        """When the last frame came."""
        return self._heard_at

    def set_aside(self, now: float) -> bool:
        """Do not use this link, since its router has just answered and another link in use leads there too.

        Returns True if that is new and should be logged.
        """
        is_news = self.router_id != self._last_spare_of
        self.spare_of = self._last_spare_of = self.router_id
        self.router_id = ""
        self._due_at = now + self._pause_s()
        return is_news

    def take_over(self, now: float) -> None:
        """Use this spare link from now on: the one in use is lost, and the router knows the worker. A heartbeat is due."""
        self.router_id, self.spare_of = self.spare_of, ""
        self._heard_at = self._due_at = now

    def on_refused(self, reason: str, now: float) -> bool:
        """Register again at the usual pace after the router refused this worker or did not know it.

        Returns True if the reason is new and should be logged.
        """
        is_news = reason != self._refusal
        self._refusal = reason
        self.router_id = self._last_router_id = self.spare_of = ""
        self._heard_at = now
        self._due_at = now + REGISTER_INTERVAL_S
        return is_news

    @property
    def refusal(self) -> str:
        """Why the router that answers here does not take this worker in; empty if it does, or has not answered."""
        return "it has another wire version" if self._other_version.is_active else self._refusal

    def on_other_version(self, now: float) -> bool:
        """The router speaks another wire version, so it does not know this worker; returns True the first time."""
        self.router_id = self._last_router_id = self.spare_of = ""
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

        Call it when ``next_timer`` says so. If that time is long past, this worker was stopped, and the router's
        messages may be unread, so the pause does not count as the router's silence.
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
        """Return the message that is due now, and plan the next one."""
        is_due = now >= self._due_at
        if not is_due and not (self.is_registered and now >= self._early_at):
            return MembershipDuty.NOTHING
        self._sent_at, self._early_at = now, math.inf
        if is_due:
            self._due_at = now + self._pause_s()
        return MembershipDuty.HEARTBEAT if self.is_registered else MembershipDuty.REGISTER

    def _pause_s(self) -> float:
        if self.is_registered or self.spare_of:
            return self._interval_s * (_SPARE_INTERVALS if self.spare_of else 1)
        return self._other_version.next_delay_s() if self._other_version.is_active else REGISTER_INTERVAL_S

    def hurry(self, now: float) -> None:
        """Make the next message due at once, because the worker's state has changed, as at the start of a drain."""
        if not self.spare_of:
            self._due_at = now

    def send_early(self, now: float) -> None:
        """Send a heartbeat before the next regular one: the worker has got a prompt of another router."""
        self._early_at = min(self._early_at, max(now, self._sent_at + _LEAST_SHARE * self._interval_s))

    def next_timer(self) -> float:
        """Return when this link needs attention next."""
        return min(self._due_at, self._early_at, self._heard_at + self._timeout_s) if self.is_registered else self._due_at


def place_of(membership: RouterMembership, every: Iterable[RouterMembership]) -> tuple[int, int]:
    """Return the place of a router among those that have taken the worker in, in the order of their ids, and their number."""
    routers = sorted({each.router_id for each in (membership, *every) if each.is_registered})
    return (routers.index(membership.router_id), len(routers)) if membership.is_registered else (0, 1)


def send_early(memberships: Iterable[RouterMembership], now: float) -> None:
    """Let some routers hear soon of a prompt of another router."""
    for membership in memberships:
        membership.send_early(now)
