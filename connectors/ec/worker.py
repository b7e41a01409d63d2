"""The worker side of EC connectors: copies from host memory to the encoder cache, and offers embeddings in the encoder cache.

Owns the queue of other threads' reports, and the last check of a fetched item: its bytes against its announced seal. Never
blocks and decides nothing. ``submit`` gets the orders of each step, ``offer`` the computed embeddings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from connectors.ec.chunks import RowsDigester
from connectors.ec.jobs import Fetch, FetchEnded, FetchingMetadata, FetchingReports, Report
from core.ec_connector import ECConnectorWorker, EmbeddingsLayout
from core.errors import CorruptBlock, EngineDead
from core.request import ECConnectorMetadata, ECConnectorOutput
from core.wire.media import ECSource
from core.wire.messages import ErrorInfo

if TYPE_CHECKING:
    from torch import Tensor

ToBytes = Callable[["Tensor"], memoryview]
ToTensor = Callable[[memoryview, EmbeddingsLayout], "Tensor"]


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """The end of an offer: other workers can read the embeddings now, or cannot."""

    identifier: bytes
    source: ECSource | None = None
    error: ErrorInfo | None = None


class Offers(Protocol):
    """Offers embeddings that were computed here to other workers. Called on the engine thread."""

    def has_room(self, num_embeds: int) -> bool:
        """Return True if an offer of so many rows would not be refused now."""
        ...

    def offer(self, identifier: bytes, num_embeds: int, rows: memoryview) -> OfferEnded | None:
        """Copy the rows; the caller may reuse them when this returns. None = the end is reported later."""
        ...

    def find(self, identifier: bytes) -> ECSource | None:
        """Return where the embeddings can be read, with a new lease; None if they are gone."""
        ...

    def on_step(self) -> None:
        """Process reports of other threads. Called often."""
        ...


class FetchingWorker(ECConnectorWorker):
    """Both directions. ``bind`` sets the memory once the shape of the embeddings is known; ``offers`` None: no producer."""

    def __init__(self, to_bytes: ToBytes, to_tensor: ToTensor, on_layout: Callable[[EmbeddingsLayout], None]) -> None:
        self._to_bytes = to_bytes
        self._to_tensor = to_tensor
        self._on_layout = on_layout
        self._layout: EmbeddingsLayout | None = None
        self._rows: Callable[[int, int], memoryview] = _no_rows
        self._submit: Callable[[FetchingMetadata], None] = _no_submit
        self._offers: Offers | None = None
        self._wakeup: Callable[[], None] = _no_wakeup
        self._digester = RowsDigester()
        self._reports: deque[Report | OfferEnded] = deque()
        self._fetches: dict[bytes, Fetch] = {}
        self._output = ECConnectorOutput()
        self._death: BaseException | None = None

    def bind(
        self,
        rows: Callable[[int, int], memoryview],
        submit: Callable[[FetchingMetadata], None],
        offers: Offers | None = None,
    ) -> None:
        """Set the memory. ``rows(first_chunk, num_embeds)`` are bytes in the host memory."""
        self._rows, self._submit, self._offers = rows, submit, offers

    # ---- the engine's calls ------------------------------------------------------------------------------------------

    def register_caches(self, layout: EmbeddingsLayout) -> None:
        """Set the shape of the embeddings."""
        self._layout = layout
        self._on_layout(layout)

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the function that wakes an idle engine."""
        self._wakeup = wakeup

    def start_load_caches(self, encoder_cache: MutableMapping[bytes, Tensor], metadata: ECConnectorMetadata) -> None:
        """Copy the complete items, then pass the step's orders on."""
        assert isinstance(metadata, FetchingMetadata)
        assert self._layout is not None, "register_caches comes before any step"
        for load in metadata.loads:
            content = self._rows(load.chunks.start, load.num_embeds)
            encoder_cache[load.identifier] = self._to_tensor(content, self._layout)
            self._output.finished_loading.add(load.identifier)
        self._fetches.update((fetch.identifier, fetch) for fetch in metadata.fetches)
        if metadata.has_orders or metadata.wake_at is not None:
            self._submit(metadata)

    def save_caches(self, encoder_cache: Mapping[bytes, Tensor], identifier: bytes) -> None:
        """Offer embeddings that were computed just now."""
        if self._offers is None:
            return
        rows = encoder_cache[identifier]
        self._offers.on_step()
        ended = self._offers.offer(identifier, rows.shape[0], self._to_bytes(rows))
        if ended is not None:
            self._reports.append(ended)

    def has_room(self, num_embeds: int) -> bool:
        """Return True if embeddings of so many rows can be offered now."""
        if self._offers is None:
            return True
        self._offers.on_step()
        return self._offers.has_room(num_embeds)

    def find_source(self, identifier: bytes) -> ECSource | None:
        """Return where embeddings that were offered earlier can be read, with a new lease; None if they are gone."""
        if self._offers is None:
            return None
        self._offers.on_step()
        return self._offers.find(identifier)

    def get_finished(self, finished_req_ids: set[str]) -> ECConnectorOutput:
        """Drain the reports.

        Raises:
            EngineDead: a part of the connector outside the engine thread has ended; requests may still wait for it.
        """
        if self._death is not None:
            raise EngineDead(f"the EC connector has died: {self._death!r}")
        if self._offers is not None:
            self._offers.on_step()
        output, self._output = self._output, ECConnectorOutput()
        fetched = FetchingReports()
        while self._reports:
            report = self._reports.popleft()
            if isinstance(report, OfferEnded):
                _add_offer(output, report)
            else:
                fetched.reports.append(self._checked(report) if isinstance(report, FetchEnded) else report)
        if fetched.reports:
            output.worker_meta = fetched
        return output

    # ---- reports, from any thread ------------------------------------------------------------------------------------

    def report(self, report: Report | OfferEnded) -> None:
        """Queue a report and wake the engine."""
        self._reports.append(report)
        self._wakeup()

    def wake(self) -> None:
        """Wake the engine: a request has used up its time."""
        self._wakeup()

    def fail(self, error: BaseException) -> None:
        """Make the next step raise."""
        self._death = error
        self._wakeup()

    def _checked(self, ended: FetchEnded) -> FetchEnded:
        """Check fetched rows against the announced seal, if there is one."""
        fetch = self._fetches.pop(ended.identifier)
        if ended.error is not None or ended.was_aborted or fetch.seal is None:
            return ended
        try:
            self._digester.check(self._rows(fetch.chunks.start, fetch.num_embeds), fetch.seal)
        except CorruptBlock as error:
            return FetchEnded(ended.identifier, ErrorInfo.of(error))
        return ended


def _add_offer(output: ECConnectorOutput, ended: OfferEnded) -> None:
    if ended.source is not None:
        output.finished_saving[ended.identifier] = ended.source
    elif ended.error is not None:
        output.failed_saving[ended.identifier] = ended.error


def _no_rows(first_chunk: int, num_embeds: int) -> memoryview:
    raise AssertionError("the connector has not started")


def _no_submit(metadata: FetchingMetadata) -> None:
    """Ignore orders before the start and after the stop; deadlines end the waits."""


def _no_wakeup() -> None:
    """Stand in until ``set_wakeup``."""
