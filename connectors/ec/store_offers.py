"""The embeddings that a worker has put into the shared store, as far as it knows, and those on their way there.

Owns the copies that wait to be stored, within a bound, and the list of stored items. Used on the engine thread; the
mover's thread reports the ends of orders. Knows no store: it only gives orders to the mover.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np

from connectors.ec.chunks import ChunkLayout, num_chunks
from connectors.ec.mover import CheckStored, Forgotten, Order, SaveEmbeddings, StoreReport
from connectors.ec.worker import FetchingWorker, OfferEnded
from core.errors import Full
from core.wire.media import ECSource
from core.wire.messages import ErrorInfo

MAX_REMEMBERED = 4096  # embeddings that a worker knows to be in the store


class StoreOffers:
    """The items that this worker has put into the store and remembers. ``submit`` gets the orders for the mover."""

    def __init__(self, layout: ChunkLayout, max_bytes: int, submit: Callable[[Order], None]) -> None:
        self._layout = layout
        self._max_bytes = max_bytes
        self._submit = submit
        self._stored: OrderedDict[bytes, ECSource] = OrderedDict()
        self._saving: dict[bytes, int] = {}  # identifier → bytes
        self._reports: deque[OfferEnded | Forgotten] = deque()

    @property
    def num_saving_bytes(self) -> int:
        """Bytes of copies that are on their way to the store. Any thread."""
        return sum(list(self._saving.values()))

    def has_room(self, num_embeds: int) -> bool:
        """Return True if a copy of so many rows may wait to be stored."""
        return self.num_saving_bytes + self._num_bytes(num_embeds) <= self._max_bytes

    def offer(self, identifier: bytes, num_embeds: int, rows: memoryview) -> OfferEnded | None:
        """Copy the rows and order their save. If an earlier copy is on its way, that one counts."""
        if identifier in self._saving:
            return None
        if not self.has_room(num_embeds):
            error = Full(f"{self.num_saving_bytes} bytes of embeddings are on their way to the store already")
            return OfferEnded(identifier, error=ErrorInfo.of(error))
        num_bytes = self._num_bytes(num_embeds)
        content = np.zeros(num_bytes, dtype=np.uint8)
        content[: rows.nbytes] = np.frombuffer(rows, dtype=np.uint8)
        self._saving[identifier] = num_bytes
        self._submit(SaveEmbeddings(identifier, num_embeds, content.data))
        return None

    def find(self, identifier: bytes) -> ECSource | None:
        """Return the place of an item, if it is known; and have the store checked for the next answer."""
        source = self._stored.get(identifier)
        if source is not None:
            self._stored.move_to_end(identifier)
            self._submit(CheckStored(source.seal))
        return source

    def on_step(self) -> None:
        """Process the mover's reports."""
        while self._reports:
            report = self._reports.popleft()
            if isinstance(report, Forgotten):
                self._stored.pop(report.identifier, None)
                continue
            self._saving.pop(report.identifier, None)
            if report.source is not None:
                self._stored[report.identifier] = report.source
                if len(self._stored) > MAX_REMEMBERED:
                    self._stored.popitem(last=False)

    def _num_bytes(self, num_embeds: int) -> int:
        return num_chunks(num_embeds) * self._layout.chunk_bytes

    def on_report(self, report: OfferEnded | Forgotten) -> None:
        """Report the end of an order. Any thread."""
        self._reports.append(report)


def pass_on(report: StoreReport, offers: StoreOffers, worker: FetchingWorker) -> None:
    """Pass on a mover's report, except the end of a forget, which concerns no request. Any thread."""
    if isinstance(report, (OfferEnded, Forgotten)):
        offers.on_report(report)
    if not isinstance(report, Forgotten):
        worker.report(report)
