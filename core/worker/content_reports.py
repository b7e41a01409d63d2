"""When this worker reports its prefix cache to each router: soon after a change, before each heartbeat, and after registering.

Owns the times; ``core.kv.content_feed`` owns what is reported. A change is reported at most ``REPORT_INTERVAL_S`` later while
the engine puts out tokens, else with the next heartbeat.
"""

from __future__ import annotations

from core.kv.content_feed import ContentFeed
from core.wire.messages import Registered
from core.worker.actions import Send

REPORT_INTERVAL_S = 0.2  # between two reports to a router


class ContentReports:
    """The reports to all routers that take them. Without a feed there are none."""

    def __init__(self, feed: ContentFeed | None) -> None:
        self._feed = feed
        self._due_at: dict[str, float] = {}  # by link: when the next report may leave

    def on_registered(self, link: str, message: Registered, now: float, *, is_new: bool) -> list[Send]:
        """Begin with a snapshot at a router that has newly taken this worker in; send one again if it needs one."""
        if self._feed is None:
            return []
        if not message.takes_contents:
            self.stop(link)
            return []
        if is_new or link not in self._due_at:
            self._feed.start(link, takes_parts=message.takes_parts)
            self._due_at[link] = now
        elif message.needs_snapshot:
            self._feed.request_snapshot(link)
        else:
            return []
        return self.take(link, now)

    def stop(self, link: str) -> None:
        """Report no more to a router that has not taken this worker in. Idempotent."""
        if self._feed is not None and self._due_at.pop(link, None) is not None:
            self._feed.stop(link)

    def num_sent(self, link: str) -> int:
        """Return how many reports a router should have."""
        return self._feed.num_sent(link) if self._feed is not None else 0

    def take(self, link: str, now: float) -> list[Send]:
        """Return the news for one router."""
        if self._feed is None or link not in self._due_at:
            return []
        self._due_at[link] = now + REPORT_INTERVAL_S
        return [Send(link, report) for report in self._feed.take_reports(link)]

    def take_due(self, now: float) -> list[Send]:
        """Return the news for all routers whose last report is old enough."""
        return [report for link, due_at in list(self._due_at.items()) if due_at <= now for report in self.take(link, now)]

    def next_timer(self) -> float | None:
        """Return when a report is due; None without news."""
        if self._feed is None:
            return None
        return min((due_at for link, due_at in self._due_at.items() if self._feed.has_news(link)), default=None)
