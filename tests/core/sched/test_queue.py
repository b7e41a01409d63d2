"""Order of waiting requests."""

import pytest

from core.request import NewRequest, Request
from core.sched.queue import create_request_queue
from core.wire.sampling import SamplingParams


@pytest.fixture
def make_request():
    def make(request_id: str, priority: int = 0, arrival_time: float = 1.0, patience_s: float = 0.0) -> Request:
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=[1],
            sampling=SamplingParams(),
            priority=priority,
            arrival_time=arrival_time,
            patience_s=patience_s,
        )
        return Request(new, None)

    return make


@pytest.fixture
def abcd(make_request):
    return [make_request(name) for name in "abcd"]


def names(queue) -> str:
    return "".join(request.request_id for request in queue)


def drain(queue) -> str:
    return "".join(queue.pop_request().request_id for _ in range(len(queue)))


def test_fcfs_serves_in_order_of_arrival(abcd):
    queue = create_request_queue("fcfs")
    for request in abcd:
        queue.add_request(request)
    assert names(queue) == "abcd"
    assert len(queue) == 4
    assert drain(queue) == "abcd"
    assert not queue


def test_fcfs_prepended_request_is_next(abcd):
    queue = create_request_queue("fcfs")
    queue.add_request(abcd[0])
    queue.prepend_request(abcd[1])
    assert names(queue) == "ba"


def test_fcfs_prepending_several_puts_the_last_one_first(abcd):
    queue = create_request_queue("fcfs")
    queue.add_request(abcd[0])
    queue.prepend_requests(abcd[1:])
    assert names(queue) == "dcba"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removing_keeps_the_order_of_the_others(abcd, make_request, policy):
    queue = create_request_queue(policy)
    for request in abcd:
        queue.add_request(request)
    queue.remove_requests([abcd[2], abcd[0], make_request("unknown")])
    assert names(queue) == "bd"
    queue.remove_requests([])
    assert drain(queue) == "bd"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_empty_queue_has_nothing_to_pop(policy):
    queue = create_request_queue(policy)
    with pytest.raises(IndexError):
        queue.pop_request()


def test_a_patient_request_is_overtaken_within_its_patience(make_request):
    queue = create_request_queue("priority")
    queue.add_request(make_request("p", arrival_time=1.0, patience_s=2.0))
    queue.add_request(make_request("s", arrival_time=2.0))
    queue.add_request(make_request("l", arrival_time=4.0))
    queue.add_request(make_request("u", priority=-1, arrival_time=9.0, patience_s=9.0))
    assert drain(queue) == "uspl"


def test_patience_counts_nothing_in_order_of_arrival(make_request):
    queue = create_request_queue("fcfs")
    queue.add_request(make_request("p", patience_s=100.0))
    queue.add_request(make_request("s"))
    assert drain(queue) == "ps"


def test_priority_then_arrival_then_id_decide(make_request):
    queue = create_request_queue("priority")
    for request in (
        make_request("d", 1, 1.0),
        make_request("c", 0, 2.0),
        make_request("b", 0, 1.0),
        make_request("a", 0, 1.0),
        make_request("e", -1, 9.0),
    ):
        queue.add_request(request)
    assert names(queue) == "eabcd"
    assert drain(queue) == "eabcd"


def test_priority_queue_ignores_where_a_request_is_prepended(make_request):
    queue = create_request_queue("priority")
    queue.add_request(make_request("urgent", 0))
    queue.prepend_request(make_request("later", 5))
    queue.prepend_requests([make_request("latest", 9), make_request("late", 4)])
    assert [request.request_id for request in queue] == ["urgent", "late", "later", "latest"]


def test_iteration_changes_nothing(abcd):
    for policy in ("fcfs", "priority"):
        queue = create_request_queue(policy)
        for request in reversed(abcd):
            queue.add_request(request)
        assert names(queue) == names(queue) == drain(queue)
