"""The scheduler side of EC connectors that fetch embeddings: it starts fetches, delays requests, and gives up in time.

Owns the chunk cache of the worker's host memory. An item is fetched when a request first needs it, once for all requests that
need it, and is kept until the last of them has computed past it. This module knows no transports, stores or memory: ``locate``
returns where an item may be, and the worker side moves it. It does no I/O and never waits.

    asked ──▶ no source ────────────────────────────────┐
      │                                                 ▼
      └─▶ fetched ──▶ here ──▶ loaded      given up ──▶ the image is at hand: computed here
             └──▶ failed, or its time is over ──▲  └──▶ it is not: the request alone ends with an error

Each request has one time budget for all its embeddings, counted from its first call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from connectors.ec.chunk_cache import CachedChunk, ChunkCache
from connectors.ec.chunks import ChunkLayout, num_chunks
from connectors.ec.jobs import (
    CacheLoad,
    ChunksFreed,
    Fetch,
    FetchEnded,
    FetchingMetadata,
    FetchingReports,
    PeerSource,
    Source,
)
from core.clock import Clock
from core.ec_connector import ECConnectorScheduler
from core.errors import (
    EncoderInputMissing,
    Full,
    KVFerryError,
    LayoutMismatch,
    PeerUnreachable,
    TransferTimeout,
    fallback_reason,
)
from core.request import ECConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo

_OWNER_IS_GONE = frozenset({PeerUnreachable.code, TransferTimeout.code})

Locate = Callable[[MMFeature, ECSource | None], Source | None]  # may raise KVFerryError: what was announced is unusable


@dataclass(slots=True)
class _Wishes:
    """The items that a request needs, by identifier. ``sources`` may still be tried; their leases are renewed.

    ``failures`` are the reasons of failed fetches. Items in ``given_up`` are computed here, or the request fails without them.
    ``loaded`` are in the encoder cache for it, as long as it runs.
    """

    deadline: float
    wanted: dict[bytes, None] = field(default_factory=dict)  # in the order in which they were asked for
    sources: dict[bytes, Source] = field(default_factory=dict)
    failures: dict[bytes, ErrorInfo] = field(default_factory=dict)
    given_up: set[bytes] = field(default_factory=set)
    loaded: set[bytes] = field(default_factory=set)
    is_waiting: bool = False
    is_lost: bool = False


class FetchingScheduler(ECConnectorScheduler):
    """Decides for a worker that reads embeddings; sources name the connector that they are for, and must name ``connector``.

    With ``is_consumer`` False nothing is fetched. ``bind`` sets the layout, before the first request.
    """

    def __init__(self, connector: str, clock: Clock, deadline_s: float, locate: Locate, *, is_consumer: bool = True) -> None:
        self._connector = connector
        self._clock = clock
        self._deadline_s = deadline_s
        self._locate = locate
        self._is_consumer = is_consumer
        self._layout: ChunkLayout | None = None
        self._chunk_cache = ChunkCache(0)
        self._is_cached: Callable[[bytes], bool] = lambda identifier: False
        self._wishes: dict[str, _Wishes] = {}
        self._fetches: dict[bytes, Source] = {}  # of items that are being filled
        self._ending: set[bytes] = set()  # of those, the ones whose fetch was aborted
        self._unavailable: dict[str, ErrorInfo] = {}
        self._metadata = FetchingMetadata()
        self.counts: Counter[str] = Counter()  # outcomes of fetches: "ok", "aborted", or the reason of the failure

    def bind_encoder_cache(self, holds: Callable[[bytes], bool]) -> None:
        """Set the predicate for items that are in the encoder cache and need no fetch."""
        self._is_cached = holds

    def bind(self, layout: ChunkLayout, num_chunks: int) -> None:
        """Set the chunk layout and the number of chunks."""
        self._layout = layout
        self._chunk_cache = ChunkCache(num_chunks)

    # ---- gauges, for any thread ----------------------------------------------------------------------------------------

    @property
    def num_fetching_items(self) -> int:
        """Number of items being fetched."""
        return len(self._fetches)

    @property
    def num_wanted_chunks(self) -> int:
        """Number of chunks that are being filled or kept for requests."""
        return self._chunk_cache.num_wanted_chunks

    @property
    def num_quarantined_chunks(self) -> int:
        """Number of chunks that an aborted transfer may still write."""
        return self._chunk_cache.num_quarantined_chunks

    @property
    def num_waiting_requests(self) -> int:
        """Number of requests whose last call returned False."""
        return sum(wishes.is_waiting for wishes in list(self._wishes.values()))

    # ---- calls of the scheduler --------------------------------------------------------------------------------------

    def has_cache_item(self, identifier: bytes) -> bool:
        """True if the item is in the chunk cache and a request owns it."""
        item = self._chunk_cache.get(identifier)
        return item is not None and item.is_here and bool(item.wanted_by)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Start the fetches of all features that end after ``num_computed_tokens``; False while one is in flight."""
        if not self._is_consumer or not request.mm_features:
            return True
        wishes = self._wishes.get(request.request_id)
        if wishes is None:
            wishes = self._wishes[request.request_id] = self._begin(request)
        if request.status is not RequestStatus.RUNNING:
            wishes.loaded.clear()
        ahead = {feature.identifier: feature for feature in request.mm_features if feature.end > num_computed_tokens}
        self._let_go(request, wishes, [identifier for identifier in wishes.wanted if identifier not in ahead])
        lacking = [feature for identifier, feature in ahead.items() if identifier not in wishes.loaded]
        is_there = [self._admit(request, wishes, feature) for feature in lacking]
        wishes.is_waiting = not all(is_there)
        if wishes.is_waiting:
            self._metadata.wake_at = min(self._metadata.wake_at or math.inf, wishes.deadline)
        return not wishes.is_waiting

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Load an item that is complete here; other items are computed.

        The loaded item may be evicted from then on, as the worker side loads before it fetches, except if no worker could
        compute it if it were needed again.
        """
        identifier = request.mm_features[index].identifier
        wishes = self._wishes.get(request.request_id)
        item = self._chunk_cache.get(identifier)
        if item is None or not self.has_cache_item(identifier):
            if wishes is not None:
                self._give_up(request, wishes, identifier)
            return
        self._metadata.loads.append(CacheLoad(identifier, item.num_embeds, item.chunks))
        if wishes is not None:
            wishes.loaded.add(identifier)
            if request.has_media(index):
                self._let_go(request, wishes, [identifier])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FetchingMetadata:
        """Return the orders of the step."""
        metadata, self._metadata = self._metadata, FetchingMetadata()
        return metadata

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Apply the reports of ended fetches."""
        if not isinstance(output.worker_meta, FetchingReports):
            return
        for report in output.worker_meta.reports:
            if isinstance(report, ChunksFreed):
                self._chunk_cache.unquarantine(report.chunks)
            else:
                self._on_fetch_ended(report)

    def request_finished(self, request: Request) -> None:
        """Release every item and lease of the request, including announced leases that were never used."""
        wishes = self._wishes.pop(request.request_id, None)
        if wishes is None and self._is_consumer and request.ec_sources:
            wishes = _Wishes(deadline=0.0)
            self._find_sources(request, wishes)
        if wishes is not None:
            self._let_go(request, wishes, list(wishes.wanted))
            self._release(wishes.sources.values())
        self._unavailable.pop(request.request_id, None)

    def take_unavailable_requests(self) -> Mapping[str, ErrorInfo]:
        """Return the requests that lack an item whose image is not at hand."""
        unavailable, self._unavailable = self._unavailable, {}
        return unavailable

    def has_pending_push_work(self) -> bool:
        """True while orders wait for a step: a fetch may end when no request is left, and its lease has to end, too."""
        return self._metadata.has_orders

    # ---- one item ----------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> _Wishes:
        """Register a request: its leases are renewed and its time budget starts."""
        deadline = self._clock.now() + self._deadline_s
        wishes = _Wishes(deadline if request.deadline is None else min(deadline, request.deadline))
        self._find_sources(request, wishes)
        self._metadata.holds += [source for source in wishes.sources.values() if isinstance(source, PeerSource)]
        for failure in wishes.failures.values():
            self.counts[fallback_reason(failure.code)] += 1
        return wishes

    def _find_sources(self, request: Request, wishes: _Wishes) -> None:
        """Find the sources of the request's items. An announced source that is unusable counts as failed."""
        for feature in {feature.identifier: feature for feature in request.mm_features}.values():
            try:
                source = self._source_of(request, feature)
            except KVFerryError as error:
                wishes.failures[feature.identifier] = ErrorInfo.of(error)
                continue
            if source is not None:
                wishes.sources[feature.identifier] = source

    def _source_of(self, request: Request, feature: MMFeature) -> Source | None:
        assert self._layout is not None, "register_caches comes before the first request"
        announced = self._announced(request, feature.identifier)
        if announced is not None:
            self._layout.check_seal(announced.seal, feature)
        return self._locate(feature, announced)

    def _announced(self, request: Request, identifier: bytes) -> ECSource | None:
        announced = request.ec_sources.get(identifier)
        return announced if announced is not None and announced.connector == self._connector else None

    def _admit(self, request: Request, wishes: _Wishes, feature: MMFeature) -> bool:
        """Return True if the request need not wait for a feature: it is here, or will be computed."""
        identifier = feature.identifier
        if wishes.is_lost or identifier in wishes.given_up:
            return not wishes.is_lost
        item = self._chunk_cache.get(identifier)
        if item is not None and item.num_embeds != feature.num_embeds:
            mismatch = LayoutMismatch(f"embeddings of {item.num_embeds} rows are here, of {feature.num_embeds} are needed")
            return self._give_up(request, wishes, identifier, mismatch)
        if item is not None and item.is_here:
            if not item.wanted_by:  # earlier requests that have given it up can load it from the next step on
                self._metadata.wake_at = self._clock.now()
            self._want(request, wishes, item)
            if isinstance(wishes.sources.get(identifier), PeerSource):
                self._release_of(wishes, identifier)
            return True
        if self._is_cached(identifier):
            if _has_image(request, identifier):  # else it is fetched if it has to make room before the request refers to it
                self._release_of(wishes, identifier)
            return True
        if self._clock.now() >= wishes.deadline:
            return self._give_up(request, wishes, identifier, TransferTimeout("they are not here at the deadline"))
        if item is None:
            return self._begin_fetch(request, wishes, feature)
        if identifier not in self._ending:
            self._want(request, wishes, item)
        return False

    def _begin_fetch(self, request: Request, wishes: _Wishes, feature: MMFeature) -> bool:
        """Start a fetch if there is a source and room; True if the request need not wait."""
        identifier, wanted_chunks = feature.identifier, num_chunks(feature.num_embeds)
        source = wishes.sources.get(identifier)
        if source is None:
            return self._give_up(request, wishes, identifier)
        if wanted_chunks > self._chunk_cache.num_chunks:
            error = Full(f"{feature.num_embeds} rows do not fit ec_connector.memory_bytes")
            self.counts[fallback_reason(error.code)] += 1
            return self._give_up(request, wishes, identifier, error)
        item = self._chunk_cache.reserve(identifier, feature.num_embeds, wanted_chunks)
        if item is None:
            return False
        announced = self._announced(request, identifier)
        seal = announced.seal if announced is not None and isinstance(source, PeerSource) else None
        self._metadata.fetches.append(Fetch(identifier, feature.num_embeds, item.chunks, source, wishes.deadline, seal))
        self._fetches[identifier] = source
        if isinstance(source, PeerSource):
            del wishes.sources[identifier]  # the fetch keeps its lease from now on
        self._want(request, wishes, item)
        return False

    def _on_fetch_ended(self, ended: FetchEnded) -> None:
        source = self._fetches.pop(ended.identifier)
        if ended.identifier in self._ending:
            self._ending.remove(ended.identifier)
            if ended.identifier in self._metadata.aborts:  # not sent yet: it would hit the next fetch of this item
                self._metadata.aborts.remove(ended.identifier)
        self._release([source])
        item = self._chunk_cache.get(ended.identifier)
        assert item is not None, "a fetch has its place on the chunk_cache until it is over"
        self.counts["aborted" if ended.was_aborted else fallback_reason(ended.error.code) if ended.error else "ok"] += 1
        if ended.error is None and not ended.was_aborted:
            self._chunk_cache.settle(item)
            return
        for request_id in sorted(item.wanted_by):
            self._note_failure(self._wishes[request_id], ended, source)
        self._chunk_cache.drop(item, ended.quarantined)

    def _note_failure(self, wishes: _Wishes, ended: FetchEnded, failed: Source) -> None:
        """Record a failed fetch; the request tries its next source, unless that would fail for the same reason."""
        identifier = ended.identifier
        wishes.wanted.pop(identifier, None)
        if ended.error is None:
            return
        wishes.failures[identifier] = ended.error
        own = wishes.sources.get(identifier)
        if own is not None and _is_as_bad(own, failed, ended.error):
            self._release_of(wishes, identifier)

    # ---- wants and leases --------------------------------------------------------------------------------------------

    def _want(self, request: Request, wishes: _Wishes, item: CachedChunk) -> None:
        wishes.wanted[item.identifier] = None
        self._chunk_cache.want(item, request.request_id)

    def _let_go(self, request: Request, wishes: _Wishes, identifiers: Sequence[bytes]) -> None:
        """Remove the request from the owners of these items; a fetch without owners is aborted."""
        for identifier in identifiers:
            wishes.wanted.pop(identifier, None)
            item = self._chunk_cache.get(identifier)
            if item is None:
                continue
            self._chunk_cache.unwant(item, request.request_id)
            if not (item.is_here or item.wanted_by or identifier in self._ending):
                self._ending.add(identifier)
                self._metadata.aborts.append(identifier)

    def _give_up(self, request: Request, wishes: _Wishes, identifier: bytes, error: KVFerryError | None = None) -> bool:
        """Stop waiting for an item; True if the request can continue without it, because the image is at hand."""
        wishes.given_up.add(identifier)
        self._let_go(request, wishes, [identifier] if identifier in wishes.wanted else [])
        self._release_of(wishes, identifier)
        if _has_image(request, identifier):
            return True
        failure = wishes.failures.get(identifier)
        known = error or failure
        reason = known.message if known is not None else "no worker and no store holds them"
        missing = EncoderInputMissing(f"the embeddings of an image cannot be had, and the image is not here: {reason}")
        wishes.is_lost = True
        self._unavailable[request.request_id] = ErrorInfo.of(missing)
        return False

    def _release_of(self, wishes: _Wishes, identifier: bytes) -> None:
        """Release the lease that is kept for a request."""
        source = wishes.sources.pop(identifier, None)
        if source is not None:
            self._release([source])

    def _release(self, sources: Iterable[Source]) -> None:
        self._metadata.releases += [source for source in sources if isinstance(source, PeerSource)]


def _has_image(request: Request, identifier: bytes) -> bool:
    features = enumerate(request.mm_features)
    return any(request.has_media(index) for index, feature in features if feature.identifier == identifier)


def _is_as_bad(source: Source, failed: Source, error: ErrorInfo) -> bool:
    """Return True if a source would fail for the same reason as the failed one."""
    if isinstance(source, PeerSource) and isinstance(failed, PeerSource) and error.code in _OWNER_IS_GONE:
        return source.owner == failed.owner
    return source == failed
