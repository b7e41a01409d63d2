"""Requests that wait for their grammar: before they begin, and again when the grammar that they share is full."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.request import RequestStatus
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams, StructuredOutput

FORM = StructuredOutput(kind="regex", value="a*")
REFUSAL = ErrorInfo(code="internal_error", message="too complex")


def new_grammar():
    return SimpleNamespace(is_broken=False)


def add(world, request_id, grammar=None, max_tokens=8, **new):
    """Add a request; one with a grammar is admitted at once if it gets that."""
    request = world.add(request_id, sampling=SamplingParams(max_tokens=max_tokens, structured_output=FORM), **new)
    assert request.status is RequestStatus.WAITING_FOR_GRAMMAR
    if grammar is not None:
        world.scheduler.take_grammar(FORM, grammar)
    return request


def step_without_tokens_for(world, *request_ids):
    """Do a step, all that is in flight included, in which these requests are refused; return its last outputs."""
    world.schedule()
    result = world.model.launch_model(world.last)

    def refused():
        output = result()
        for request_id in request_ids:
            del output.sampled_token_ids[request_id]
            output.refused[request_id] = REFUSAL
        return output

    world.in_flight.append((world.last, refused))
    return world.drain()


def lose(world, request, grammar):
    """Let a grammar be full, and a running request meet it."""
    request.grammar.is_broken = True
    ended = [output.request_id for output in step_without_tokens_for(world, request.request_id) if output.error is not None]
    assert not ended
    lost = world.scheduler.take_lost_grammars()
    if grammar is not None:
        ((output, owner),) = lost
        world.scheduler.take_grammar(output, grammar, owner)
    return lost


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def world(request, make_world):
    return make_world(async_scheduling=request.param)


def test_a_request_that_meets_a_full_grammar_goes_on_in_another(world):
    request = add(world, "a", new_grammar())
    for _ in range(3):
        world.step()
    world.drain()
    num_output_tokens = request.num_output_tokens
    assert lose(world, request, None) == [(FORM, "")]
    assert request.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert world.num_used_blocks == 0
    assert request.num_output_tokens == num_output_tokens
    assert world.scheduler.take_lost_grammars() == []
    world.step()
    assert world.last.preempted_req_ids == {"a"}
    fresh = new_grammar()
    world.scheduler.take_grammar(FORM, fresh)
    assert request.grammar is fresh
    world.run()
    world.assert_right(request, 8)
    world.assert_sound()
    world.assert_clean()


def test_the_tokens_of_a_step_in_flight_count_no_more(make_world):
    world = make_world(async_scheduling=True)
    request = add(world, "a", new_grammar())
    world.step()
    request.grammar.is_broken = True
    world.schedule()
    step, result = world.last, world.model.launch_model(world.last)
    world.finish_oldest()
    world.schedule()  # one more for the same request
    assert world.last.num_scheduled_tokens == {"a": 1}
    world.in_flight.append((world.last, world.model.launch_model(world.last)))
    output = result()
    del output.sampled_token_ids["a"]
    output.refused["a"] = REFUSAL
    world.scheduler.update_from_output(step, output)
    world.assert_sound()
    world.drain()
    assert world.num_used_blocks == 0
    world.scheduler.take_grammar(FORM, new_grammar())
    world.run()
    world.assert_right(request, 8)
    world.assert_clean()


def test_the_second_time_a_request_gets_a_grammar_of_its_own(world):
    request, other = add(world, "a", new_grammar()), add(world, "b")
    lose(world, request, None)
    shared = new_grammar()
    world.scheduler.take_grammar(FORM, shared)
    assert request.grammar is other.grammar is shared
    assert lose(world, request, None) == [(FORM, "a")]
    world.scheduler.take_grammar(FORM, new_grammar())
    assert request.grammar is None
    world.scheduler.take_grammar(FORM, new_grammar(), "a")
    assert request.status is RequestStatus.PREEMPTED


def test_a_request_that_fills_a_grammar_alone_ends(world):
    request = add(world, "a", new_grammar())
    for _ in range(2):
        lose(world, request, new_grammar())
    request.grammar.is_broken = True
    (end,) = step_without_tokens_for(world, "a")
    assert end.error == REFUSAL
    assert world.scheduler.take_lost_grammars() == []


def test_what_is_not_the_fault_of_a_full_grammar_ends_the_request(world):
    add(world, "a", new_grammar())
    (end,) = step_without_tokens_for(world, "a")
    assert end.error == REFUSAL


def test_requests_that_have_not_begun_change_over(make_world):
    world, full = make_world(max_num_seqs=1), new_grammar()
    running, waiting = add(world, "a", full), add(world, "b", full)
    fresh = new_grammar()
    lose(world, running, fresh)
    assert running.grammar is waiting.grammar is fresh
    assert world.waiting_ids == ["a", "b"]  # who has run goes first


def test_a_running_request_keeps_the_grammar_that_the_runner_has(world):
    first, second = (add(world, name) for name in "ab")
    full = new_grammar()
    world.scheduler.take_grammar(FORM, full)
    lose(world, first, new_grammar())
    assert second.grammar is full
    lose(world, second, new_grammar())
    world.run()
    world.assert_right(first, 8)
    world.assert_right(second, 8)


def test_requests_that_were_put_back_keep_their_order(world):
    names = ["a", "b", "c"]
    for name in names:
        add(world, name)
    full = new_grammar()
    world.scheduler.take_grammar(FORM, full)
    world.step()
    world.drain()
    full.is_broken = True
    step_without_tokens_for(world, *names)
    world.scheduler.take_grammar(FORM, new_grammar())
    assert world.waiting_ids == names


def test_a_grammar_that_cannot_be_had_anew_ends_only_its_owner(world):
    request = add(world, "a", new_grammar())
    lose(world, request, new_grammar())
    lose(world, request, None)
    add(world, "b")
    (end,) = world.scheduler.fail_grammar(FORM, REFUSAL, "a")
    assert (end.request_id, end.error) == ("a", REFUSAL)
    assert list(world.scheduler.state.grammar_waiting) == ["b"]


def test_a_request_that_waits_again_can_be_aborted(world):
    request = add(world, "a", new_grammar())
    lose(world, request, None)
    assert world.abort("a") == ["a"]
    world.step()
    world.assert_clean()
