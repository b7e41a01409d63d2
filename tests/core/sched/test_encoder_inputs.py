from __future__ import annotations

import pytest

from core.errors import EncoderInputMissing, InvalidRequest
from core.request import NewRequest, Request, RequestStatus
from core.testing.hash_encoder import Image
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams

CAT, DOG, OWL = (Image(name, 16) for name in (b"cat", b"dog", b"owl"))


@pytest.fixture
def world(make_world):
    return make_world(encoder_cache_size=64)


@pytest.fixture
def fetching(make_world):
    """A world whose embeddings may come from elsewhere."""
    return make_world(encoder_cache_size=64, with_ec_connector=True)


def run_to_end(world, *requests: Request) -> None:
    world.run()
    for request in requests:
        world.assert_right(request, 4)
    world.assert_clean()


# ---- what a step computes --------------------------------------------------------------------------------------------


def test_embeddings_are_computed_in_the_step_of_their_first_token(make_world):
    world = make_world(encoder_cache_size=64, max_num_batched_tokens=16)
    request = world.add_with_images("a", [24, CAT, 8])
    assert world.schedule().scheduled_encoder_inputs == {}
    world.finish_step()
    assert world.schedule().scheduled_encoder_inputs == {"a": [0]}
    world.finish_step()
    assert world.schedule().scheduled_encoder_inputs == {}
    world.finish_step()
    run_to_end(world, request)


def test_an_image_may_cross_chunk_borders(make_world):
    world = make_world(encoder_cache_size=64, max_num_batched_tokens=7)
    run_to_end(world, world.add_with_images("a", [3, Image(b"cat", 30, row=5), 2, DOG]))
    assert set(world.encoder.num_encoded.values()) == {1}


def test_an_image_beyond_the_compute_budget_cuts_the_tokens_before_it(make_world):
    world = make_world(encoder_cache_size=64, max_embeds_per_step=20)
    request = world.add_with_images("a", [5, CAT, 7, DOG, 3])
    assert world.schedule().num_scheduled_tokens == {"a": 28}
    assert world.last.scheduled_encoder_inputs == {"a": [0]}
    world.finish_step()
    assert world.schedule().scheduled_encoder_inputs == {"a": [1]}
    world.finish_step()
    run_to_end(world, request)


def test_an_image_without_room_waits_until_others_are_done_with_theirs(make_world):
    world = make_world(encoder_cache_size=20, max_num_batched_tokens=24)
    first, second = world.add_with_images("a", [4, CAT, 8]), world.add_with_images("b", [DOG, 8])
    assert world.schedule().num_scheduled_tokens == {"a": 24}
    world.finish_step()
    run_to_end(world, first, second)
    assert world.encoder.cache.keys() == {DOG.identifier}


def test_a_text_request_runs_in_the_step_in_which_an_image_before_it_finds_no_room(make_world):
    world = make_world(encoder_cache_size=16, max_num_batched_tokens=40)
    world.add_with_images("a", [CAT, 8])
    world.add_with_images("b", [DOG, 8])
    world.add_with_images("c", [Image(b"small", 1), 8])
    world.add("d", 10)
    assert world.schedule().num_scheduled_tokens == {"a": 24, "d": 10}  # c must not overtake b
    assert [request.request_id for request in world.scheduler.waiting] == ["b", "c"]
    assert world.scheduler.encoder_cache.holder_ids == ("a",)
    world.finish_step()
    world.run()
    world.assert_clean()


def test_an_image_that_stands_in_two_requests_is_computed_once(world):
    first, second = world.add_with_images("a", [4, CAT, 4]), world.add_with_images("b", [9, CAT, 1])
    assert world.schedule().scheduled_encoder_inputs == {"a": [0]}
    assert len(world.last.num_scheduled_tokens) == 2
    world.finish_step()
    run_to_end(world, first, second)
    assert world.encoder.num_encoded == {CAT.identifier: 1}


def test_an_image_that_stands_twice_in_a_prompt_is_computed_once_and_takes_room_once(make_world):
    world = make_world(encoder_cache_size=16, max_embeds_per_step=16)
    request = world.add_with_images("a", [4, CAT, 4, CAT, 2])
    assert world.schedule().scheduled_encoder_inputs == {"a": [0]}
    world.finish_step()
    run_to_end(world, request)


def test_an_image_that_comes_again_is_not_computed_again(make_world):
    world = make_world(encoder_cache_size=64, enable_caching=False)
    for name in "ab":
        run_to_end(world, world.add_with_images(name, [4, CAT, 4]))
    assert world.encoder.num_encoded == {CAT.identifier: 1}
    assert world.scheduler.make_stats().num_encoder_hits == 1


def test_the_worker_is_told_what_to_delete(make_world):
    world = make_world(encoder_cache_size=32, enable_caching=False)
    for name, image in zip("abc", (CAT, DOG, OWL), strict=True):
        run_to_end(world, world.add_with_images(name, [4, image, 4]))
    assert world.encoder.cache.keys() == {DOG.identifier, OWL.identifier} == world.scheduler.encoder_cache.identifiers


def test_embeddings_are_released_when_their_last_token_is_computed_not_before(make_world):
    world = make_world(encoder_cache_size=64, max_num_batched_tokens=10)
    world.add_with_images("a", [CAT, 20])
    cache = world.scheduler.encoder_cache
    world.step()
    assert cache.holder_ids == ("a",)
    world.schedule()
    assert cache.holder_ids == ("a",)  # scheduled, but not computed
    world.finish_step()
    assert cache.holder_ids == ()
    assert cache.num_freeable_slots == 64


def test_tokens_before_a_prefix_hit_need_no_embeddings(world):
    run_to_end(world, world.add_with_images("a", [4, CAT, 30], text="same"))
    request = world.add_with_images("b", [4, CAT, 30], text="same")
    assert world.schedule().scheduled_encoder_inputs == {}
    assert world.last.num_scheduled_tokens["b"] < 20
    world.finish_step()
    run_to_end(world, request)


def test_another_image_at_the_same_place_is_no_prefix_hit(world):
    run_to_end(world, world.add_with_images("a", [4, CAT, 30], text="same"))
    request = world.add_with_images("b", [4, DOG, 30], text="same")
    assert world.schedule().num_scheduled_tokens == {"b": 50}
    world.finish_step()
    run_to_end(world, request)


def test_a_prefix_hit_that_ends_within_an_image_takes_its_embeddings_again(make_world):
    world = make_world(encoder_cache_size=64, block_size=16)
    run_to_end(world, world.add_with_images("a", [4, Image(b"cat", 40), 2], text="same"))
    request = world.add_with_images("b", [4, Image(b"cat", 40), 2], text="same")
    assert world.schedule().num_scheduled_tokens == {"b": 46 - 32}
    assert world.scheduler.encoder_cache.holder_ids == ("b",)
    world.finish_step()
    run_to_end(world, request)


# ---- requests that can run here --------------------------------------------------------------------------------------


def test_refuses_an_image_that_never_fits(world):
    with pytest.raises(InvalidRequest, match="image 1 takes 65 embeddings, this worker has room for 64") as refused:
        world.add_with_images("a", [CAT, Image(b"large", 65)])
    assert refused.value.param == "images[1]"
    assert not world.scheduler.requests


@pytest.mark.parametrize(
    ("cache_size", "max_per_step", "settings"),
    [
        (16, 64, "scheduler.encoder_cache_embeds"),
        (64, 16, "scheduler.max_num_encoder_embeds"),
        (16, 16, "scheduler.encoder_cache_embeds and scheduler.max_num_encoder_embeds"),
    ],
)
def test_says_which_settings_make_room_for_a_larger_image(make_world, cache_size, max_per_step, settings):
    world = make_world(encoder_cache_size=cache_size, max_embeds_per_step=max_per_step)
    with pytest.raises(InvalidRequest, match=f"room for 16: show a smaller one, or raise {settings}$"):
        world.add_with_images("a", [Image(b"large", 17)])


def test_a_worker_without_an_encoder_refuses_images(make_world):
    with pytest.raises(InvalidRequest, match=r"room for 0$"):
        make_world().add_with_images("a", [CAT])


@pytest.mark.parametrize("change", [{"offset": 10}, {"num_embeds": 17}, {"length": 100}])
def test_refuses_features_that_overlap_or_leave_the_prompt(world, change):
    request = world.add_with_images("a", [CAT, DOG])
    first, second = request.mm_features
    fields = {name: getattr(second, name) for name in second.__struct_fields__} | change
    new = NewRequest(
        request_id="b",
        prompt_token_ids=request.all_token_ids,
        sampling=SamplingParams(),
        mm_features=(first, type(second)(**fields)),
    )
    with pytest.raises(InvalidRequest, match="feature 1"):
        world.scheduler.add_request(Request(new, None))


# ---- embeddings on their way -----------------------------------------------------------------------------------------


def test_a_request_whose_embeddings_are_on_their_way_holds_nothing(fetching):
    fetching.add_with_images("a", [4, CAT, 4])
    fetching.ec.on_the_way.add(CAT.identifier)
    fetching.schedule()
    assert fetching.last.num_scheduled_tokens == {}
    assert fetching.num_used_blocks == 0
    assert fetching.scheduler.encoder_cache.holder_ids == ()
    assert fetching.scheduler.encoder_cache.identifiers == set()
    assert fetching.scheduler.requests["a"].prefill_stats is None
    assert fetching.ec.named("alloc") == []
    fetching.finish_step()


def test_requests_after_it_run_in_the_same_step(fetching):
    waiting, text = fetching.add_with_images("a", [4, CAT, 4]), fetching.add("b", 10)
    other = fetching.add_with_images("c", [DOG])
    fetching.ec.on_the_way.add(CAT.identifier)
    assert fetching.schedule().num_scheduled_tokens == {"b": 10, "c": 16}
    fetching.finish_step()
    fetching.ec.on_the_way.clear()
    run_to_end(fetching, waiting, text, other)


def test_waiting_requests_keep_their_order(fetching):
    requests = [fetching.add_with_images(name, [4, image, 4]) for name, image in zip("abc", (CAT, DOG, CAT), strict=True)]
    text = fetching.add("d", 10)
    fetching.ec.on_the_way |= {CAT.identifier, DOG.identifier}
    for _ in range(3):
        fetching.step()
        assert [request.request_id for request in fetching.scheduler.waiting] == ["a", "b", "c"]
    fetching.ec.on_the_way.remove(CAT.identifier)
    assert list(fetching.schedule().scheduled_encoder_inputs) == ["a"]
    assert [request.request_id for request in fetching.scheduler.waiting] == ["b"]
    fetching.finish_step()
    fetching.ec.on_the_way.clear()
    run_to_end(fetching, *requests, text)


def test_it_is_asked_again_in_every_step(fetching):
    fetching.add_with_images("a", [4, CAT, 4])
    fetching.ec.on_the_way.add(CAT.identifier)
    for _ in range(3):
        fetching.step()
    assert fetching.ec.named("ensure") == [("a", 0)] * 3
    assert fetching.scheduler.make_stats().num_encoder_deferrals == 3


def test_text_requests_are_never_asked_about(fetching):
    run_to_end(fetching, fetching.add("a", 10))
    assert fetching.ec.calls == []


def test_only_embeddings_after_the_prefix_hit_are_waited_for(fetching):
    run_to_end(fetching, fetching.add_with_images("a", [4, CAT, 30, DOG], text="same"))
    fetching.ec.calls.clear()
    fetching.ec.on_the_way.add(CAT.identifier)
    request = fetching.add_with_images("b", [4, CAT, 30, DOG], text="same")
    assert "b" in fetching.schedule().num_scheduled_tokens
    assert fetching.ec.named("ensure")[0] == ("b", 64)
    fetching.finish_step()
    run_to_end(fetching, request)


def test_the_kv_connector_is_asked_first_and_what_it_loads_needs_no_embeddings(make_world, remote):
    world = make_world(encoder_cache_size=64, with_ec_connector=True, with_connector=True)
    world.ec.on_the_way |= {CAT.identifier, DOG.identifier}
    world.script.remote["a"] = remote(64)
    world.add_with_images("a", [4, CAT, 44, DOG])  # the cat is loaded, the dog is not
    world.step()
    assert world.ec.named("ensure") == [("a", 64)]
    assert world.script.named("match") == [("a", 0)]
    assert world.script.named("alloc") == []
    assert world.num_used_blocks == 0


def test_a_request_whose_whole_prompt_is_loaded_is_not_asked_about(make_world, remote):
    world = make_world(encoder_cache_size=64, with_ec_connector=True, with_connector=True)
    world.ec.on_the_way.add(CAT.identifier)
    world.script.remote["a"] = remote(40)
    world.add_with_images("a", [4, CAT, 20])
    world.step()
    assert world.ec.named("ensure") == []
    assert list(world.script.loading) == ["a"]


def test_a_running_request_waits_for_embeddings_too_and_others_run(make_world):
    world = make_world(encoder_cache_size=64, with_ec_connector=True, max_num_batched_tokens=16)
    request, other = world.add_with_images("a", [24, CAT, 4]), world.add("b", 10)
    world.step()
    world.ec.on_the_way.add(CAT.identifier)
    assert world.schedule().num_scheduled_tokens == {"b": 10}
    world.finish_step()
    assert request.num_computed_tokens == 16
    world.ec.on_the_way.clear()
    run_to_end(world, request, other)


def test_a_resumed_request_waits_for_embeddings_too(make_world):
    world = make_world(encoder_cache_size=64, with_ec_connector=True, num_blocks=6, enable_caching=False)
    first, second = world.add("a", 30, max_tokens=20), world.add_with_images("b", [4, CAT, 11], max_tokens=20)
    while second.status is not RequestStatus.PREEMPTED:
        world.step()
    world.ec.on_the_way.add(CAT.identifier)
    world.ec.calls.clear()
    while "a" not in world.ends:
        world.step()
        assert second.status is RequestStatus.PREEMPTED
    assert set(world.ec.named("ensure")) == {("b", 0)}
    world.ec.on_the_way.clear()
    world.run()
    world.assert_right(first, 20)
    world.assert_right(second, 20)
    world.assert_clean()


# ---- embeddings that others have computed ----------------------------------------------------------------------------


def test_embeddings_that_are_here_are_loaded_instead_of_computed(fetching):
    fetching.ec.here[CAT.identifier] = CAT.media
    request = fetching.add_with_images("a", [4, CAT, 4], media=())
    assert fetching.schedule().scheduled_encoder_inputs == {}
    assert fetching.ec.named("alloc") == [("a", 0)]
    fetching.finish_step()
    run_to_end(fetching, request)
    assert not fetching.encoder.num_encoded
    assert fetching.ec.saved == []
    assert fetching.ec.named("finished") == [("a",)]


def test_what_is_in_the_encoder_cache_is_not_waited_for(fetching):
    run_to_end(fetching, fetching.add_with_images("a", [4, CAT, 4]))
    fetching.ec.on_the_way.add(CAT.identifier)
    run_to_end(fetching, fetching.add_with_images("b", [9, CAT, 4], media=()))
    assert fetching.ends["b"] == "length"


def test_what_was_in_the_cache_and_made_room_for_an_earlier_image_is_waited_for(make_world):
    """Nobody can compute the cat: it was to be taken from the cache, where the dog of the same prompt takes its place."""
    world = make_world(encoder_cache_size=16, with_ec_connector=True)
    run_to_end(world, world.add_with_images("a", [4, CAT, 4]))
    world.ec.on_the_way.add(CAT.identifier)
    request = world.add_with_images("b", [5, DOG, 4, CAT, 4], media=(DOG.media, b""))
    assert world.schedule().num_scheduled_tokens == {"b": 25}
    world.finish_step()
    assert world.schedule().num_scheduled_tokens == {}
    world.finish_step()
    world.ec.here[CAT.identifier] = CAT.media
    world.ec.on_the_way.clear()
    run_to_end(world, request)
    assert world.ends["b"] == "length"


def test_a_load_takes_room_but_nothing_of_the_compute_budget(make_world):
    world = make_world(encoder_cache_size=32, max_embeds_per_step=16, with_ec_connector=True)
    world.ec.here[CAT.identifier] = CAT.media
    request = world.add_with_images("a", [CAT, DOG, OWL, 4])
    assert world.schedule().num_scheduled_tokens == {"a": 32}  # no room for the owl under any budget
    assert world.last.scheduled_encoder_inputs == {"a": [1]}
    world.finish_step()
    run_to_end(world, request)


def test_what_is_computed_here_is_offered_to_others(fetching):
    run_to_end(fetching, fetching.add_with_images("a", [4, CAT, 4]))
    assert fetching.ec.saved == [CAT.identifier]


def test_without_image_and_embeddings_the_request_alone_ends(fetching):
    other = fetching.add_with_images("b", [4, CAT, 4])
    fetching.add_with_images("a", [4, DOG, 4], media=(b"",))
    fetching.run()
    assert fetching.ends == {"a": "error", "b": "length"}
    fetching.assert_right(other, 4)
    fetching.assert_clean()


def test_its_error_says_which_image_is_missing(fetching):
    fetching.add_with_images("a", [4, CAT, DOG], media=(b"cat",))
    (output,) = fetching.step()
    assert (output.error.code, output.error.http_status) == (EncoderInputMissing.code, 503)
    assert output.error.param == "images[1]"


def test_a_request_that_the_connector_gives_up_ends_alone(fetching):
    other = fetching.add_with_images("b", [4, CAT, 4])
    fetching.add_with_images("a", [4, DOG, 4])
    fetching.ec.unavailable["a"] = ErrorInfo.of(EncoderInputMissing("too late"))
    fetching.step()
    assert fetching.ends == {"a": "error"}
    run_to_end(fetching, other)
    assert fetching.ec.named("finished") == [("a",), ("b",)]


# ---- requests that end, or start over --------------------------------------------------------------------------------


def test_an_abort_releases_embeddings(make_world):
    world = make_world(encoder_cache_size=64, max_num_batched_tokens=10, with_ec_connector=True)
    world.add_with_images("a", [CAT, 20])
    world.step()
    world.abort("a")
    assert world.scheduler.encoder_cache.num_freeable_slots == 64
    assert world.ec.named("finished") == [("a",)]
    world.assert_clean()


def test_an_abort_while_it_waits_leaves_nothing(fetching):
    fetching.add_with_images("a", [CAT, 20])
    fetching.ec.on_the_way.add(CAT.identifier)
    fetching.step()
    fetching.abort("a")
    fetching.assert_clean()


def test_a_preempted_request_gets_its_embeddings_again(make_world):
    world = make_world(encoder_cache_size=64, num_blocks=6, enable_caching=False)
    first, second = world.add("a", 30, max_tokens=20), world.add_with_images("b", [4, CAT, 11], max_tokens=20)
    world.run()
    assert second.num_preemptions
    world.assert_right(first, 20)
    world.assert_right(second, 20)
    world.assert_clean()


def test_image_of_a_request_preempted_in_the_same_step_is_computed_and_kept(make_world):
    world = make_world(
        encoder_cache_size=16, num_blocks=9, policy="priority", max_num_batched_tokens=48, long_prefill_token_threshold=32
    )
    meek = world.add_with_images("meek", [84, CAT, 12], priority=9, max_tokens=2)
    world.step()
    urgent = world.add("urgent", 16, priority=1, max_tokens=3)
    world.step()
    world.schedule()  # the image for "meek"; then "urgent" needs a block
    assert world.last.preempted_req_ids == {"meek"}
    assert world.last.scheduled_encoder_inputs == {"meek": [0]}
    assert world.scheduler.encoder_cache.holder_ids == ("meek",)  # not evicted before it is there
    world.finish_step()
    assert world.scheduler.encoder_cache.holder_ids == ()
    world.run()
    world.assert_right(meek, 2)
    world.assert_right(urgent, 3)
    assert world.encoder.num_encoded == {CAT.identifier: 1}
    world.assert_clean()
