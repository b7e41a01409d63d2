"""Tokens for running requests, and preemption where blocks run out."""

from core.request import RequestStatus


def scheduled_ids(world) -> list[str]:
    return list(world.last.num_scheduled_tokens)


def fill(world, *names, prompt=16, max_tokens=30, **new):
    """Start requests whose next token opens a second block."""
    requests = [world.add(name, prompt, max_tokens=max_tokens, **new) for name in names]
    world.step()
    return requests


def test_latest_request_is_preempted_first(make_world):
    world = make_world(num_blocks=4)  # three usable: each holds one, and each wants a second
    _a, b, c = fill(world, "a", "b", "c")
    output = world.schedule()
    assert output.preempted_req_ids == {"c", "b"}  # "c" for the block of "a"; "b" was the last one left
    assert scheduled_ids(world) == ["a"]
    assert world.waiting_ids == ["b", "c"]
    assert b.status is c.status is RequestStatus.PREEMPTED


def test_preempted_request_starts_again_from_nothing_and_continues_where_it_was(make_world):
    world = make_world(num_blocks=4)
    a, b, c = fill(world, "a", "b", "c", max_tokens=20)
    world.schedule()
    assert (c.num_computed_tokens, c.num_preemptions, c.num_output_tokens) == (0, 1, 1)
    world.finish_step()
    world.run()
    for name, request in zip("abc", (a, b, c), strict=True):
        assert world.tokens[name] == world.expected(request.all_token_ids[:16].tolist(), 20)
    world.assert_clean()


def test_preempted_requests_wait_in_front_in_their_old_order(make_world):
    world = make_world(num_blocks=9, max_num_seqs=4, hash_block_size=16, block_size=16)
    world.add("a", 16, max_tokens=40)
    world.add("b", 48, max_tokens=40)
    world.add("c", 16, max_tokens=40)
    world.add("d", 48, max_tokens=40)  # 8 blocks: all
    world.step()
    world.add("e", 16)
    world.schedule()
    assert world.running_ids == ["a", "b", "c"]
    assert world.waiting_ids == ["d", "e"]


def test_no_request_is_admitted_in_a_step_that_preempts(make_world):
    world = make_world(num_blocks=5, policy="priority")
    world.add("a", 16, priority=1, max_tokens=9)
    world.add("large", 48, priority=9, max_tokens=9)
    world.step()
    world.add("small", 3, priority=0)  # "a" takes the place of "large", and leaves room for it
    world.schedule()
    assert world.last.preempted_req_ids == {"large"}
    assert not world.last.scheduled_new_reqs
    world.finish_step()
    assert [new.request_id for new in world.schedule().scheduled_new_reqs] == ["small"]


def test_request_that_is_the_last_victim_itself_ends_the_pass(make_world):
    world = make_world(num_blocks=3)
    _a, b = fill(world, "a", "b")
    world.schedule()
    assert scheduled_ids(world) == ["a"]
    assert b.status is RequestStatus.PREEMPTED
    world.finish_step()
    assert scheduled_ids(world) == ["a"]


def test_resumed_request_is_sent_to_the_runner_as_new_with_its_output(make_world):
    world = make_world(num_blocks=3)
    _a, b = fill(world, "a", "b", max_tokens=2)
    world.step()
    assert b.status is RequestStatus.PREEMPTED
    (new,) = world.schedule().scheduled_new_reqs
    assert new.request_id == "b"
    assert new.token_ids == b.all_token_ids
    assert len(new.token_ids) == 17
    assert new.num_prompt_tokens == 16


def test_priority_preempts_the_least_urgent_even_if_it_came_first(make_world):
    world = make_world(num_blocks=3, policy="priority")
    meek = world.add("meek", 16, priority=9, max_tokens=20, arrival_time=1.0)
    urgent = world.add("urgent", 16, priority=1, max_tokens=20, arrival_time=2.0)
    world.step()
    world.schedule()
    assert meek.status is RequestStatus.PREEMPTED
    assert urgent.status is RequestStatus.RUNNING
    world.finish_step()
    world.run()
    assert urgent.num_preemptions == 0
    assert world.ends == {"meek": "length", "urgent": "length"}


def test_of_equal_priority_the_latest_is_preempted(make_world):
    world = make_world(num_blocks=3, policy="priority")
    late = world.add("late", 15, max_tokens=20, arrival_time=2.0)
    world.step()
    early = world.add("early", 16, max_tokens=20, arrival_time=1.0)
    world.step()
    assert world.running_ids == ["late", "early"]
    world.step()  # "late" opens a block
    assert (late.num_preemptions, early.num_preemptions) == (1, 0)


def test_victim_that_was_scheduled_already_is_refunded(make_world):
    world = make_world(num_blocks=4, policy="priority")
    meek = world.add("meek", 30, priority=9, max_tokens=20)  # two blocks
    world.step()
    urgent = world.add("urgent", 16, priority=1, max_tokens=20)  # the third one; its next token opens a fourth
    world.step()
    assert world.running_ids == ["meek", "urgent"]
    output = world.schedule()
    assert output.preempted_req_ids == {"meek"}
    assert output.num_scheduled_tokens == {"urgent": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.req_ids == ["urgent"]
    assert len(output.scheduled_cached_reqs.new_block_ids) == len(output.scheduled_cached_reqs.num_computed_tokens) == 1
    assert meek.num_in_flight_tokens == 0
    assert urgent.num_computed_tokens == 17


def test_blocks_hashed_ahead_for_a_refunded_victim_are_no_hits(make_world):
    world = make_world(num_blocks=9, policy="priority", max_num_batched_tokens=48, long_prefill_token_threshold=32)
    meek = world.add("meek", 112, priority=9, max_tokens=2)
    world.step()
    world.add("urgent", 16, priority=1, max_tokens=3)
    world.step()
    assert (meek.num_computed_tokens, world.running_ids) == (80, ["meek", "urgent"])
    world.schedule()  # 32 tokens for "meek", two blocks completed; then "urgent" needs a block
    assert world.last.preempted_req_ids == {"meek"}
    _, num_hits = world.manager.get_computed_blocks(meek)
    assert num_hits == 80
    world.finish_step()
    world.run()
    assert world.tokens["meek"] == world.expected(meek.all_token_ids[:112].tolist(), 2)


def test_requests_after_a_removed_victim_are_not_skipped(make_world):
    world = make_world(num_blocks=5, policy="priority")
    world.add("meek", 30, priority=9, max_tokens=17)  # two blocks
    world.step()
    world.add("u1", 16, priority=1, max_tokens=20)
    world.add("u2", 16, priority=1, max_tokens=20)
    world.step()
    assert world.running_ids == ["meek", "u1", "u2"]
    assert world.num_used_blocks == 4
    assert world.schedule().num_scheduled_tokens == {"u1": 1, "u2": 1}


def test_preempted_prefill_reserves_nothing(make_world):
    world = make_world(num_blocks=5, max_num_batched_tokens=16)
    world.add("a", 15, max_tokens=6)
    world.step()
    b = world.add("b", 40, max_tokens=1)
    while not b.num_preemptions:
        world.step()
    assert world.scheduler.state.inflight_prefills == {}


def test_no_request_is_preempted_or_admitted_while_the_connector_frees_blocks(make_world):
    world = make_world(num_blocks=3, with_connector=True)
    a, b = fill(world, "a", "b")
    world.script.has_pending_block_frees = True
    world.add("c", 3)
    assert world.schedule().num_scheduled_tokens == {}
    assert a.num_preemptions == b.num_preemptions == 0
    world.finish_step()
    world.script.has_pending_block_frees = False
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    assert b.num_preemptions == 1


def test_budget_that_is_used_up_leaves_the_rest_for_the_next_step(make_world):
    world = make_world(max_num_batched_tokens=2)
    for name in "abc":
        world.add(name, 1, max_tokens=9)
    world.step()
    world.step()
    assert world.running_ids == ["a", "b", "c"][:2]
    world.run()
    assert set(world.ends) == {"a", "b", "c"}


def test_small_pool_finishes_all_requests_with_the_right_tokens(make_world):
    world = make_world(num_blocks=8)
    requests = {name: world.add(name, 17 + 5 * number, max_tokens=40) for number, name in enumerate("abcdef")}
    prompts = {name: request.all_token_ids.tolist() for name, request in requests.items()}
    world.run(2000)
    assert sum(request.num_preemptions for request in requests.values()) > 0
    for name, prompt in prompts.items():
        assert world.tokens[name] == world.expected(prompt, 40)
    world.assert_clean()


def test_slow_and_fast_path_schedule_the_same(make_world):
    """With hash blocks of one token every token takes the slow path."""
    outcome = []
    for hash_block_size in (16, 1):
        world = make_world(num_blocks=12, hash_block_size=hash_block_size)
        for name in "abcd":
            world.add(name, 20, max_tokens=30)
        steps = []
        while world.scheduler.has_unfinished_requests():
            world.step()
            steps.append((dict(world.last.num_scheduled_tokens), len(world.last.preempted_req_ids), world.num_used_blocks))
        outcome.append((steps, world.tokens))
    assert outcome[0] == outcome[1]
