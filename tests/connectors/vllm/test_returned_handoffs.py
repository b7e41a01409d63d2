"""A rejected request that brings a handoff: its lease ends at once, on the engine that has made it and on any other."""

import pytest

from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.scheduler_side import SchedulerSide, TransferGroups
from core.ids import SeededIds
from tests.connectors.vllm.fake_requests import REMOTE_DECODE, FakeRequest, Status, engine

PROMPT = list(range(5, 75))
TABLE = ([3, 4, 5],)


def new_side(name="p", peers=("127.0.0.0/8",), **role):
    return SchedulerSide(engine(name), PeerRules(peers), SeededIds(1), TransferGroups((0,), (None,)), **role)


def step(side, **scheduled):
    return side.build_orders(scheduled, lambda _: TABLE)


def publish(side):
    """Return the parameters of a published handoff, and its transfer id."""
    request = FakeRequest("a", list(PROMPT), dict(REMOTE_DECODE))
    side.on_new_request(request)
    (seal,) = step(side, a=70).seals
    request.num_output_tokens, request.status = 1, Status.FINISHED_LENGTH_CAPPED
    params = side.request_finished(request, TABLE)
    step(side)
    return params, seal.transfer_id


def bring(side, params, **fields):
    side.on_new_request(FakeRequest("r", [0], params, **fields))
    return step(side)


@pytest.mark.parametrize("peers", [("127.0.0.0/8",), ("10.0.0.0/8",)])
@pytest.mark.parametrize("is_consumer", [True, False])
def test_an_engine_ends_a_handoff_of_its_own(is_consumer, peers):
    """Whatever its role, and also if it may not connect to itself."""
    side = new_side(is_consumer=is_consumer, peers=peers)
    params, transfer_id = publish(side)
    orders = bring(side, params, abort_immediately=True)
    assert (orders.ended, orders.releases, side.consumer.refused) == ([transfer_id], [], {})
    assert side.producer.num_held_blocks == 3, "until all ranks have broken their seals"
    side.on_step_ended({"a"}, set(), None)
    assert side.producer.num_held_blocks == 0
    assert not bring(side, params, abort_immediately=True).ended


def test_a_request_that_is_not_rejected_ends_nothing():
    side = new_side()
    params, _ = publish(side)
    assert not bring(side, params).ended


@pytest.mark.parametrize("is_consumer", [True, False])
def test_a_handoff_of_another_engine_is_released_there(is_consumer):
    """As by a data-parallel server, whose engines share one port."""
    params, transfer_id = publish(new_side("p0"))
    orders = bring(new_side("p1", is_consumer=is_consumer), params, abort_immediately=True)
    assert [remote.transfer_id for remote in orders.releases] == [transfer_id]


def test_a_rejected_request_may_bring_anything(caplog):
    side = new_side()
    for value in (7, "%%%", None):
        bring(side, {"do_remote_prefill": True, "kvferry": value}, abort_immediately=True)
    assert side.consumer.refused.total() == 3


@pytest.mark.parametrize(
    ("params", "role", "message"),
    [
        (REMOTE_DECODE, {"is_producer": False}, "event=handoff_not_made"),
        ({"do_remote_prefill": True}, {"is_consumer": False}, "event=handoff_not_read"),
    ],
)
def test_a_request_for_an_engine_of_another_role_is_said_once(caplog, params, role, message):
    side = new_side(**role)
    for name in "ab":
        request = FakeRequest(name, list(PROMPT), dict(params))
        side.on_new_request(request)
        step(side, **{name: 70})
        request.num_output_tokens, request.status = 5, Status.FINISHED_LENGTH_CAPPED
        assert side.request_finished(request, TABLE) is None
    assert caplog.text.count(message) == caplog.text.count("event=") == 1
