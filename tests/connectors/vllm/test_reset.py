"""What a change of the weights ends, and that no KV from before it is handed off or loaded after it."""

import pytest

from connectors.vllm.handoff_params import decode_handoff
from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.scheduler_side import SchedulerSide, TransferGroups
from core.ids import SeededIds
from tests.connectors.vllm.fake_requests import REMOTE_DECODE, FakeRequest, Status, engine

PROMPT = list(range(5, 75))
TABLE = ([3, 4, 5],)


class Pool:
    """vLLM's: it can be reset if only the null block is in use."""

    def __init__(self):
        self.blocks = range(10)
        self.num_used = 1

    def get_num_free_blocks(self):
        return len(self.blocks) - self.num_used


@pytest.fixture
def new_side():
    def new(name, pool=None):
        side = SchedulerSide(engine(name), PeerRules(("127.0.0.0/8",)), SeededIds(1), TransferGroups((0,), (None,)))
        side.bind_block_pool(pool or Pool())
        return side

    return new


def begin(side, name, num_scheduled=70):
    """Schedule a step of a prompt that another engine will load."""
    request = FakeRequest(name, list(PROMPT), dict(REMOTE_DECODE))
    side.on_new_request(request)
    orders = side.build_orders({name: num_scheduled}, lambda _: TABLE)
    request.num_computed_tokens = num_scheduled
    return request, orders


def finish(side, request):
    request.num_output_tokens = 1
    request.status = Status.FINISHED_LENGTH_CAPPED
    return side.request_finished(request, TABLE)


def step(side, **scheduled):
    return side.build_orders(scheduled, lambda _: TABLE)


def load(side, params, name="d"):
    request = FakeRequest(name, list(PROMPT), params)
    side.on_new_request(request)
    return side.num_loadable_tokens(request, 0)


def test_a_published_handoff_ends_and_is_held_until_all_ranks_say_so(new_side):
    side = new_side("p")
    request, orders = begin(side, "a")
    finish(side, request)
    step(side)
    side.reset()
    assert side.needs_steps()
    assert step(side).ended == [orders.seals[0].transfer_id]
    assert side.producer.num_held_blocks == 3
    side.on_step_ended({"a"}, set(), None)
    assert side.producer.num_held_blocks == 0


def test_a_handoff_that_is_not_published_is_cancelled(new_side):
    side = new_side("p")
    request, orders = begin(side, "a")
    side.reset()
    assert step(side).cancelled == [orders.seals[0].transfer_id]
    assert finish(side, request) is None


def test_a_prompt_that_was_computed_in_part_is_not_handed_off(new_side):
    side = new_side("p")
    request, _ = begin(side, "a", num_scheduled=64)
    side.reset()
    assert step(side, a=6).seals == []
    assert finish(side, request) is None


def test_a_prompt_that_is_computed_anew_is_handed_off_after_the_reset(new_side):
    """vLLM preempts the running requests before the reset, and resumes them in the next step."""
    side = new_side("p")
    request, orders = begin(side, "a")
    request.status, request.num_computed_tokens = Status.PREEMPTED, 0
    side.reset()
    request.status = Status.RUNNING
    found = step(side, a=70)
    assert found.cancelled == [orders.seals[0].transfer_id]
    assert len(found.seals) == 1
    request.num_computed_tokens = 70
    assert decode_handoff(finish(side, request)).model.weights_epoch == 1


def test_an_offer_from_before_is_released_unread(new_side):
    side, owner = new_side("d"), new_side("p")
    request, _ = begin(owner, "a")
    assert load(side, finish(owner, request)) == 70
    (hold,) = step(side).holds
    side.reset()
    assert step(side).releases == [hold]
    assert side.num_loadable_tokens(FakeRequest("d", list(PROMPT)), 0) == 0


def test_another_choice_of_the_same_answer_goes_on_loading(new_side):
    side, owner = new_side("d"), new_side("p")
    request, _ = begin(owner, "a")
    params = finish(owner, request)
    choices = [FakeRequest(name, list(PROMPT), params) for name in ("0_d", "1_d")]
    for choice in choices:
        side.on_new_request(choice)
    side.start_load(choices[0], ([11, 12, 13],), 70)
    side.reset()
    assert step(side).releases == []
    side.on_step_ended(set(), {"0_d"}, None)
    assert len(step(side).releases) == 1


def test_engines_understand_each_other_only_in_the_same_epoch(new_side):
    owner, reader = new_side("p"), new_side("d")
    loadable = []
    for side in (None, owner, reader):
        if side is not None:
            side.reset()
        request, _ = begin(owner, f"a{len(loadable)}")
        params = finish(owner, request)
        loadable.append(load(reader, params, request.request_id))
        owner.on_step_ended({request.request_id}, set(), None)
    assert loadable == [70, 0, 70]
    assert decode_handoff(params).model.weights_epoch == 1
    assert reader.consumer.refused == {"layout": 1}


def test_a_reset_that_vllm_repeats_because_blocks_are_held_is_one_epoch(new_side):
    pool = Pool()
    side, reader = new_side("p", pool), new_side("d")
    request, _ = begin(side, "a")
    finish(side, request)
    pool.num_used = 4
    assert not side.reset()
    step(side)
    side.on_step_ended({"a"}, set(), None)
    pool.num_used = 1
    assert side.reset()
    assert reader.reset()
    request, _ = begin(side, "b")
    params = finish(side, request)
    assert decode_handoff(params).model.weights_epoch == 1
    assert load(reader, params) == 70


def test_a_failed_reset_ends_all_handoffs_too(new_side):
    pool = Pool()
    side = new_side("p", pool)
    request, orders = begin(side, "a")
    finish(side, request)
    step(side)
    pool.num_used = 4
    side.reset()
    assert step(side).ended == [orders.seals[0].transfer_id]


def test_nothing_is_handed_off_until_a_reset_succeeds(new_side):
    """The prefix cache still has KV of the old weights."""
    pool = Pool()
    side = new_side("p", pool)
    waiting = FakeRequest("waiting", list(PROMPT), dict(REMOTE_DECODE))
    side.on_new_request(waiting)
    pool.num_used = 4
    side.reset()
    request, orders = begin(side, "a")
    assert orders.seals == []
    assert finish(side, request) is None
    pool.num_used = 1
    side.reset()
    (order,) = step(side, waiting=70).seals
    assert order.request_id == "waiting"


def test_nothing_is_loaded_until_a_reset_succeeds(new_side, caplog):
    pool = Pool()
    side, owner = new_side("d", pool), new_side("p")
    request, _ = begin(owner, "a")
    params = finish(owner, request)
    pool.num_used = 4
    side.reset()
    assert load(side, params) == 0
    assert len(step(side).releases) == 1
    assert side.consumer.refused == {"layout": 1}
    assert "event=kvferry_reset_failed used_blocks=3" in caplog.text
    pool.num_used = 1
    side.reset()
    owner.reset()
    owner.on_step_ended({"a"}, set(), None)
    request, _ = begin(owner, "b")
    assert load(side, finish(owner, request), "e") == 70
