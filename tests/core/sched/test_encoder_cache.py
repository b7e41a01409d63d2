from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.request import NewRequest, Request
from core.sched.encoder_cache import EncoderCacheManager
from core.testing.hash_encoder import Image, lay_out
from core.wire.sampling import SamplingParams

BUDGET = 1000


def request_with(request_id: str, *images: Image) -> Request:
    token_ids, features, media = lay_out(images)
    new = NewRequest(
        request_id=request_id, prompt_token_ids=token_ids, sampling=SamplingParams(), mm_features=features, media=media
    )
    return Request(new, None)


CAT, DOG, OWL = Image(b"cat", 4), Image(b"dog", 4), Image(b"owl", 4)


@pytest.fixture
def cache() -> EncoderCacheManager:
    return EncoderCacheManager(cache_size=10)


def put(cache: EncoderCacheManager, request: Request, index: int = 0) -> None:
    assert not cache.check_and_update_cache(request, index)
    assert cache.can_allocate(request, index, BUDGET, 0)
    cache.allocate(request, index)


def test_an_item_is_a_hit_for_other_requests_while_it_is_in_use_and_afterwards(cache):
    first, second, third = (request_with(name, CAT) for name in "abc")
    put(cache, first)
    assert cache.check_and_update_cache(second, 0)
    cache.free(first)
    cache.free(second)
    assert cache.check_and_update_cache(third, 0)
    assert cache.take_freed_identifiers() == []


def test_an_item_without_references_stays_until_its_room_is_needed(cache):
    for name, image in (("a", CAT), ("b", DOG)):
        put(cache, request := request_with(name, image))
        cache.free(request)
    assert cache.num_free_slots == 2
    assert cache.num_freeable_slots == 10
    put(cache, request_with("c", OWL))
    assert cache.take_freed_identifiers() == [CAT.identifier]
    assert cache.identifiers == {DOG.identifier, OWL.identifier}


def test_evicts_the_first_released_item_first(cache):
    first, second = request_with("a", CAT), request_with("b", DOG)
    put(cache, first)
    put(cache, second)
    cache.free(second)
    cache.free(first)
    put(cache, request_with("c", OWL))
    assert cache.take_freed_identifiers() == [DOG.identifier]


def test_a_hit_in_between_makes_an_item_the_last_to_go(cache):
    first, second = request_with("a", CAT), request_with("b", DOG)
    for request in (first, second):
        put(cache, request)
        cache.free(request)
    cache.check_and_update_cache(first, 0)
    cache.free(first)
    put(cache, request_with("c", OWL))
    assert cache.take_freed_identifiers() == [DOG.identifier]


def test_what_is_referred_to_is_never_evicted(cache):
    put(cache, request_with("a", CAT))
    put(cache, request_with("b", DOG))
    assert not cache.can_allocate(request_with("c", OWL), 0, BUDGET, 0)
    assert cache.take_freed_identifiers() == []


def test_counts_what_is_going_to_be_allocated_together(cache):
    request = request_with("a", CAT, DOG, OWL)
    assert cache.can_allocate(request, 1, BUDGET, 4)
    assert not cache.can_allocate(request, 2, BUDGET, 8)


def test_an_item_above_the_compute_budget_waits_even_if_there_is_room(cache):
    assert not cache.can_allocate(request_with("a", CAT), 0, 3, 0)
    assert cache.can_allocate(request_with("a", CAT), 0, 4, 0)


def test_item_twice_in_a_prompt_takes_room_once_and_stays_until_both_are_done(cache):
    request = request_with("a", CAT, CAT)
    put(cache, request)
    assert cache.check_and_update_cache(request, 1)
    assert cache.num_free_slots == 6
    cache.free_encoder_input(request, 0)
    assert cache.num_freeable_slots == 6
    cache.free_encoder_input(request, 1)
    assert cache.num_freeable_slots == 10


def test_letting_go_twice_changes_nothing(cache):
    request = request_with("a", CAT)
    put(cache, request)
    cache.free_encoder_input(request, 0)
    cache.free_encoder_input(request, 0)
    cache.free(request)
    assert (cache.num_free_slots, cache.num_freeable_slots) == (6, 10)


def test_does_not_name_as_freed_what_has_come_back_since(cache):
    put(cache, first := request_with("a", CAT))
    put(cache, second := request_with("b", DOG))
    cache.free(first)
    put(cache, third := request_with("c", OWL))  # evicts the cat
    cache.free(second)
    cache.free(third)
    put(cache, first)  # evicts the dog
    assert cache.take_freed_identifiers() == [DOG.identifier]
    assert cache.take_freed_identifiers() == []


def test_forgets_what_the_worker_lacks_despite_references(cache):
    first, second = request_with("a", CAT, CAT), request_with("b", CAT)
    put(cache, first)
    cache.check_and_update_cache(first, 1)
    cache.check_and_update_cache(second, 0)
    cache.forget(CAT.identifier)
    cache.forget(CAT.identifier)
    assert (cache.num_free_slots, cache.num_freeable_slots) == (10, 10)
    assert not cache.holder_ids
    assert not cache.check_and_update_cache(second, 0)
    assert cache.take_freed_identifiers() == []


# ---- against a model -------------------------------------------------------------------------------------------------

IMAGES = [Image(b"image %d" % number, 1 + number % 4) for number in range(8)]


class CacheMachine(RuleBasedStateMachine):
    """Requests take and release images in any order. The model: the holders of each image, and the order of releases."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCacheManager(cache_size=8)
        self.requests: list[Request] = []
        self.held: dict[tuple[str, int], Image] = {}
        self.images: dict[str, tuple[Image, ...]] = {}
        self.unused: list[Image] = []  # the longest unused first
        self.worker: set[bytes] = set()  # what the worker holds

    @rule(numbers=st.lists(st.integers(0, len(IMAGES) - 1), min_size=1, max_size=4))
    def add(self, numbers):
        images = tuple(IMAGES[number] for number in numbers)
        request = request_with(f"r{len(self.images)}", *images)
        self.requests.append(request)
        self.images[request.request_id] = images

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), budget=st.integers(0, 6), num_before=st.integers(0, 6))
    def take(self, data, budget, num_before):
        request, index = self._draw(data)
        image = self.images[request.request_id][index]
        is_hit = image in self.held.values() or image in self.unused
        assert self.cache.check_and_update_cache(request, index) == is_hit
        if not is_hit:
            num_used = sum(image.num_embeds for image in set(self.held.values()))
            fits = image.num_embeds <= budget and num_used + num_before + image.num_embeds <= 8
            assert self.cache.can_allocate(request, index, budget, num_before) == fits
            if not fits:
                return
            num_unused = 8 - num_used - num_before - image.num_embeds
            while sum(image.num_embeds for image in self.unused) > num_unused:
                self.unused.pop(0)
            self.cache.allocate(request, index)
            self.worker.add(image.identifier)
        if image in self.unused:
            self.unused.remove(image)
        self.held[request.request_id, index] = image

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def let_go(self, data):
        request, index = self._draw(data)
        self.cache.free_encoder_input(request, index)
        self._let_go(request.request_id, index)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        for index in self.cache.get_cached_input_ids(request):
            self._let_go(request.request_id, index)
        self.cache.free(request)

    @rule(number=st.integers(0, len(IMAGES) - 1))
    def lose(self, number):
        image = IMAGES[number]
        self.cache.forget(image.identifier)
        self.held = {key: held for key, held in self.held.items() if held != image}
        self.unused = [unused for unused in self.unused if unused != image]
        self.worker.discard(image.identifier)

    @rule()
    def step(self):
        freed = self.cache.take_freed_identifiers()
        assert len(freed) == len(set(freed))
        self.worker -= set(freed)
        assert self.worker == self.cache.identifiers

    def _draw(self, data) -> tuple[Request, int]:
        request = data.draw(st.sampled_from(self.requests))
        return request, data.draw(st.integers(0, len(request.mm_features) - 1))

    def _let_go(self, request_id: str, index: int) -> None:
        image = self.held.pop((request_id, index), None)
        if image is not None and image not in self.held.values():
            self.unused.append(image)

    @invariant()
    def accounts_add_up(self):
        num_used = sum(image.num_embeds for image in set(self.held.values()))
        num_unused = sum(image.num_embeds for image in self.unused)
        assert self.cache.num_freeable_slots == 8 - num_used
        assert self.cache.num_free_slots == 8 - num_used - num_unused >= 0
        assert self.cache.identifiers == {image.identifier for image in (*self.held.values(), *self.unused)}
        assert self.cache.usage == pytest.approx(num_used / 8)
        assert set(self.cache.holder_ids) == {request_id for request_id, _ in self.held}


TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)
TestCacheMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
