"""The thread of a connector to a tier: it runs a mover, and sees to it that the engine learns what has become of its orders.

Owns the thread and its queue. Knows nothing of blocks or embeddings: ``connectors.tier`` and ``connectors.ec`` have a mover
each. The tier's tickets say by a flag that they are done, so that while one is open the thread looks again after a moment;
without one it sleeps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from core.log import event
from kvstore.base import LookupTicket

OrderT = TypeVar("OrderT")
ReportT = TypeVar("ReportT")
OrderT_contra = TypeVar("OrderT_contra", contravariant=True)
ReportT_co = TypeVar("ReportT_co", covariant=True)

POLL_S = 0.0005  # while a ticket is open

_log = logging.getLogger(__name__)


class TransferLogic(Protocol[OrderT_contra, ReportT_co]):
    """What moves something to a tier and back, without a thread of its own. It never waits."""

    @property
    def is_waiting(self) -> bool:
        """True if a ticket is open."""
        ...

    def submit(self, order: OrderT_contra, /) -> None:
        """Take an order."""
        ...

    def step(self) -> bool:
        """Do what can be done now; False if there is nothing, or everything waits for the tier."""
        ...

    def take_reports(self) -> Sequence[ReportT_co]:
        """Return what has ended since the last call."""
        ...

    def close(self) -> None:
        """Give back what is held; nothing is reported any more."""
        ...


class TierThread(Generic[OrderT, ReportT]):
    """Runs a mover. ``report`` gets what has ended, ``wakeup`` is called when a watched ticket is done, both in the thread.

    ``on_death`` is called from the thread if it ends by a bug of ours.
    """

    def __init__(
        self,
        mover: TransferLogic[OrderT, ReportT],
        report: Callable[[ReportT], None],
        wakeup: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._mover = mover
        self._report = report
        self._wakeup = wakeup
        self._on_death = on_death
        self._submitted: deque[OrderT] = deque()
        self._watched: deque[LookupTicket] = deque()
        self._has_news = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)

    def start(self) -> None:
        """Start the thread. The mover belongs to it from now on."""
        self._thread.start()

    def submit(self, order: OrderT) -> None:
        """Queue an order. What there is to move bounds the queue. Any thread."""
        self._submitted.append(order)
        self._has_news.set()

    def watch(self, ticket: LookupTicket) -> None:
        """Wake the engine once the ticket is done. Any thread."""
        self._watched.append(ticket)
        self._has_news.set()

    def stop(self) -> None:
        """End the thread after the copy that it makes. Blocks until then; call it once."""
        self._is_stopping = True
        self._has_news.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception as error:
            _log.exception(event("tier_thread_died", error=error))
            self._on_death(error)
        finally:
            self._mover.close()

    def _turn(self) -> None:
        self._has_news.clear()
        while self._submitted:
            self._mover.submit(self._submitted.popleft())
        has_progress = self._mover.step()
        for report in self._mover.take_reports():
            self._report(report)
        self._wake_for_tickets()
        if not has_progress:
            self._has_news.wait(POLL_S if self._mover.is_waiting or self._watched else None)

    def _wake_for_tickets(self) -> None:
        num_done = 0
        for _ in range(len(self._watched)):
            ticket = self._watched.popleft()
            if ticket.is_done:
                num_done += 1
            else:
                self._watched.append(ticket)
        if num_done:
            self._wakeup()
