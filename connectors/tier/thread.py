"""The thread of a connector to a tier: runs a ``TransferLogic`` and reports its results to the engine.

Owns the thread and its queue, and knows no blocks or embeddings: ``connectors.tier`` and ``connectors.ec`` each have their own
logic. Tickets of a tier set a flag when they are done, so the thread polls while a ticket is open, and sleeps otherwise.
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
    """Transfers to and from a tier, without a thread. No method waits."""

    @property
    def is_waiting(self) -> bool:
        """True if a ticket is open."""
        ...

    def submit(self, order: OrderT_contra, /) -> None:
        """Accept an order."""
        ...

    def step(self) -> bool:
        """Do one piece of work; False if there is none, or all of it waits for the tier."""
        ...

    def take_reports(self) -> Sequence[ReportT_co]:
        """Return the results since the last call."""
        ...

    def close(self) -> None:
        """Release everything held; nothing is reported after this."""
        ...


class TierThread(Generic[OrderT, ReportT]):
    """Runs a logic. The thread passes results to ``report``, and calls ``wakeup`` when a watched ticket is done.

    ``on_death`` is called from the thread if a bug ends it.
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
        self._wakeup_event = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)

    def start(self) -> None:
        """Start the thread. Only the thread may call the logic from now on."""
        self._thread.start()

    def submit(self, order: OrderT) -> None:
        """Queue an order. The number of blocks bounds the queue. Any thread."""
        self._submitted.append(order)
        self._wakeup_event.set()

    def watch(self, ticket: LookupTicket) -> None:
        """Wake the engine once the ticket is done. Any thread."""
        self._watched.append(ticket)
        self._wakeup_event.set()

    def stop(self) -> None:
        """End the thread after its current copy. Blocks until then; call it once."""
        self._is_stopping = True
        self._wakeup_event.set()
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
        self._wakeup_event.clear()
        while self._submitted:
            self._mover.submit(self._submitted.popleft())
        has_progress = self._mover.step()
        for report in self._mover.take_reports():
            self._report(report)
        self._wake_for_tickets()
        if not has_progress:
            self._wakeup_event.wait(POLL_S if self._mover.is_waiting or self._watched else None)

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
