"""The reports that are sent with the tokens of a step."""

from core.request import EngineCoreOutput, ModelRunnerOutput
from core.wire.messages import TokenLogprobs
from core.wire.sampling import SamplingParams


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id,), (-1.0,), 1)


def update(world, sampled, **more) -> list[EngineCoreOutput]:
    return world.scheduler.update_from_output(world.last, ModelRunnerOutput(sampled, **more))


def test_one_output_per_request_in_scheduling_order(world):
    for name in "abc":
        world.add(name)
    world.schedule()
    outputs = update(world, {"c": [3], "a": [1], "b": [2]})
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [("a", [1]), ("b", [2]), ("c", [3])]


def test_unfinished_prompt_has_nothing_to_say(make_world):
    world = make_world(max_num_batched_tokens=16)
    world.add("a", 40)
    world.schedule()
    assert update(world, {}) == []


def test_logprobs_go_with_their_tokens(world):
    world.add("a")
    world.add("b")
    world.schedule()
    outputs = update(world, {"a": [1], "b": [2]}, logprobs={"a": [entry(1)]}, prompt_logprobs={"a": (None, entry(5))})
    assert outputs[0].logprobs == [entry(1)]
    assert outputs[0].prompt_logprobs == (None, entry(5))
    assert outputs[1].logprobs is None
    assert outputs[1].prompt_logprobs is None


def test_tokens_after_a_stop_lose_their_logprobs(world):
    world.add("a", sampling=SamplingParams(max_tokens=9, stop_token_ids=(7,)), stop_token_ids=frozenset({7}))
    world.schedule()
    (output,) = update(world, {"a": [1, 7, 2]}, logprobs={"a": [entry(1), entry(7), entry(2)]})
    assert output.new_token_ids == [1, 7]
    assert output.logprobs == [entry(1), entry(7)]
    assert (output.finish_reason, output.stop_reason) == ("stop", 7)


def test_stop_token_ends_a_running_request(make_world):
    world = make_world(vocab_size=8)
    prompt = world.prompt(20)
    tokens = world.expected(prompt, 60)
    world.add("a", prompt, max_tokens=60, stop_token_ids=frozenset({tokens[10]}))
    world.run()
    assert world.tokens["a"] == tokens[: tokens.index(tokens[10]) + 1]
    assert world.ends == {"a": "stop"}
    world.assert_clean()


def test_min_tokens_holds_back_a_stop(make_world):
    world = make_world(vocab_size=8)
    prompt = world.prompt(20)
    tokens = world.expected(prompt, 60)
    stop = tokens[0]
    sampling = SamplingParams(max_tokens=60, min_tokens=5)
    world.add("a", prompt, sampling=sampling, stop_token_ids=frozenset({stop}))
    world.run()
    end = next(index for index, token in enumerate(tokens) if token == stop and index >= 4)
    assert world.tokens["a"] == tokens[: end + 1]


def test_times_of_the_first_token_go_out_with_it_and_add_up(make_world):
    world = make_world(max_num_batched_tokens=16)
    arrival = world.clock.now()
    world.add("a", 40, arrival_time=arrival)
    world.clock.advance(0.5)
    outputs = []
    while not outputs:
        world.schedule()
        world.clock.advance(0.25)
        outputs = update(world, {"a": [1]} if world.scheduler.requests["a"].num_computed_tokens >= 40 else {})
    times = outputs[0].first_token_times
    assert (times.wait_s, times.compute_s) == (0.5, 0.75)
    world.schedule()
    assert update(world, {"a": [2]})[0].first_token_times is None
