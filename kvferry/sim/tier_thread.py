"""The thread of a mover (``connectors.tier.thread``) under virtual time: a queue of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from connectors.tier.thread import TransferLogic
from kvferry.sim.host import Host
from kvferry.sim.loop import Queue
from kvstore.base import LookupTicket

OrderT = TypeVar("OrderT")
ReportT = TypeVar("ReportT")

POLL_S = 0.005  # of the thread while it waits; the real one polls more often


class SimTierThread(Generic[OrderT, ReportT]):
    """Runs a mover, once it has started. ``wakeup`` is called when a watched ticket is done."""

    def __init__(self, host: Host, wakeup: Callable[[], None]) -> None:
        self._host = host
        self._wakeup = wakeup
        self._watched: list[LookupTicket] = []
        self._to_thread = Queue(host.process, host.loop, host.thread_delay_s)
        self._is_turn_planned = False
        self._is_poll_planned = False

    def start(self, mover: TransferLogic[OrderT, ReportT], report: Callable[[ReportT], None]) -> None:
        """Run this mover. ``report`` gets its results."""
        self._mover = mover
        self._report = report

    @property
    def has_news(self) -> bool:
        """True if a watched ticket is done that the engine does not know yet."""
        return any(ticket.is_done for ticket in self._watched)

    def submit(self, order: OrderT) -> None:
        """Queue an order."""

        def take() -> None:
            self._host.log("moves", order)
            self._mover.submit(order)
            self._turn()

        self._to_thread.put(take)

    def watch(self, ticket: LookupTicket) -> None:
        """Wake the engine once the ticket is done."""
        self._watched.append(ticket)
        self.plan_turn()

    def plan_turn(self) -> None:
        """Poll soon for changes."""
        if not self._is_turn_planned:
            self._is_turn_planned = True
            self._to_thread.put(self._turn_as_planned)

    def _turn_as_planned(self) -> None:
        self._is_turn_planned = False
        self._turn()

    def _turn(self) -> None:
        has_progress = self._mover.step()
        for report in self._mover.take_reports():
            self._host.log("reports", report)
            self._report(report)
        if self.has_news:
            self._watched = [ticket for ticket in self._watched if not ticket.is_done]
            self._wakeup()
        if has_progress:
            self.plan_turn()
        elif self._mover.is_waiting and not self._is_poll_planned:
            self._is_poll_planned = True
            self._host.process.call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        """Poll again, as the thread does while a ticket is open: retries and deadlines depend on time alone."""
        self._is_poll_planned = False
        self.plan_turn()
