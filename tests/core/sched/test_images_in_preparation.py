"""Images that are not decoded yet: which requests wait for them, and which images are decoded at all."""

from __future__ import annotations

import pytest

from core.request import RequestStatus
from core.testing.hash_encoder import BAD_IMAGE, Image
from kvferry.sim.manual_images import PIXEL_BYTES

CAT, DOG, OWL = (Image(name, 16) for name in (b"cat", b"dog", b"owl"))


@pytest.fixture
def make(make_world):
    """Return worlds in which images have to be prepared first: by ``world.images.work``."""
    return lambda **config: make_world(**{"encoder_cache_size": 64, "image_budget": 64, **config})


@pytest.fixture
def world(make):
    return make()


def run_to_end(world, *requests) -> None:
    world.run()
    for request in requests:
        world.assert_right(request, 4)
    world.assert_clean()


# ---- requests that wait ----------------------------------------------------------------------------------------------


def test_text_request_runs_while_an_earlier_image_is_prepared(world):
    image, text = world.add_with_images("a", [4, CAT, 4]), world.add("b", 10)
    assert world.schedule().num_scheduled_tokens == {"b": 10}
    world.finish_step()
    run_to_end(world, image, text)


def test_a_request_whose_image_is_being_prepared_holds_nothing(world):
    world.add_with_images("a", [4, CAT, 4])
    for _ in range(3):
        world.schedule()
        assert world.last.num_scheduled_tokens == {}
        assert world.last.scheduled_encoder_inputs == {}
        assert world.num_used_blocks == 0
        assert world.scheduler.encoder_cache.identifiers == set()
        assert world.scheduler.encoder_cache.holder_ids == ()
        assert world.scheduler.requests["a"].prefill_stats is None
        world.finish_step()
    assert world.scheduler.make_stats().num_encoder_deferrals == 3


def test_it_runs_in_the_step_after_its_image_is_ready(world):
    request = world.add_with_images("a", [4, CAT, 4])
    world.step()
    assert world.images.work()
    assert world.schedule().num_scheduled_tokens == {"a": 24}
    assert world.last.scheduled_encoder_inputs == {"a": [0]}
    assert world.images.num_bytes == 16 * PIXEL_BYTES  # claimed: its room stays taken until it is embedded
    world.finish_step()
    assert world.images.num_bytes == 0
    run_to_end(world, request)


def test_waiting_requests_keep_their_order_and_images_are_prepared_in_it(world):
    requests = [world.add_with_images(name, [4, image, 4]) for name, image in zip("abc", (CAT, DOG, OWL), strict=True)]
    for _ in range(3):
        world.step()
        assert world.waiting_ids == ["a", "b", "c"]
    assert world.images.work()
    assert list(world.schedule().scheduled_encoder_inputs) == ["a"]
    assert world.waiting_ids == ["b", "c"]
    world.finish_step()
    run_to_end(world, *requests)
    assert world.images.prepared == [b"cat", b"dog", b"owl"]


def test_an_image_that_is_ready_does_not_wait_for_one_before_it_that_is_not(make):
    world = make(with_ec_connector=True)
    first, second = world.add_with_images("a", [4, CAT, 4]), world.add_with_images("b", [4, DOG, 4])
    world.ec.here[DOG.identifier] = DOG.media
    assert world.schedule().num_scheduled_tokens == {"b": 24}
    world.finish_step()
    run_to_end(world, first, second)


def test_running_request_computes_text_before_its_image_then_waits(make):
    world = make(max_num_batched_tokens=16)
    request, other = world.add_with_images("a", [21, CAT, 4]), world.add("b", 10)
    assert world.schedule().num_scheduled_tokens == {"a": 16}
    world.finish_step()
    assert world.schedule().num_scheduled_tokens == {"a": 5, "b": 10}
    world.finish_step()
    assert world.schedule().num_scheduled_tokens == {"b": 1}
    world.finish_step()
    run_to_end(world, request, other)


def test_the_image_after_a_chunk_is_prepared_while_that_is_computed(make):
    world = make(max_num_batched_tokens=16)
    request = world.add_with_images("a", [16, CAT, 4])
    assert world.schedule().num_scheduled_tokens == {"a": 16}
    assert world.images.work()
    world.finish_step()
    assert world.schedule().scheduled_encoder_inputs == {"a": [0]}
    world.finish_step()
    run_to_end(world, request)


def test_images_of_one_prompt_are_computed_as_they_become_ready(world):
    request = world.add_with_images("a", [4, CAT, 4, DOG, 4, OWL, 4])
    world.step()
    assert world.images.work()
    assert world.schedule().num_scheduled_tokens == {"a": 24}  # up to the dog, which is requested
    world.finish_step()
    assert world.schedule().num_scheduled_tokens == {}
    world.finish_step()
    run_to_end(world, request)
    assert world.images.prepared == [b"cat", b"dog", b"owl"]


def test_a_prompt_with_more_images_than_the_budget_holds_is_computed(make):
    world = make(image_budget=16)
    parts = [part for number in range(6) for part in (3, Image(b"%d" % number, 8 + number))]
    run_to_end(world, world.add_with_images("a", parts), world.add_with_images("b", [4, CAT, 4]))


def test_with_steps_ahead_of_their_results_nothing_changes(make):
    world = make(async_scheduling=True, image_budget=20)
    requests = [world.add_with_images(name, [4, CAT, 4, DOG, 4]) for name in "ab"]
    run_to_end(world, *requests, world.add("c", 30), world.add_with_images("d", [OWL, 3]))


# ---- what is prepared ------------------------------------------------------------------------------------------------


def test_an_image_that_two_requests_show_is_prepared_once(world):
    first, second = world.add_with_images("a", [4, CAT, 4]), world.add_with_images("b", [9, CAT, 1])
    run_to_end(world, first, second)
    assert world.images.prepared == [b"cat"]


def test_an_image_in_the_encoder_cache_is_not_prepared(make):
    world = make(enable_caching=False)
    for name in "ab":
        run_to_end(world, world.add_with_images(name, [4, CAT, 4]))
    assert world.images.prepared == [b"cat"]


def test_an_image_that_a_prefix_hit_covers_is_not_prepared(world):
    run_to_end(world, world.add_with_images("a", [4, CAT, 30], text="same"))
    request = world.add_with_images("b", [4, CAT, 30], text="same")
    assert "b" in world.schedule().num_scheduled_tokens
    world.finish_step()
    run_to_end(world, request)
    assert world.images.prepared == [b"cat"]


def test_an_image_whose_kv_is_loaded_is_not_prepared(make, remote):
    world = make(with_connector=True)
    world.script.remote["a"] = remote(40)
    world.add_with_images("a", [4, CAT, 44])
    world.step()
    assert list(world.script.loading) == ["a"]
    assert world.images.num_images == 0


def test_an_image_after_kv_that_is_loaded_is_prepared_meanwhile(make, remote):
    world = make(with_connector=True)
    world.script.remote["a"] = remote(40)
    request = world.add_with_images("a", [44, CAT, 4])
    world.step()
    assert list(world.script.loading) == ["a"]
    assert world.images.work()
    assert world.images.prepared == [b"cat"]
    world.step()
    assert (world.encoder.num_encoded, world.scheduler.encoder_cache.identifiers) == ({}, set())
    world.complete_load("a")
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 24}
    assert world.last.scheduled_encoder_inputs == {"a": [0]}
    world.finish_step()
    run_to_end(world, request)
    assert world.images.prepared == [b"cat"]


def test_while_it_loads_a_request_keeps_its_place_in_the_order_of_images(make, remote):
    world = make(with_connector=True, image_budget=16)
    world.script.remote["a"] = remote(40)
    requests = [world.add_with_images("a", [44, CAT, 4]), world.add_with_images("b", [4, DOG, 4])]
    for _ in range(3):
        world.step()
    assert world.images.work()
    world.step()
    assert not world.images.work()  # it is the first, so its room is its own
    world.complete_load("a")
    run_to_end(world, *requests)
    assert world.images.prepared == [b"cat", b"dog"]


def test_the_image_of_the_last_token_is_prepared_although_all_kv_is_loaded(make, remote):
    world = make(with_connector=True)
    world.script.remote["a"] = remote(60)
    world.add_with_images("a", [44, CAT])
    world.step()
    assert world.images.work()
    world.complete_load("a")
    world.step()
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    world.finish_step()
    world.run()
    world.assert_clean()


def test_only_images_computed_here_are_prepared_after_loaded_kv(make, remote):
    world = make(with_connector=True, with_ec_connector=True)
    world.ec.here[DOG.identifier] = DOG.media
    world.add_with_images("known", [4, CAT, 30], max_tokens=60)
    world.step()
    world.images.work()
    world.step()
    for name, image in (("a", CAT), ("b", DOG)):
        world.script.remote[name] = remote(40)
        world.add_with_images(name, [44, image, 4])
    world.step()
    assert sorted(world.script.loading) == ["a", "b"]
    assert world.images.num_images == 0


def test_nothing_is_left_of_a_request_that_was_aborted_while_its_kv_was_loaded(make, remote):
    world = make(with_connector=True)
    world.script.remote["a"] = remote(40)
    world.add_with_images("a", [44, CAT, 4])
    world.step()
    assert world.images.num_images == 1
    world.abort("a")
    assert world.images.num_images == 0
    world.end_load("a")
    world.run()
    world.step()
    world.assert_clean()


def test_images_whose_embeddings_come_from_elsewhere_are_not_prepared(make):
    world = make(with_ec_connector=True)
    world.ec.on_the_way.add(CAT.identifier)
    world.ec.here[DOG.identifier] = DOG.media
    first, second = world.add_with_images("a", [4, CAT, 4]), world.add_with_images("b", [4, DOG, 4])
    world.step()
    assert world.images.num_images == 0
    world.ec.on_the_way.clear()
    world.ec.here[CAT.identifier] = CAT.media
    run_to_end(world, first, second)
    assert world.images.prepared == []


def test_an_image_whose_embeddings_do_not_come_after_all_is_prepared(make):
    world = make(with_ec_connector=True)
    world.ec.here[CAT.identifier] = CAT.media
    world.ec.lost.add(CAT.identifier)
    run_to_end(world, world.add_with_images("a", [4, CAT, 4]))
    assert world.images.prepared == [b"cat"]


def test_nothing_is_left_of_a_request_that_was_aborted_while_it_waited(world):
    world.add_with_images("a", [4, CAT, 4, DOG])
    world.step()
    world.abort("a")
    assert world.images.num_images == 0
    assert not world.images.work()
    world.assert_clean()


def test_a_ready_image_whose_request_leaves_gives_its_room_back(world):
    world.add_with_images("a", [4, CAT, 4])
    world.step()
    world.images.work()
    world.abort("a")
    assert world.images.num_bytes == 0
    world.assert_clean()


def test_a_preempted_request_needs_no_pixels_again_while_its_embeddings_are_cached(make):
    world = make(num_blocks=6, enable_caching=False)
    first, second = world.add("a", 30, max_tokens=20), world.add_with_images("b", [4, CAT, 11], max_tokens=20)
    world.run()
    assert second.num_preemptions
    world.assert_right(first, 20)
    world.assert_right(second, 20)
    world.assert_clean()
    assert world.images.prepared == [b"cat"]


def test_a_bad_image_ends_its_request_alone(world):
    world.add_with_images("a", [4, Image(BAD_IMAGE, 8), 4])
    other = world.add_with_images("b", [4, CAT, 4])
    world.run()
    assert world.ends == {"a": "error", "b": "length"}
    world.assert_right(other, 4)
    world.assert_clean()


# ---- no request waits without bound ----------------------------------------------------------------------------------


def test_first_waiting_request_gets_its_image_with_the_budget_full_of_others(make):
    world = make(image_budget=32, policy="priority", encoder_cache_size=16)
    blocker = world.add_with_images("blocker", [4, Image(b"first", 16), 40], priority=0, max_tokens=60)
    world.step()
    world.images.work()
    world.step()
    later = [world.add_with_images(name, [4, image, 4], priority=9) for name, image in (("b", CAT), ("c", DOG))]
    world.step()
    while world.images.work():
        pass
    assert world.images.num_bytes == 32 * PIXEL_BYTES  # later images fill the whole budget
    head = world.add_with_images("a", [4, Image(b"large", 16), 4], priority=1)
    world.step()
    world.images.work()
    assert world.images.prepared[-1] == b"large"
    world.run()
    for request in (head, *later):
        world.assert_right(request, 4)
    world.assert_right(blocker, 60)
    assert blocker.status is RequestStatus.FINISHED_LENGTH_CAPPED
    world.assert_clean()
