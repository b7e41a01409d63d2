"""Fair shares between the tenants of one queue."""

import random

import pytest

from core.request import NewRequest, Request
from core.sched.fair_queue import OUTPUT_WEIGHT, FairRequestQueue
from core.sched.queue import create_request_queue
from core.wire.sampling import SamplingParams

POLICIES = ("fcfs", "priority")


def make_request(
    name: str, tenant: int = 0, num_tokens: int = 100, priority: int = 0, arrival_time: float = 1.0, num_resumed: int = 0
) -> Request:
    new = NewRequest(
        request_id=name,
        prompt_token_ids=[1] * num_tokens,
        output_token_ids=[2] * num_resumed,
        sampling=SamplingParams(),
        priority=priority,
        arrival_time=arrival_time,
        tenant=tenant,
    )
    return Request(new, None)


def fill(queue, *requests: Request):
    for request in requests:
        queue.add_request(request)
    return queue


def drain(queue) -> list[str]:
    return [queue.pop_request().request_id for _ in range(len(queue))]


def flood(tenant: int, count: int, **fields) -> list[Request]:
    return [make_request(f"{tenant}.{number:04d}", tenant, **fields) for number in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_tenant_is_served_in_the_order_of_the_policy(policy):
    draws = random.Random(7)
    for round_number in range(50):
        plain, fair = create_request_queue(policy), FairRequestQueue(policy)
        history = []
        for number in range(30):
            action = draws.random()
            if action < 0.6 or not len(plain):
                name = f"{round_number}.{number}"
                fields = {"num_tokens": draws.randint(1, 50), "priority": draws.randint(0, 2), "arrival_time": draws.random()}
                plain.add_request(make_request(name, **fields))
                fair.add_request(make_request(name, **fields))
            elif action < 0.8:
                popped, other = plain.pop_request(), fair.pop_request()
                history.append((popped.request_id, other.request_id))
                if draws.random() < 0.5:
                    plain.prepend_request(popped)
                    fair.prepend_request(other)
            assert [request.request_id for request in plain] == [request.request_id for request in fair]
        assert all(first == second for first, second in history)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_newcomer_is_not_behind_a_flood(policy):
    queue = fill(FairRequestQueue(policy), *flood(1, 1000))
    for _ in range(10):
        queue.pop_request()
    fill(queue, make_request("late", tenant=2, arrival_time=9.0))
    assert "late" in drain(queue)[:2]


def test_tenants_take_turns_by_tokens():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 9, num_tokens=100), *flood(2, 2, num_tokens=400))
    assert [queue.pop_request().tenant for _ in range(10)] == [1, 2, 1, 1, 1, 1, 2, 1, 1, 1]


def test_idle_time_earns_no_credit():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 20))
    drain(queue)
    fill(queue, *flood(1, 10, arrival_time=5.0), *flood(2, 10, arrival_time=6.0))
    first = drain(queue)[:10]
    assert sum(name.startswith("2.") for name in first) == 5


def test_a_tenant_that_was_alone_owes_nothing_for_it():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 100))
    drain(queue)
    fill(queue, *flood(2, 10), *flood(1, 10))
    assert sum(name.startswith("1.") for name in drain(queue)[:10]) in (4, 5)


def test_prepending_takes_the_charge_back():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 3), *flood(2, 3))
    order = [request.request_id for request in queue]
    skipped = [queue.pop_request() for _ in range(4)]
    queue.prepend_requests(reversed(skipped))
    assert [request.request_id for request in queue] == order == drain(queue)


def test_a_refused_request_costs_its_tenant_no_place():
    """Tenant 2 has been served 5000 tokens, tenant 1 none: a try without blocks does not change who is next."""
    queue = fill(FairRequestQueue("fcfs"), *flood(2, 1, num_tokens=5000), *flood(1, 1), *flood(3, 1), *flood(2, 4))
    assert queue.pop_request().tenant == 2
    refused, admitted = queue.pop_request(), queue.pop_request()
    assert (refused.tenant, admitted.tenant) == (1, 3)
    queue.prepend_request(refused)
    fill(queue, *flood(1, 3))
    assert [queue.pop_request().tenant for _ in range(8)] == [1] * 4 + [2] * 4


def test_a_refused_request_keeps_its_place_among_many_tenants():
    queue = fill(FairRequestQueue("fcfs"), *(make_request("idle", tenant) for tenant in range(3, 3 + 1024)))
    drain(queue)
    fill(queue, *flood(2, 1, num_tokens=5000), *flood(1, 1), *flood(2, 4))
    assert queue.pop_request().tenant == 2
    queue.prepend_request(queue.pop_request())
    fill(queue, *flood(1, 3))
    assert [queue.pop_request().tenant for _ in range(8)] == [1] * 4 + [2] * 4


def test_a_preempted_request_earns_no_credit_for_the_time_it_ran():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 1), *flood(2, 60))
    (preempted, *_) = [queue.pop_request() for _ in range(51)]
    assert preempted.tenant == 1
    queue.requeue_request(preempted)
    fill(queue, *flood(1, 9, arrival_time=2.0))
    assert preempted.num_charged_tokens == 0
    assert [queue.pop_request().tenant for _ in range(9)].count(2) >= 4


def test_cached_tokens_are_not_charged_and_output_is():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 5), *flood(2, 5))
    hit, miss = queue.pop_request(), queue.pop_request()
    queue.refund_cached(hit, 99)
    assert [queue.pop_request().tenant for _ in range(2)] == [1, 2]
    miss.num_computed_tokens = 100
    miss.num_output_tokens = round(200 / OUTPUT_WEIGHT)
    queue.charge_output(miss)
    assert [queue.pop_request().tenant for _ in range(3)] == [1, 1, 1]


def test_a_prompt_that_is_cached_costs_its_tenant_nothing(make_world):
    world = make_world(max_num_seqs=1)
    prompt = world.prompt(100)
    world.add("a0", prompt, tenant=1)
    world.run()
    world.add("a1", prompt, tenant=1)
    world.add("a2", prompt, tenant=1)
    world.add("b1", 50, tenant=2)
    world.add("b2", 50, tenant=2)
    world.run()
    assert list(world.ends) == ["a0", "a1", "b1", "a2", "b2"]


def test_the_output_of_a_request_that_waits_again_is_charged():
    queue = fill(FairRequestQueue("fcfs"), *flood(1, 5), *flood(2, 5))
    queue.pop_request()
    put_back = queue.pop_request()
    put_back.num_preemptions = 1
    put_back.num_output_tokens = round(200 / OUTPUT_WEIGHT)
    queue.charge_output(put_back)
    assert [queue.pop_request().tenant for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("num_generated", [0, 100])
def test_of_the_output_only_what_was_generated_here_is_charged(num_generated):
    resumed = make_request("resumed", tenant=1, num_resumed=1000)
    queue = fill(FairRequestQueue("fcfs"), resumed, *flood(1, 5), *flood(2, 5))
    assert queue.pop_request() is resumed
    queue.refund_cached(resumed, 1100)
    resumed.num_computed_tokens = 1100
    for _ in range(num_generated):
        resumed.append_output_token(3)
    queue.charge_output(resumed)
    order = [queue.pop_request().tenant for _ in range(4)]
    assert order == ([2, 2, 1, 2] if num_generated else [1, 2, 1, 2])


def test_smaller_priority_comes_first_whoever_sends_it():
    queue = fill(FairRequestQueue("priority"), *flood(1, 3), make_request("urgent", tenant=1, priority=-1), *flood(2, 2))
    assert drain(queue)[0] == "urgent"


def test_short_prompts_of_others_come_first_by_priority():
    queue = fill(
        FairRequestQueue("priority"), make_request("long", 1, num_tokens=5000), make_request("short", 2, num_tokens=10)
    )
    assert drain(queue) == ["short", "long"]


def test_removed_requests_cost_their_tenant_nothing():
    requests = flood(1, 3)
    queue = fill(FairRequestQueue("fcfs"), *requests, *flood(2, 2))
    queue.remove_requests(requests)
    assert drain(queue) == ["2.0000", "2.0001"]
    with pytest.raises(IndexError):
        queue.pop_request()


@pytest.mark.slow
def test_memory_is_bounded_for_many_tenants():
    queue = FairRequestQueue("fcfs")
    for tenant in range(20_000):
        queue.add_request(make_request("r", tenant))
        queue.add_request(make_request("r", 20_001))
        queue.pop_request()
        queue.pop_request()
    assert len(queue._tags) < 3000


@pytest.mark.slow
def test_no_tenant_starves_in_random_histories():
    """While two tenants wait, neither is served more than one of its prompts ahead of the other."""
    for seed in range(30):
        draws = random.Random(seed)
        queue, longest = FairRequestQueue("fcfs"), 0
        for tenant in (1, 2):
            for number in range(200):
                request = make_request(f"{tenant}.{number}", tenant, num_tokens=draws.randint(1, 500))
                longest = max(longest, request.num_tokens)
                queue.add_request(request)
        served = {1: 0, 2: 0}
        while all(len(queue._queues.get(tenant, ())) for tenant in served):
            request = queue.pop_request()
            served[request.tenant] += request.num_tokens
            assert abs(served[1] - served[2]) <= 2 * longest


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_request_is_that_of_the_least_served_tenant_after_any_history(policy):
    draws = random.Random(11)
    queue, popped = FairRequestQueue(policy), []
    for number in range(1500):
        action = draws.random()
        if action < 0.45:
            fields = {"num_tokens": draws.randint(1, 9), "priority": draws.randint(0, 1), "arrival_time": draws.randint(0, 3)}
            queue.add_request(make_request(str(number), draws.randint(0, 6), **fields))
        elif action < 0.8 and len(queue):
            expected = next(iter(queue))
            assert queue.first_request() is expected
            popped.append(queue.pop_request())
            assert popped[-1] is expected
        elif action < 0.9 and popped:
            queue.prepend_request(popped.pop(draws.randrange(len(popped))))
        elif len(queue):
            queue.remove_requests(draws.sample(list(queue), min(2, len(queue))))
        if popped and draws.random() < 0.2:
            queue.refund_cached(popped[-1], draws.randint(0, 5))
    assert len(queue._by_order) + len(queue._by_tag) <= 2000
