from __future__ import annotations

import pytest

from core.testing.hash_encoder import BAD_IMAGE, Image
from core.testing.hash_model import FULL, HashAttention

CAT, DOG = Image(b"cat", 16), Image(b"dog", 16)
BAD = Image(BAD_IMAGE, 16)


@pytest.fixture(params=[FULL, (HashAttention(), HashAttention(window=24))], ids=["full", "hybrid"])
def world(request, make_world):
    return make_world(encoder_cache_size=64, with_ec_connector=True, attentions=request.param, num_blocks=200)


def lose(world, image: Image) -> None:
    """Let embeddings be offered that cannot be loaded."""
    world.ec.here[image.identifier] = image.media
    world.ec.lost.add(image.identifier)


def test_embeddings_that_were_lost_are_computed_where_the_image_is_here(world):
    lose(world, CAT)
    request = world.add_with_images("a", [20, CAT, 20])
    world.step()
    assert world.tokens == {}  # what was computed without them is not used
    assert request.num_computed_tokens < 20 + 16
    assert world.schedule().scheduled_encoder_inputs == {"a": [0]}
    world.finish_step()
    world.run()
    world.assert_right(request, 4)
    assert world.encoder.num_encoded == {CAT.identifier: 1}
    world.assert_clean()


def test_no_request_hits_kv_computed_without_embeddings(world):
    lose(world, CAT)
    first = world.add_with_images("a", [20, CAT, 20], text="same")
    second = world.add_with_images("b", [20, CAT, 20], text="same")  # hits blocks of the first in the same step
    world.schedule()
    assert world.last.num_scheduled_tokens["b"] < 20
    world.finish_step()
    world.assert_sound()
    world.run()
    world.assert_right(first, 4)
    world.assert_right(second, 4)
    world.assert_clean()


def test_without_the_image_the_request_alone_ends(world):
    lose(world, CAT)
    other = world.add_with_images("b", [DOG, 20])
    poor = world.add_with_images("a", [20, CAT, 20], media=())
    rich = world.add_with_images("c", [9, CAT, 20])
    world.run()
    assert world.ends == {"a": "error", "b": "length", "c": "length"}
    assert "a" not in {request_id for request_id, tokens in world.tokens.items() if tokens}
    assert poor.has_failed_embedding
    world.assert_right(other, 4)
    world.assert_right(rich, 4)
    world.assert_clean()


@pytest.fixture(params=[FULL, (HashAttention(), HashAttention(window=24))], ids=["full", "hybrid"])
def failing_load(request, make_world, remote):
    """Two requests in one step: ``b`` hits the image of ``a`` and loads, in the step, what is reported as invalid."""

    def add(image: Image):
        world = make_world(
            encoder_cache_size=64, with_ec_connector=True, with_connector=True, attentions=request.param, num_blocks=200
        )
        if image is not BAD:
            lose(world, image)
        world.script.remote["b"] = remote(32, is_async=False, is_corrupt=True)
        first = world.add_with_images("a", [image, 4], text="same")
        second = world.add_with_images("b", [image, 60], text="same")
        assert list(world.schedule().num_scheduled_tokens) == ["a", "b"]
        world.finish_step()
        world.assert_sound()
        return world, first, second

    return add


def test_lost_embeddings_and_a_failed_load_in_one_step(failing_load):
    world, first, second = failing_load(CAT)
    world.run()
    world.assert_right(first, 4)
    world.assert_right(second, 4)
    world.assert_clean()


def test_a_bad_image_and_a_failed_load_in_one_step(failing_load):
    world, *_ = failing_load(BAD)
    world.run()
    assert world.ends == {"a": "error", "b": "error"}
    world.assert_clean()


def test_requests_that_do_not_need_them_in_the_step_continue(make_world):
    world = make_world(encoder_cache_size=64, with_ec_connector=True, max_num_batched_tokens=48)
    lose(world, CAT)
    first, text = world.add_with_images("a", [CAT, 4]), world.add("t", 10)
    later = world.add_with_images("b", [18, CAT, 4])  # only its text is in the step
    world.step()
    assert list(world.tokens) == ["t"]
    assert later.num_computed_tokens == 18
    world.run()
    for request in (first, text, later):
        world.assert_right(request, 4)
    world.assert_clean()


def test_a_bad_image_ends_every_request_that_needs_it_and_no_other(world):
    world.add_with_images("a", [20, BAD, 20], text="same")
    world.add_with_images("b", [20, BAD, 20], text="same")
    other = world.add_with_images("c", [20, CAT, 20], text="same")
    world.run()
    assert world.ends == {"a": "error", "b": "error", "c": "length"}
    world.assert_right(other, 4)
    world.assert_clean()
    assert BAD.identifier not in world.scheduler.encoder_cache.identifiers


def test_its_error_is_that_of_the_encoder(world):
    world.add_with_images("a", [20, BAD, 20])
    (output,) = world.step()
    assert (output.error.code, output.error.param) == ("invalid_request", "images[0]")
    assert output.error.message == "image 0 cannot be used: it is damaged"


def test_each_request_is_told_the_place_where_it_shows_the_bad_image(world):
    world.add_with_images("a", [20, BAD, 20])
    world.add_with_images("b", [9, CAT, 4, DOG, 4, BAD, 20])
    world.add_with_images("c", [9, CAT, 4, BAD, BAD])
    errors = {output.request_id: output.error for output in world.step()}
    assert {name: error.param for name, error in errors.items()} == {"a": "images[0]", "b": "images[2]", "c": "images[1]"}
    assert errors["b"].message.startswith("image 2 cannot be used: ")
    world.assert_clean()


def test_an_entry_that_the_worker_lacks_is_computed_again(world):
    first = world.add_with_images("a", [CAT, 4])
    world.run()
    world.encoder.cache.clear()  # the scheduler counts on it
    second = world.add_with_images("b", [9, CAT, 4])
    world.run()
    world.assert_right(first, 4)
    world.assert_right(second, 4)
    assert world.encoder.num_encoded == {CAT.identifier: 2}
    world.assert_clean()


def test_kv_that_could_not_be_loaded_is_computed_again_with_its_embeddings(make_world, remote):
    world = make_world(encoder_cache_size=64, with_connector=True)
    world.script.remote["a"] = remote(64)
    request = world.add_with_images("a", [20, CAT, 30])
    world.step()
    load = world.script.loading["a"]
    world.complete_load("a")
    world.script.report.invalid_block_ids = {load.block_ids[1]}  # the image stands in it
    world.step()
    world.run()
    world.assert_right(request, 4)
    assert world.encoder.num_encoded == {CAT.identifier: 1}
    world.assert_clean()


def test_a_failed_load_of_the_whole_prompt_computes_it_with_its_embeddings(make_world, remote):
    world = make_world(encoder_cache_size=64, with_connector=True)
    world.script.remote["a"] = remote(66)
    request = world.add_with_images("a", [20, CAT, 30])
    world.step()
    world.fail_load("a")
    world.run()
    world.assert_right(request, 4)
    world.assert_clean()


def test_a_request_that_waits_for_another_to_recompute_holds_no_embeddings(make_world):
    """Room for one image: the request that recomputes needs it while the other one, in the middle of its own image, waits."""
    world = make_world(encoder_cache_size=16, with_connector=True, max_num_batched_tokens=20)
    first = world.add_with_images("a", [4, CAT, 40], text="same", max_tokens=30)
    while not world.tokens:
        world.step()
    second = world.add_with_images("b", [4, CAT, 40, DOG, 4], text="same")
    world.step()
    assert world.scheduler.encoder_cache.holder_ids == ("b",)
    world.script.report.invalid_block_ids = {world.manager.get_block_ids("a")[0][0]}
    world.step()
    assert (first.num_computed_tokens, world.scheduler.state.recompute_ownership.holds_back("b")) == (0, True)
    world.run()
    world.assert_right(first, 30)
    world.assert_right(second, 4)
    world.assert_clean()
