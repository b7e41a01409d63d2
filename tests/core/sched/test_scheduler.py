"""The turn of the engine's loop: budget, chunks, hits, counters, admission, and how requests leave."""

import pytest

from core.errors import ContextTooLong, InvalidRequest
from core.request import RequestStatus, SchedulerOutput
from core.wire.sampling import SamplingParams


def scheduled(output: SchedulerOutput) -> dict[str, int]:
    return output.num_scheduled_tokens


def test_request_runs_from_prompt_to_last_token(world):
    request = world.add("a", 20, max_tokens=4)
    world.run()
    assert world.tokens["a"] == world.expected(world.prompt(20, seed=98), 4) == request.output_token_ids
    assert world.ends["a"] == "length"
    world.assert_clean()


def test_prefill_and_decode_share_one_budget(make_world):
    world = make_world(max_num_batched_tokens=32)
    world.add("a", 20, max_tokens=9)
    world.step()
    world.add("b", 100)
    output = world.schedule()
    assert scheduled(output) == {"a": 1, "b": 31}
    assert output.total_num_scheduled_tokens == 32
    world.finish_step()
    assert scheduled(world.schedule()) == {"a": 1, "b": 31}


def test_long_prompt_is_computed_in_chunks_and_speaks_after_the_last(make_world):
    world = make_world(max_num_batched_tokens=32)
    world.add("a", 70, max_tokens=1)
    assert [len(world.step()), len(world.step()), len(world.step())] == [0, 0, 1]
    assert world.tokens["a"] == world.expected(world.prompt(70, seed=98), 1)


def test_new_request_carries_everything_the_runner_needs(world):
    request = world.add("a", 20, choice_index=3)
    (new,) = world.schedule().scheduled_new_reqs
    assert new.request_id == "a"
    assert new.token_ids == request.all_token_ids
    assert new.num_prompt_tokens == 20
    assert new.sampling is request.sampling
    assert new.choice_index == 3
    assert new.block_ids == world.manager.get_block_ids("a")
    assert new.num_computed_tokens == 0


def test_running_request_gets_block_ids_only_when_it_opens_a_block(world):
    world.add("a", 15, max_tokens=9)
    world.step()
    seen = []
    for _ in range(3):
        cached = world.schedule().scheduled_cached_reqs
        assert cached.req_ids == ["a"]
        seen.append((cached.num_computed_tokens[0], cached.new_block_ids[0]))
        world.finish_step()
    second_block = world.manager.get_block_ids("a")[0][1]
    assert seen == [(15, None), (16, ([second_block],)), (17, None)]


def test_completed_block_is_a_hit_as_soon_as_its_last_token_is_scheduled(world):
    prompt = world.prompt(15)
    world.add("a", prompt, max_tokens=9)
    world.step()
    world.step()  # fills slot 15
    world.add("b", [*prompt, world.tokens["a"][0], 5], max_tokens=1)
    assert world.schedule().num_scheduled_tokens["b"] == 1


def test_counters_advance_when_scheduled_and_settle_when_processed(world):
    request = world.add("a", 20)
    world.schedule()
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (20, 20)
    world.finish_step()
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (20, 0)
    assert request.num_tokens == 21


def test_step_scheduled_before_the_last_one_is_processed_has_nothing_to_do(world):
    request = world.add("a", 20)
    first = world.schedule()
    assert scheduled(world.scheduler.schedule()) == {}
    assert request.num_in_flight_tokens == 20
    world.scheduler.update_from_output(first, world.model.execute_model(first))
    assert request.num_in_flight_tokens == 0


def test_long_prefill_threshold_counts_only_in_company(make_world):
    world = make_world(long_prefill_token_threshold=16, max_num_batched_tokens=64)
    world.add("a", 40)
    assert scheduled(world.schedule()) == {"a": 40}
    world.finish_step()
    world.add("b", 40)
    assert scheduled(world.schedule()) == {"a": 1, "b": 16}
    world.finish_step()
    assert scheduled(world.schedule()) == {"a": 1, "b": 16}


def test_no_more_requests_run_than_there_are_slots(make_world):
    world = make_world(max_num_seqs=2)
    for name in "abc":
        world.add(name, max_tokens=2)
    world.step()
    assert world.running_ids == ["a", "b"]
    assert world.waiting_ids == ["c"]
    world.run()
    assert set(world.ends) == {"a", "b", "c"}


def test_fcfs_admits_in_order_of_arrival_whatever_the_priority(make_world):
    world = make_world(max_num_seqs=1)
    world.add("a", priority=5)
    world.add("b", priority=0)
    world.step()
    assert world.running_ids == ["a"]


def test_priority_admits_the_most_urgent_first(make_world):
    world = make_world(max_num_seqs=1, policy="priority")
    world.add("a", priority=5)
    world.add("b", priority=0)
    world.step()
    assert world.running_ids == ["b"]


def test_arrival_time_is_the_clock_where_none_is_given(world):
    assert world.add("a").arrival_time == world.clock.now()
    assert world.add("b", arrival_time=7.0).arrival_time == 7.0


def test_cached_prefix_is_not_computed_again_and_changes_no_token(world):
    prompt = world.prompt(40)
    world.add("a", prompt, max_tokens=3)
    world.run()
    world.add("b", prompt, max_tokens=3)
    assert scheduled(world.schedule()) == {"b": 8}
    world.finish_step()
    world.run()
    assert world.tokens["b"] == world.tokens["a"] == world.expected(prompt, 3)


def test_prompt_of_full_blocks_in_the_cache_still_computes_its_last_block(world):
    prompt = world.prompt(32)
    world.add("a", prompt)
    world.run()
    world.add("b", prompt)
    assert scheduled(world.schedule()) == {"b": 16}


def test_request_hits_blocks_that_an_earlier_one_fills_in_the_same_step(world):
    prompt = world.prompt(40)
    world.add("a", prompt, max_tokens=2)
    world.add("b", prompt, max_tokens=2)
    assert scheduled(world.schedule()) == {"a": 40, "b": 8}
    world.finish_step()
    world.run()
    assert world.tokens["a"] == world.tokens["b"] == world.expected(prompt, 2)


def test_prompt_logprobs_compute_every_token_in_spite_of_hits(world):
    prompt = world.prompt(40)
    world.add("a", prompt)
    world.run()
    world.add("b", prompt, sampling=SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert scheduled(world.schedule()) == {"b": 40}


def test_tenants_with_other_salts_share_nothing(world):
    prompt = world.prompt(40)
    world.add("a", prompt, cache_salt="one")
    world.run()
    world.add("b", prompt, cache_salt="two")
    world.add("c", prompt, cache_salt="one")
    assert scheduled(world.schedule()) == {"b": 40, "c": 8}


def test_output_of_another_worker_is_continued(world):
    prompt = world.prompt(20)
    first = world.expected(prompt, 5)
    world.add("a", prompt, max_tokens=5, output_token_ids=first[:2])
    world.run()
    assert world.tokens["a"] == first[2:]


def test_finished_ids_reach_the_runner_once(world):
    world.add("a", max_tokens=1)
    world.step()
    assert world.ends == {"a": "length"}
    assert world.scheduler.has_requests()
    assert not world.scheduler.has_unfinished_requests()
    assert world.schedule().finished_req_ids == {"a"}
    world.finish_step()
    assert not world.scheduler.has_requests()
    assert world.schedule().finished_req_ids == set()


def test_nothing_to_do_gives_an_empty_step(world):
    output = world.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert not output.num_scheduled_tokens
    assert world.finish_step() == []


# ---- admission


def test_prompt_without_room_for_one_more_token_is_refused_with_both_numbers(make_world):
    world = make_world(max_model_len=100)
    with pytest.raises(ContextTooLong, match=r"100 tokens.*context length of 100 tokens") as caught:
        world.add("a", 100)
    assert caught.value.http_status == 400
    assert not world.scheduler.has_requests()
    world.add("b", 99, max_tokens=50)
    world.run()
    assert len(world.tokens["b"]) == 1
    assert world.ends["b"] == "length"


def test_prompt_that_can_never_fit_the_pool_is_refused_with_both_numbers(make_world):
    world = make_world(num_blocks=5, max_model_len=512)
    with pytest.raises(ContextTooLong, match=r"has 64 tokens.*context length of 64 tokens"):
        world.add("a", 64)
    assert world.scheduler.max_model_len == 64


def test_request_that_outgrows_the_pool_ends_by_length(make_world):
    world = make_world(num_blocks=5, max_model_len=512)
    world.add("a", 60, max_tokens=400)
    world.run()
    assert world.ends["a"] == "length"
    assert len(world.tokens["a"]) == 4


def test_id_in_use_is_refused(world):
    world.add("a")
    with pytest.raises(InvalidRequest, match="in use"):
        world.add("a")
    world.run()
    world.step()
    world.add("a")


def test_empty_prompt_is_refused(world):
    with pytest.raises(InvalidRequest, match="empty"):
        world.add("a", [])


def test_request_whose_output_is_complete_is_refused(world):
    with pytest.raises(InvalidRequest, match="max_tokens"):
        world.add("a", max_tokens=2, output_token_ids=[1, 2])


# ---- how they leave


def test_abort_of_a_waiting_request(make_world):
    world = make_world(max_num_seqs=1)
    world.add("a")
    world.add("b")
    world.step()
    assert world.abort("b") == ["b"]
    assert world.waiting_ids == []
    world.run()
    assert set(world.ends) == {"a"}
    world.assert_clean()


def test_abort_of_a_running_request_frees_its_blocks_at_once(world):
    world.add("a")
    world.add("b")
    world.step()
    assert world.abort("a") == ["a"]
    assert world.running_ids == ["b"]
    assert world.num_used_blocks == world.num_blocks_of("b")
    output = world.schedule()
    assert output.finished_req_ids == {"a"}
    assert scheduled(output) == {"b": 1}
    world.finish_step()
    world.run()
    world.assert_clean()


def test_abort_in_the_middle_of_a_prefill(make_world):
    world = make_world(max_num_batched_tokens=16)
    world.add("a", 60)
    world.step()
    world.abort("a")
    world.assert_clean()


def test_abort_between_schedule_and_output_drops_the_output(world):
    request = world.add("a")
    world.add("b")
    world.schedule()
    world.abort("a")
    outputs = world.finish_step()
    assert [output.request_id for output in outputs] == ["b"]
    assert request.num_output_tokens == 0
    world.run()
    world.assert_clean()


def test_abort_of_unknown_or_finished_requests_is_ignored(world):
    world.add("a", max_tokens=1)
    world.step()
    assert world.abort("a", "never") == []


def test_aborting_an_id_named_twice_ends_it_once(world):
    world.add("a")
    assert world.abort("a", "a") == ["a"]


def test_none_ends_all_requests(make_world):
    world = make_world(max_num_seqs=1)
    for name in "abc":
        world.add(name)
    world.step()
    ended = world.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert ended == ["a", "b", "c"]
    world.assert_clean()


def test_stopped_requests_leave_the_others_in_order(world):
    for name, max_tokens in zip("abcd", (9, 2, 9, 2), strict=True):
        world.add(name, max_tokens=max_tokens)
    world.step()
    world.step()
    assert world.running_ids == ["a", "c"]


def test_events_of_the_connector_follow_those_of_the_cache(make_world):
    world = make_world(with_connector=True)
    world.scheduler.connector.take_events = lambda: ("mine",)
    assert world.scheduler.take_events() == ["mine"]
