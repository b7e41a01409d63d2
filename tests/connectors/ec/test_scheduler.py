"""The scheduler side by itself: what it orders, whom it lets wait, and when it gives up."""

from __future__ import annotations

import pytest

from connectors.ec.chunks import ChunkLayout, num_chunks
from connectors.ec.jobs import ChunksFreed, FetchEnded, FetchingReports, PeerSource, StoreSource
from connectors.ec.scheduler import FetchingScheduler
from connectors.p2p.transport.interface import PeerId
from connectors.testing.ec_engine import NamedImage
from core.ec_connector import EmbeddingsLayout
from core.errors import EncoderInputMissing, ProtocolError
from core.request import ECConnectorOutput, NewRequest, Request, RequestStatus, SchedulerOutput
from core.testing.clock import FakeClock
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams

LAYOUT = ChunkLayout(EmbeddingsLayout(8, "float32"), b"model")
LOST = ErrorInfo(code="peer_lost", message="it is gone", http_status=502)
CORRUPT = ErrorInfo(code="digest", message="a wrong byte", http_status=502)
A, B = NamedImage("a"), NamedImage("b", 128)


class Desk:
    """A scheduler side whose orders are all checked. Sources are named: "owner/lease"."""

    def __init__(self, num_chunks=8, locate=None, is_consumer=True):
        self.clock = FakeClock()
        self.scheduler = FetchingScheduler("test", self.clock, 10.0, locate or peer_of, is_consumer=is_consumer)
        self.scheduler.bind(LAYOUT, num_chunks)

    def orders(self):
        return self.scheduler.build_connector_meta(SchedulerOutput())

    def ask(self, request, num_computed_tokens=0):
        return self.scheduler.ensure_cache_available(request, num_computed_tokens)

    def end(self, image, error=None, quarantined=(), was_aborted=False):
        ended = FetchEnded(image.identifier, error, tuple(quarantined), was_aborted)
        self.tell(ended)

    def tell(self, *reports):
        self.scheduler.update_connector_output(ECConnectorOutput(worker_meta=FetchingReports(list(reports))))


@pytest.fixture
def desk():
    return Desk()


def source(image, name):
    return ECSource(
        seal=LAYOUT.seal(image.identifier, image.num_embeds, 1),
        connector="test",
        engine_id="encoder",
        incarnation=1,
        lease_ms=1000,
        payload=name.encode(),
    )


def peer_of(feature, announced):
    if announced is None:
        return None
    owner, _, lease = announced.payload.decode().partition("/")
    return PeerSource(PeerId(owner, 1), lease, tuple(range(num_chunks(feature.num_embeds))), ())


def request_of(name, images, sources=(), *, has_images=True, deadline=None):
    features, offset = [], 0
    for index, image in enumerate(images):
        features.append(
            MMFeature(
                identifier=image.identifier,
                offset=offset,
                length=image.num_embeds,
                num_embeds=image.num_embeds,
                media_index=index,
            )
        )
        offset += image.num_embeds
    new = NewRequest(
        request_id=name,
        prompt_token_ids=[0] * (offset + 1),
        sampling=SamplingParams(max_tokens=1),
        mm_features=features,
        media=[b"file"] * len(images) if has_images else [],
        ec_sources=sources,
        deadline=deadline,
    )
    return Request(new, None)


def test_a_request_without_images_is_never_looked_at(desk):
    assert desk.ask(request_of("r", []))
    assert not desk.orders().has_orders


def test_a_producer_fetches_nothing():
    desk = Desk(is_consumer=False)
    assert desk.ask(request_of("r", [A], [source(A, "e/1")]))
    assert not desk.orders().has_orders


def test_first_question_starts_fetches_of_all_and_holds_their_leases(desk):
    request = request_of("r", [A, B], [source(A, "e/1"), source(B, "e/2")])
    assert not desk.ask(request)
    orders = desk.orders()
    assert [fetch.identifier for fetch in orders.fetches] == [A.identifier, B.identifier]
    assert [list(fetch.chunks) for fetch in orders.fetches] == [[0], [1, 2]]
    assert [held.transfer_id for held in orders.holds] == ["1", "2"]
    assert orders.wake_at == desk.clock.now() + 10
    assert not desk.ask(request)
    assert not desk.orders().has_orders


def test_lease_is_released_once_its_fetch_is_over(desk):
    request = request_of("r", [A], [source(A, "e/1")])
    desk.ask(request)
    desk.orders()
    desk.end(A)
    assert [released.transfer_id for released in desk.orders().releases] == ["1"]
    assert desk.ask(request)
    assert desk.scheduler.has_cache_item(A.identifier)
    desk.scheduler.request_finished(request)
    assert desk.orders().releases == []
    assert not desk.scheduler.has_cache_item(A.identifier), "it may be evicted at any time from now on"


def test_it_asks_for_a_step_once_when_an_item_that_is_here_can_be_loaded_again(desk):
    first, second = request_of("r", [A], [source(A, "e/1")]), request_of("s", [A, B], [source(B, "e/2")])
    desk.ask(first)
    desk.orders()
    desk.end(A)
    desk.scheduler.request_finished(first)
    desk.orders()
    assert not desk.ask(second)
    assert desk.orders().wake_at == desk.clock.now()
    assert not desk.ask(second)
    assert desk.orders().wake_at == desk.clock.now() + 10


def test_it_asks_for_a_step_while_it_has_orders_even_without_requests(desk):
    request = request_of("r", [A], [source(A, "e/1")])
    desk.ask(request)
    desk.orders()
    desk.scheduler.request_finished(request)
    desk.orders()
    assert not desk.scheduler.has_pending_push_work()
    desk.end(A, was_aborted=True)
    assert desk.scheduler.has_pending_push_work()
    assert [released.transfer_id for released in desk.orders().releases] == ["1"]
    assert not desk.scheduler.has_pending_push_work()


def test_what_is_allocated_is_loaded(desk):
    request = request_of("r", [A], [source(A, "e/1")])
    desk.ask(request)
    desk.orders()
    desk.end(A)
    desk.ask(request)
    desk.scheduler.update_state_after_alloc(request, 0)
    (load,) = desk.orders().loads
    assert (load.identifier, list(load.chunks)) == (A.identifier, [0])
    request.status = RequestStatus.RUNNING
    assert desk.ask(request)
    assert desk.scheduler.num_wanted_chunks == 0


def test_leases_of_a_request_that_never_asked_are_released(desk):
    desk.scheduler.request_finished(request_of("r", [A, B], [source(A, "e/1"), source(B, "e/2")]))
    orders = desk.orders()
    assert [released.transfer_id for released in orders.releases] == ["1", "2"]
    assert orders.holds == []


def test_only_the_fetch_without_waiting_requests_is_aborted(desk):
    first = request_of("first", [A, B], [source(A, "e/1"), source(B, "e/2")])
    second = request_of("second", [A], [source(A, "e/3")])
    desk.ask(first)
    desk.ask(second)
    desk.orders()
    desk.scheduler.request_finished(first)
    orders = desk.orders()
    assert orders.aborts == [B.identifier]
    assert orders.releases == [], "a lease is needed until its fetch is over"
    desk.end(B, was_aborted=True, quarantined=[2])
    desk.end(A)
    assert sorted(released.transfer_id for released in desk.orders().releases) == ["1", "2"]
    assert desk.ask(second)
    assert [released.transfer_id for released in desk.orders().releases] == ["3"]
    assert desk.scheduler.num_quarantined_chunks == 1
    desk.tell(ChunksFreed((2,)))
    assert desk.scheduler.num_quarantined_chunks == 0


def test_image_that_is_asked_for_while_its_fetch_is_aborted_is_fetched_again(desk):
    first = request_of("first", [A], [source(A, "e/1")])
    desk.ask(first)
    desk.orders()
    desk.scheduler.request_finished(first)
    second = request_of("second", [A], [source(A, "e/2")])
    assert not desk.ask(second)
    assert desk.orders().fetches == []
    desk.end(A, was_aborted=True)
    assert not desk.ask(second)
    assert [fetch.source.transfer_id for fetch in desk.orders().fetches] == ["2"]


def test_abort_that_comes_too_late_does_not_hit_the_next_fetch(desk):
    first = request_of("first", [A], [source(A, "e/1")])
    desk.ask(first)
    desk.orders()
    desk.scheduler.request_finished(first)
    desk.end(A, CORRUPT)
    desk.ask(request_of("second", [A], [source(A, "e/2")]))
    orders = desk.orders()
    assert [fetch.source.transfer_id for fetch in orders.fetches] == ["2"]
    assert orders.aborts == []


def test_failed_fetch_is_computed_where_the_image_is_here(desk):
    request = request_of("r", [A], [source(A, "e/1")])
    desk.ask(request)
    desk.end(A, CORRUPT)
    assert desk.ask(request)
    assert not desk.scheduler.has_cache_item(A.identifier)
    assert desk.scheduler.take_unavailable_requests() == {}
    assert desk.scheduler.counts == {"digest": 1}


def test_failed_fetch_without_the_image_ends_that_request_alone(desk):
    lost = request_of("lost", [A], [source(A, "e/1")], has_images=False)
    other = request_of("other", [B], [source(B, "e/2")], has_images=False)
    desk.ask(lost)
    desk.ask(other)
    desk.end(A, CORRUPT)
    desk.end(B)
    assert not desk.ask(lost)
    assert desk.ask(other)
    unavailable = desk.scheduler.take_unavailable_requests()
    assert list(unavailable) == ["lost"]
    assert unavailable["lost"].code == EncoderInputMissing.code
    assert "a wrong byte" in unavailable["lost"].message
    assert not desk.ask(lost), "it is let through after all"
    assert desk.scheduler.take_unavailable_requests() == {}


def test_the_error_says_that_nothing_holds_the_embeddings(desk):
    desk.ask(request_of("r", [A], [], has_images=False))
    assert "no worker and no store holds them" in desk.scheduler.take_unavailable_requests()["r"].message


def test_another_source_is_tried_unless_its_owner_is_gone(desk):
    requests = [request_of(name, [A], [source(A, f"{name}/1")]) for name in ("e", "f")]
    same_owner = request_of("same", [A], [source(A, "e/2")])
    for request in (*requests, same_owner):
        assert not desk.ask(request)
    desk.orders()
    desk.end(A, LOST)
    assert [released.transfer_id for released in desk.orders().releases] == ["1", "2"]
    assert desk.ask(same_owner), "the owner is dead"
    assert desk.ask(requests[0])
    assert not desk.ask(requests[1])
    assert [fetch.source.owner.address for fetch in desk.orders().fetches] == ["f"]


def test_corrupt_bytes_of_one_lease_say_nothing_of_another(desk):
    first, second = (request_of(lease, [A], [source(A, f"e/{lease}")]) for lease in "12")
    desk.ask(first)
    desk.ask(second)
    desk.orders()
    desk.end(A, CORRUPT)
    assert not desk.ask(second)
    assert [fetch.source.transfer_id for fetch in desk.orders().fetches] == ["2"]


def test_store_that_lacks_an_item_is_asked_once_for_all_requests():
    desk = Desk(locate=lambda feature, announced: StoreSource())
    requests = [request_of(name, [A]) for name in "xyz"]
    assert not any(desk.ask(request) for request in requests)
    assert len(desk.orders().fetches) == 1
    desk.end(A, ErrorInfo(code="store_miss", message="no", http_status=500))
    assert all(desk.ask(request) for request in requests)
    assert desk.orders().fetches == []
    assert desk.scheduler.counts == {"store_miss": 1}


@pytest.mark.parametrize(("deadline", "waits_s"), [(None, 10), (1004.0, 4), (5000.0, 10)])
def test_time_is_that_of_the_request_if_it_has_less(desk, deadline, waits_s):
    request = request_of("r", [A], [source(A, "e/1")], deadline=deadline)
    assert not desk.ask(request)
    assert desk.orders().fetches[0].deadline == desk.clock.now() + waits_s
    desk.clock.advance(waits_s - 0.1)
    assert not desk.ask(request)
    desk.clock.advance(0.1)
    assert desk.ask(request)
    assert desk.orders().aborts == [A.identifier]


def test_all_images_of_a_request_share_its_time(desk):
    """The second image finds no room until the first one's owner is through."""
    desk = Desk(num_chunks=2)
    holder = request_of("holder", [A], [source(A, "e/1")])
    waiter = request_of("waiter", [B], [source(B, "e/2")], has_images=False)
    desk.ask(holder)
    assert not desk.ask(waiter)
    assert [fetch.identifier for fetch in desk.orders().fetches] == [A.identifier]
    desk.clock.advance(10)
    assert not desk.ask(waiter)
    assert "deadline" in desk.scheduler.take_unavailable_requests()["waiter"].message


def test_what_is_announced_and_unusable_is_computed_at_once():
    def locate(feature, announced):
        raise ProtocolError("malformed")

    desk = Desk(locate=locate)
    assert desk.ask(request_of("r", [A], [source(A, "e/1")]))
    assert not desk.ask(request_of("lost", [A], [source(A, "e/1")], has_images=False))
    assert "malformed" in desk.scheduler.take_unavailable_requests()["lost"].message
    assert desk.scheduler.counts == {"rejected": 2}


def test_shape_that_is_not_the_one_here_is_computed(desk):
    desk.ask(request_of("r", [A], [source(A, "e/1")]))
    other = NamedImage("a", 63)
    assert desk.ask(request_of("s", [other], [source(other, "e/2")]))


def test_two_images_of_one_content_are_one_item(desk):
    request = request_of("r", [A, A], [source(A, "e/1")])
    assert not desk.ask(request)
    assert len(desk.orders().fetches) == 1
    desk.end(A)
    assert desk.ask(request)
    assert desk.ask(request, num_computed_tokens=A.num_embeds)
    assert desk.scheduler.has_cache_item(A.identifier), "the second one is ahead still"


def test_preempted_request_is_computed_if_its_item_had_to_make_room(desk):
    desk = Desk(num_chunks=2)
    request = request_of("r", [A], [source(A, "e/1")])
    desk.ask(request)
    desk.orders()
    desk.end(A)
    desk.ask(request)
    desk.scheduler.update_state_after_alloc(request, 0)
    request.status = RequestStatus.RUNNING
    other = request_of("s", [B], [source(B, "e/2")])
    assert not desk.ask(other)
    orders = desk.orders()
    assert [fetch.identifier for fetch in orders.fetches] == [B.identifier], "what is loaded makes room"
    assert [load.identifier for load in orders.loads] == [A.identifier]
    assert desk.ask(request), "it has its embeddings as long as it runs"
    request.status = RequestStatus.PREEMPTED
    assert desk.ask(request)
    assert not desk.scheduler.has_cache_item(A.identifier)


# ---- what is in the encoder cache already ----------------------------------------------------------------------------


@pytest.fixture
def cached(desk):
    """The content of the desk's encoder cache."""
    identifiers = set()
    desk.scheduler.bind_encoder_cache(identifiers.__contains__)
    return identifiers


def test_what_is_in_the_encoder_cache_is_not_fetched_again_and_its_lease_ends(desk, cached):
    cached.add(A.identifier)
    request = request_of("r", [A, B], [source(A, "e/1"), source(B, "e/2")])
    assert not desk.ask(request)
    orders = desk.orders()
    assert [fetch.identifier for fetch in orders.fetches] == [B.identifier]
    assert [released.transfer_id for released in orders.releases] == ["1"]
    desk.end(B)
    assert desk.ask(request)


def test_what_is_in_the_encoder_cache_needs_neither_image_nor_source_nor_time(desk, cached):
    cached.add(A.identifier)
    request = request_of("r", [A], has_images=False, deadline=desk.clock.now())
    assert desk.ask(request)
    assert desk.scheduler.take_unavailable_requests() == {}


def test_an_item_that_no_worker_can_compute_is_fetched_if_the_encoder_cache_loses_it(desk, cached):
    cached.add(A.identifier)
    request = request_of("r", [A], [source(A, "e/1")], has_images=False)
    assert desk.ask(request)
    assert desk.orders().releases == []
    cached.clear()
    assert not desk.ask(request)
    assert [fetch.identifier for fetch in desk.orders().fetches] == [A.identifier]


def test_a_request_that_hits_the_encoder_cache_does_not_wait_for_a_fetch(desk, cached):
    assert not desk.ask(request_of("first", [A], [source(A, "e/1")]))
    cached.add(A.identifier)
    assert desk.ask(request_of("second", [A]))
