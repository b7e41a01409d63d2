"""Random histories of the scheduler side: chunks have one use at a time, leases are released once, and every wait ends."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from connectors.ec.chunks import ChunkLayout, num_chunks
from connectors.ec.jobs import ChunksFreed, FetchEnded, FetchingReports, PeerSource, StoreSource
from connectors.ec.scheduler import FetchingScheduler
from connectors.p2p.transport.interface import PeerId
from connectors.testing.ec_engine import NamedImage
from core.ec_connector import EmbeddingsLayout
from core.request import ECConnectorOutput, NewRequest, Request, RequestStatus, SchedulerOutput
from core.testing.clock import FakeClock
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams

LAYOUT = ChunkLayout(EmbeddingsLayout(8, "float32"), b"model")
NUM_CHUNKS = 6
DEADLINE_S = 10.0
IMAGES = [NamedImage(str(number), 64 * (1 + number % 3)) for number in range(5)] + [NamedImage("huge", 64 * 7)]
ERRORS = [ErrorInfo(code=code, message=code, http_status=502) for code in ("peer_lost", "digest", "stale", "store_miss")]


def locate(feature, announced):
    if announced is None:
        return None if feature.identifier[0] % 2 else StoreSource()
    return PeerSource(PeerId(f"peer-{announced.incarnation}", announced.incarnation), announced.payload.decode(), (), ())


class History:
    """A scheduler side, and what the rest of the worker would know."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.scheduler = FetchingScheduler("test", self.clock, DEADLINE_S, locate)
        self.scheduler.bind(LAYOUT, NUM_CHUNKS)
        self.live = {}
        self.asked_at = {}
        self.running = set()
        self.kept = set()  # requests that have run, and not got beyond their images
        self.lost = set()
        self.open = {}  # fetches by identifier
        self.aborted = set()
        self.quarantined = set()
        self.holds, self.releases = Counter(), Counter()
        self.num_requests = 0

    def add(self):
        self.num_requests += 1
        name = f"r{self.num_requests}"
        images = self.random.sample(IMAGES, self.random.randint(1, 3))
        features, sources, offset = [], [], 0
        for index, image in enumerate(images):
            values = {"identifier": image.identifier, "num_embeds": image.num_embeds, "media_index": index}
            features.append(MMFeature(offset=offset, length=image.num_embeds, **values))
            offset += image.num_embeds
            if self.random.random() < 0.7:
                seal = LAYOUT.seal(image.identifier, image.num_embeds, 1)
                holder = {"engine_id": "e", "incarnation": self.random.randint(1, 2), "lease_ms": 1}
                sources.append(ECSource(seal=seal, connector="test", payload=f"{name}/{index}".encode(), **holder))
        media = [b"file" if self.random.random() < 0.7 else b"" for _ in images]
        new = NewRequest(
            request_id=name,
            prompt_token_ids=[0] * (offset + 1),
            sampling=SamplingParams(max_tokens=1),
            mm_features=features,
            media=media,
            ec_sources=sources,
        )
        self.live[name] = Request(new, None)

    def step(self):
        """Ask for all requests, run those that may run, and carry the orders out."""
        for name, request in list(self.live.items()):
            self.asked_at.setdefault(name, self.clock.now())
            is_free = self.scheduler.ensure_cache_available(request, request.num_computed_tokens)
            is_late = self.clock.now() >= self.asked_at[name] + DEADLINE_S
            if is_free and self.random.random() < 0.8:
                self._run(request)
            unavailable = self.scheduler.take_unavailable_requests()
            self.lost |= unavailable.keys()
            assert is_free or not is_late or name in self.lost, "a wait does not end"
            assert not self.kept & unavailable.keys(), "an item that cannot be computed again was not kept"
            for other in unavailable:
                self.finish(other)
        self._carry_out(self.scheduler.build_connector_meta(SchedulerOutput()))

    def _run(self, request):
        for index, feature in enumerate(request.mm_features):
            if feature.end > request.num_computed_tokens and request.request_id not in self.running:
                assert self.scheduler.has_cache_item(feature.identifier) or request.has_media(index)
                self.scheduler.update_state_after_alloc(request, index)
        self.running.add(request.request_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = self.random.choice([request.num_computed_tokens, request.mm_end])
        (self.kept.add if request.num_computed_tokens < request.mm_end else self.kept.discard)(request.request_id)

    def _carry_out(self, orders):
        self.holds.update(source.transfer_id for source in orders.holds)
        loading = {chunk for fetch in self.open.values() for chunk in fetch.chunks}
        for load in orders.loads:
            assert not loading.intersection(load.chunks), "what is loaded is being written"
        for fetch in orders.fetches:
            busy = {chunk for other in self.open.values() for chunk in other.chunks} | self.quarantined
            assert fetch.identifier not in self.open
            assert len(fetch.chunks) == num_chunks(fetch.num_embeds)
            assert not busy.intersection(fetch.chunks), "two transfers write one chunk"
            self.open[fetch.identifier] = fetch
        for identifier in orders.aborts:
            assert identifier in self.open
            self.aborted.add(identifier)
        self.releases.update(source.transfer_id for source in orders.releases)

    def end_fetch(self):
        if not self.open:
            return
        identifier = self.random.choice(sorted(self.open))
        fetch = self.open.pop(identifier)
        error = self.random.choice([None, None, *ERRORS])
        was_aborted = identifier in self.aborted
        self.aborted.discard(identifier)
        late = [chunk for chunk in fetch.chunks if (was_aborted or error) and self.random.random() < 0.3]
        self.quarantined.update(late)
        self._tell(FetchEnded(identifier, None if was_aborted else error, tuple(late), was_aborted))

    def free_quarantine(self):
        freed = [chunk for chunk in sorted(self.quarantined) if self.random.random() < 0.5]
        self.quarantined.difference_update(freed)
        self._tell(ChunksFreed(tuple(freed)))

    def finish(self, name=None):
        if name is None and self.live:
            name = self.random.choice(sorted(self.live))
        if name in self.live:
            self.scheduler.request_finished(self.live.pop(name))
            self.running.discard(name)

    def preempt(self):
        if self.running:
            request = self.live[self.random.choice(sorted(self.running))]
            self.running.discard(request.request_id)
            request.status = RequestStatus.PREEMPTED
            request.num_computed_tokens = 0

    def wait(self):
        self.clock.advance(self.random.choice([0.1, 1.0, 6.0]))

    def _tell(self, report):
        self.scheduler.update_connector_output(ECConnectorOutput(worker_meta=FetchingReports([report])))

    def play(self, num_turns):
        turns = [self.add, self.step, self.step, self.end_fetch, self.free_quarantine, self.finish, self.preempt, self.wait]
        for _ in range(num_turns):
            self.random.choice(turns)()
        for name in list(self.live):
            self.finish(name)
        self._carry_out(self.scheduler.build_connector_meta(SchedulerOutput()))
        while self.open:
            self.end_fetch()
        while self.quarantined:
            self.free_quarantine()
        self._carry_out(self.scheduler.build_connector_meta(SchedulerOutput()))


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_leaked_or_given_to_two(seed):
    history = History(seed)
    history.play(num_turns=400)
    scheduler = history.scheduler
    assert (scheduler.num_wanted_chunks, scheduler.num_quarantined_chunks) == (0, 0)
    assert (scheduler.num_fetching_items, scheduler.num_waiting_requests) == (0, 0)
    assert history.holds <= history.releases, "a lease is kept for ever"
    assert set(history.releases.values()) == {1}, "a lease was released twice"
    assert {"ok", "aborted"} <= scheduler.counts.keys(), "the history shows nothing"
