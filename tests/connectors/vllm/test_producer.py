"""P's scheduler side: what is sealed, published and cancelled."""

import pytest

from connectors.vllm.handoff_params import decode_handoff
from connectors.vllm.producer import Producer
from core.ids import SeededIds
from core.kv.hashing import BlockHasher
from tests.connectors.vllm.fake_requests import MODEL, REMOTE_DECODE, FakeRequest, Status, engine


@pytest.fixture
def producer():
    return Producer(engine(), BlockHasher(MODEL.fingerprint), SeededIds(1), (None,))


def prompt_of(name, num_tokens=70, params=REMOTE_DECODE, first=5):
    return FakeRequest(name, list(range(first, first + num_tokens)), dict(params))


def orders(producer):
    found, producer.orders = producer.orders, type(producer.orders)()
    return found


def complete(producer, request, table, chunk=None):
    """Schedule the step that completes the prompt, and let it end."""
    producer.on_new_request(request)
    producer.build_orders({request.request_id: chunk or request.num_prompt_tokens}, lambda name: (table,))
    step = orders(producer)
    request.num_computed_tokens = request.num_prompt_tokens
    request.num_output_tokens = 1
    return step


def finish(producer, request, table, status=Status.FINISHED_LENGTH_CAPPED):
    request.status = status
    return producer.request_finished(request, (table,))


def preempt(request):
    """Take the request's blocks, and drop its output, which was in flight."""
    request.status, request.num_computed_tokens, request.num_output_tokens = Status.PREEMPTED, 0, 0


def test_the_step_that_completes_the_prompt_seals_it(producer):
    request = prompt_of("a")
    producer.on_new_request(request)
    producer.build_orders({"a": 64}, lambda name: ([3, 4],))
    assert orders(producer).is_empty()
    request.num_computed_tokens = 64
    producer.build_orders({"a": 6}, lambda name: ([3, 4, 5],))
    (order,) = orders(producer).seals
    assert [block_id for block_id, _ in order.blocks] == [3, 4, 5]
    assert [seal.num_tokens for _, seal in order.blocks] == [32, 32, 6]
    assert len({seal.generation for _, seal in order.blocks}) == 3


def test_a_handoff_is_published_when_the_request_ends_well(producer):
    request = prompt_of("a")
    (order,) = complete(producer, request, [3, 4, 5]).seals
    params = finish(producer, request, [3, 4, 5])
    assert params is not None
    assert params["do_remote_prefill"]
    assert params["remote_block_ids"] == [[3, 4, 5]]
    handoff = decode_handoff(params)
    assert handoff is not None
    assert handoff.transfer_id == order.transfer_id
    assert handoff.groups[0].generations == tuple(seal.generation for _, seal in order.blocks)
    assert handoff.prompt_hash == order.blocks[-1][1].block_hash
    assert orders(producer).published == [order.transfer_id]
    assert producer.num_held_blocks == 3
    producer.on_sending_ended({"a", "unknown"})
    assert producer.num_held_blocks == len(producer._published) == 0


@pytest.mark.parametrize(
    ("status", "num_output_tokens", "table"),
    [
        (Status.FINISHED_ABORTED, 1, [3, 4, 5]),
        (Status.FINISHED_LENGTH_CAPPED, 2, [3, 4, 5]),
        (Status.FINISHED_LENGTH_CAPPED, 1, [3, 4, 9]),
    ],
    ids=["aborted", "more tokens", "other blocks"],
)
def test_what_ended_otherwise_is_cancelled(producer, status, num_output_tokens, table):
    request = prompt_of("a")
    (order,) = complete(producer, request, [3, 4, 5]).seals
    request.num_output_tokens = num_output_tokens
    assert finish(producer, request, table, status) is None
    assert orders(producer).cancelled == [order.transfer_id]
    assert producer.num_held_blocks == 0


def test_a_handoff_that_no_reader_would_take_is_cancelled_and_said_once(producer, monkeypatch, caplog):
    monkeypatch.setattr("connectors.vllm.producer.MAX_VALUE_CHARS", 100)
    for name in "ab":
        request = prompt_of(name)
        (order,) = complete(producer, request, [3, 4, 5]).seals
        assert finish(producer, request, [3, 4, 5]) is None
        last = orders(producer)
        assert (last.cancelled, last.published) == ([order.transfer_id], [])
        assert producer.num_held_blocks == 0
    assert caplog.text.count("event=handoff_too_large") == 1


@pytest.mark.parametrize("is_scheduled_again", [False, True])
def test_a_prefill_request_for_more_than_one_token_is_said_to_make_no_handoff(producer, caplog, is_scheduled_again):
    for name in "ab":
        request = prompt_of(name)
        complete(producer, request, [3, 4, 5])
        if is_scheduled_again:
            producer.build_orders({name: 1}, lambda name: ([3, 4, 5],))
        request.num_output_tokens = 2
        assert finish(producer, request, [3, 4, 5]) is None
        orders(producer)
    assert caplog.text.count("event=handoff_not_made") == 1
    assert "max_tokens 1" in caplog.text


@pytest.mark.parametrize(
    ("params", "status"), [({}, Status.FINISHED_STOPPED), (REMOTE_DECODE, Status.FINISHED_ABORTED)], ids=["other", "aborted"]
)
def test_nothing_is_said_of_a_request_that_no_handoff_is_expected_of(producer, caplog, params, status):
    request = prompt_of("a", params=params)
    complete(producer, request, [3, 4, 5])
    request.num_output_tokens = 2
    assert finish(producer, request, [3, 4, 5], status) is None
    assert caplog.text == ""


def test_a_preempted_request_is_cancelled_and_sealed_again(producer):
    request = prompt_of("a")
    (first,) = complete(producer, request, [3, 4, 5]).seals
    preempt(request)
    producer.build_orders({}, lambda name: None)
    assert orders(producer).cancelled == [first.transfer_id]
    request.status = Status.RUNNING
    producer.build_orders({"a": 70}, lambda name: ([7, 8, 9],))
    (second,) = orders(producer).seals
    assert second.transfer_id != first.transfer_id
    request.num_computed_tokens, request.num_output_tokens = 70, 1
    params = finish(producer, request, [7, 8, 9])
    assert params is not None
    assert params["remote_block_ids"] == [[7, 8, 9]]


def test_a_request_that_is_resumed_before_the_next_step_is_sealed_again(producer):
    """After a reset of the running requests, vLLM preempts and resumes in one pass."""
    request = prompt_of("a")
    (first,) = complete(producer, request, [3, 4, 5]).seals
    preempt(request)
    request.status, request.num_computed_tokens = Status.RUNNING, 32  # what its prefix cache still has
    producer.build_orders({"a": 38}, lambda name: ([3, 8, 9],))
    found = orders(producer)
    assert found.cancelled == [first.transfer_id]
    assert len(found.seals) == 1
    request.num_computed_tokens, request.num_output_tokens = 70, 1
    assert finish(producer, request, [3, 8, 9]) is not None


@pytest.mark.parametrize("num_loaded", [32, 70])
def test_a_preempted_request_that_another_connector_loads_at_once_is_sealed_again(producer, caplog, num_loaded):
    """After a reset of the running requests, and beside a connector that loads: others may have its blocks meanwhile."""
    request, other = prompt_of("a"), prompt_of("b", first=500)
    (first,) = complete(producer, request, [3, 4, 5]).seals
    preempt(request)
    request.status, request.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, num_loaded
    step = complete(producer, other, [3, 4, 5])
    assert (step.cancelled, len(step.seals), caplog.text) == ([first.transfer_id], 1, "")
    assert finish(producer, other, [3, 4, 5]) is not None
    request.status, request.num_computed_tokens = Status.RUNNING, min(num_loaded, 69)
    producer.build_orders({"a": 70 - request.num_computed_tokens}, lambda name: ([7, 8, 9],))
    assert len(orders(producer).seals) == 1
    request.num_computed_tokens, request.num_output_tokens = 70, 1
    assert finish(producer, request, [7, 8, 9]) is not None


def test_a_request_that_goes_on_is_cancelled(producer):
    request = prompt_of("a")
    (order,) = complete(producer, request, [3, 4, 5]).seals
    producer.build_orders({"a": 1}, lambda name: ([3, 4, 5],))
    assert orders(producer).cancelled == [order.transfer_id]
    assert finish(producer, request, [3, 4, 5]) is None


def test_shared_blocks_keep_their_generation_until_the_last_handoff_ends(producer):
    one, two = prompt_of("a"), prompt_of("b")
    (first,) = complete(producer, one, [3, 4, 5]).seals
    (second,) = complete(producer, two, [3, 4, 6]).seals
    finish(producer, one, [3, 4, 5])
    finish(producer, two, [3, 4, 6])
    assert [seal for _, seal in first.blocks[:2]] == [seal for _, seal in second.blocks[:2]]
    producer.on_sending_ended({"a"})
    assert producer.num_held_blocks == 3
    three = prompt_of("c")
    (third,) = complete(producer, three, [3, 4, 5]).seals
    assert third.blocks[0] == first.blocks[0]
    assert third.blocks[2][1].generation > second.blocks[2][1].generation
    producer.on_sending_ended({"b"})
    finish(producer, three, [3, 4, 5])
    producer.on_sending_ended({"c"})
    assert producer.num_held_blocks == 0


def test_a_block_of_a_published_handoff_that_has_another_prompt_is_not_handed_off(producer, caplog):
    """vLLM frees no such block, but another connector beside ours might lose our report."""
    one, two = prompt_of("a"), prompt_of("b", first=500)
    complete(producer, one, [3, 4, 5])
    assert finish(producer, one, [3, 4, 5]) is not None
    assert complete(producer, two, [7, 8, 5]).seals == []
    assert finish(producer, two, [7, 8, 5]) is None
    assert "handoff_not_sealed" in caplog.text
    producer.on_sending_ended({"a"})
    assert producer.num_held_blocks == 0


def test_a_generation_is_never_used_again(producer):
    seen = set()
    for number in range(5):
        request = prompt_of(f"r{number}")
        (order,) = complete(producer, request, [3, 4, 5]).seals
        finish(producer, request, [3, 4, 5])
        producer.on_sending_ended({request.request_id})
        generations = {seal.generation for _, seal in order.blocks}
        assert not seen & generations
        seen |= generations


def test_blocks_that_a_window_has_left_are_not_named(producer):
    request = prompt_of("a")
    (order,) = complete(producer, request, [0, 0, 5]).seals
    params = finish(producer, request, [0, 0, 5])
    handoff = decode_handoff(params)
    assert handoff is not None
    assert (handoff.groups[0].first_block, handoff.groups[0].block_ids) == (2, (5,))
    assert [block_id for block_id, _ in order.blocks] == [5]


def test_blocks_that_the_window_leaves_with_this_step_are_not_sealed():
    producer = Producer(engine(), BlockHasher(MODEL.fingerprint), SeededIds(1), (20,))
    request = prompt_of("a")
    (order,) = complete(producer, request, [3, 4, 5]).seals
    assert [block_id for block_id, _ in order.blocks] == [4, 5]
    assert finish(producer, request, [0, 4, 5]) is not None


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False}, {"do_remote_decode": "yes"}])
def test_requests_without_a_reader_are_not_sealed(producer, params):
    assert complete(producer, prompt_of("a", params=params), [3, 4, 5]).is_empty()


def test_prompts_that_are_no_tokens_are_not_sealed(producer):
    request = prompt_of("a")
    request.prompt_embeds = object()
    assert complete(producer, request, [3, 4, 5]).is_empty()


def test_an_order_that_no_step_has_carried_is_dropped(producer):
    request = prompt_of("a")
    producer.on_new_request(request)
    producer.build_orders({"a": 70}, lambda name: ([3, 4, 5],))
    assert finish(producer, request, [3, 4, 5], Status.FINISHED_ABORTED) is None
    assert orders(producer).is_empty()
