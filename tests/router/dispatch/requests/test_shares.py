"""Fair shares of the router's and the workers' room between API keys, under overload."""

from __future__ import annotations

import random
import re

import pytest

from core.errors import DeadlineUnreachable, NoWorker, Overloaded
from core.wire.messages import ErrorInfo, Generate
from core.wire.sampling import SamplingParams
from router.dispatch.waiting import PASS_S

FLOOD, CALM, THIRD = 1, 2, 3
GRAMMAR = ErrorInfo.of(Overloaded("32 grammars wait to be compiled", param="structured_outputs"))


def submit(bench, request_id, tenant, **fields):
    bench.do(bench.core.submit(bench.submission(request_id, tenant=tenant, **fields), bench.now))


def started(bench, worker="a0"):
    return [message.request_id for message in bench.to(worker, Generate)]


def finish(bench, request_id):
    bench.do(bench.core.abort(request_id, "client", bench.now))


@pytest.fixture
def full(make_bench):
    """A worker with room for four, all taken by the same key."""
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=4)
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
    return bench


@pytest.fixture
def two_full(make_bench):
    """Two such workers."""
    bench = make_bench(max_requests=100, request_timeout_s=600.0)
    for name in ("a0", "a1"):
        bench.join(name, max_num_choices=4)
    for number in range(8):
        submit(bench, f"f{number}", FLOOD)
    return bench


def test_a_key_with_less_than_its_share_waits_for_room(full):
    submit(full, "c0", CALM)
    assert "c0" not in started(full)
    finish(full, "f0")
    assert started(full)[-1] == "c0"


def test_a_key_that_waited_for_room_waits_on_if_there_was_none(full):
    submit(full, "c0", CALM)
    finish(full, "f0")
    full.fails("a0", ErrorInfo.of(Overloaded("others were sooner")), "c0")
    assert "c0" not in full.ended
    full.tick(2.0)
    assert started(full)[-1] == "c0.2"


def test_the_key_that_took_the_room_is_refused_meanwhile(full):
    submit(full, "c0", CALM)
    with pytest.raises(Overloaded):
        submit(full, "f9", FLOOD)
    finish(full, "f0")
    with pytest.raises(Overloaded):
        submit(full, "f9", FLOOD)
    finish(full, "c0")
    submit(full, "f9", FLOOD)
    assert started(full)[-1] == "f9"


def test_room_that_no_key_waits_for_goes_to_any(full):
    submit(full, "c0", CALM)
    finish(full, "f0")
    finish(full, "f1")
    submit(full, "f9", FLOOD)
    assert started(full)[-2:] == ["c0", "f9"]


def test_with_one_key_nothing_waits(full):
    with pytest.raises(Overloaded):
        submit(full, "f4", FLOOD)
    assert full.core.dispatcher.num_waiting == 0


def test_an_equal_share_is_not_exceeded_by_waiting(full):
    for number in range(4):
        submit(full, f"c{number}", CALM)
    with pytest.raises(Overloaded):
        submit(full, "c4", CALM)


def test_keys_whose_requests_have_ended_take_no_share(full):
    for tenant in range(10, 14):
        submit(full, f"k{tenant}", tenant)
        finish(full, f"k{tenant}")
    for number in range(4):
        submit(full, f"c{number}", CALM)
    assert full.core.dispatcher.num_waiting == 4


def test_keys_with_fewer_open_requests_get_room_first(full):
    for name, tenant in (("c0", CALM), ("c1", CALM), ("t0", THIRD)):
        submit(full, name, tenant)
    for number in range(3):
        finish(full, f"f{number}")
    assert started(full)[-3:] == ["t0", "c0", "c1"]


def test_smaller_priority_gets_room_first(full):
    submit(full, "c0", CALM)
    submit(full, "c1", CALM, priority=-1)
    finish(full, "f0")
    assert started(full)[-1] == "c1"


def test_while_there_is_no_room_only_the_next_request_is_tried(full, monkeypatch):
    for number in range(4):
        submit(full, f"c{number}", CALM)
    tried = []
    placement = full.core.dispatcher.placement
    check = placement.check_room
    monkeypatch.setattr(
        placement, "check_room", lambda request, *args: tried.append(request.request_id) or check(request, *args)
    )
    full.do(full.core.dispatcher.place_waiting(0.0))
    assert tried == ["c0"]
    finish(full, "f0")
    assert tried == ["c0", "c0", "c1"]


def test_waiting_ends_at_the_deadline(full):
    submit(full, "c0", CALM, timeout_s=3.0)
    full.tick(4.0)
    assert full.error("c0").code == "deadline_exceeded"
    assert full.core.dispatcher.num_waiting == 0


def test_the_router_s_limit_leaves_room_for_keys_below_their_share(make_bench):
    bench = make_bench("a0", max_requests=16)
    for number in range(16):
        submit(bench, f"f{number}", FLOOD)
    with pytest.raises(Overloaded):
        submit(bench, "f16", FLOOD)
    submit(bench, "c0", CALM)
    submit(bench, "t0", THIRD)
    with pytest.raises(Overloaded):
        submit(bench, "c1", CALM)


def test_a_flood_does_not_make_the_deadlines_of_others_unreachable(make_bench):
    bench = make_bench(max_requests=1000)
    bench.join("a0", has_fair_shares=True)
    submit(bench, "first", FLOOD)
    bench.now = 1.0
    bench.tokens(0, 5, request_id="first", peer="a0")
    for number in range(30):
        submit(bench, f"f{number}", FLOOD)
    with pytest.raises(DeadlineUnreachable):
        submit(bench, "late", FLOOD, timeout_s=5.0)
    submit(bench, "calm", CALM, timeout_s=5.0)
    for number in range(5):
        submit(bench, f"c{number}", CALM)
    with pytest.raises(DeadlineUnreachable):
        submit(bench, "late", CALM, timeout_s=5.0)


def test_a_worker_in_order_of_arrival_makes_all_keys_wait_alike(make_bench):
    bench = make_bench(max_requests=1000)
    bench.join("a0")
    submit(bench, "first", FLOOD)
    bench.now = 1.0
    bench.tokens(0, 5, request_id="first", peer="a0")
    for number in range(30):
        submit(bench, f"f{number}", FLOOD)
    with pytest.raises(DeadlineUnreachable):
        submit(bench, "calm", CALM, timeout_s=5.0)


@pytest.mark.parametrize("seed", range(5))
def test_no_key_starves_and_no_room_is_idle(make_bench, seed):
    """One key sends many times what there is room for; two others send less than their share, and are rarely above it."""
    draws = random.Random(seed)
    bench = make_bench(max_requests=64, request_timeout_s=1000.0)
    bench.join("a0", max_num_choices=8)
    num_open, served, refused = [], {FLOOD: 0, CALM: 0, THIRD: 0}, {FLOOD: 0, CALM: 0, THIRD: 0}
    for number in range(600):
        tenant = draws.choices((FLOOD, CALM, THIRD), (20, 1, 1))[0]
        try:
            submit(bench, f"{tenant}.{number}", tenant)
        except Overloaded:
            refused[tenant] += 1
        running = [name for name in started(bench) if name not in bench.ended]
        num_open.append(len(running))
        if draws.random() < 0.35 and running:
            name = draws.choice(running)
            served[int(name[0])] += 1
            finish(bench, name)
    assert refused[FLOOD] > 100
    assert refused[CALM] + refused[THIRD] < 10
    assert min(served[CALM], served[THIRD]) >= 10
    assert min(num_open[100:]) == 8


def test_the_worker_is_told_whose_prompt_it_is(pair):
    submit(pair, "r", CALM, sampling=SamplingParams(seed=7, max_tokens=20))
    assert pair.generated("p0").tenant == CALM
    pair.prefill_done("r")
    assert pair.generated("d0").tenant == CALM


def test_priority_reaches_both_workers(pair):
    submit(pair, "r", 0, priority=-3)
    assert pair.generated("p0").priority == -3
    pair.prefill_done("r")
    assert pair.generated("d0").priority == -3


def test_a_request_that_needs_much_room_keeps_it_from_others_only_after_a_while(full):
    submit(full, "c0", CALM, n=4)
    finish(full, "f0")
    submit(full, "t0", THIRD)
    assert started(full)[-1] == "t0"
    finish(full, "t0")
    full.now += PASS_S
    with pytest.raises(Overloaded):
        submit(full, "f9", FLOOD)
    for number in range(1, 4):
        finish(full, f"f{number}")
    assert started(full)[-1] == "c0"


def test_a_smaller_request_that_is_held_passes_one_that_needs_more(full):
    submit(full, "c0", CALM, n=4)
    submit(full, "t0", THIRD)
    finish(full, "f0")
    assert started(full)[-1] == "t0"


def test_room_of_a_worker_that_has_enough_for_all_is_kept_for_nobody(full):
    submit(full, "c0", CALM)
    full.now += PASS_S
    full.join("a1", max_num_choices=4)
    submit(full, "f9", FLOOD)
    assert started(full, "a1") == ["c0", "f9"]


@pytest.fixture
def uneven(make_bench):
    """A worker with much context and one with little, both full, and a request that only the first can hold."""
    bench = make_bench(max_requests=100)
    bench.join("a0", max_model_len=100, max_num_choices=2)
    bench.join("a1", max_model_len=40, max_num_choices=2)
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "big", CALM, prompt=60)
    return bench


@pytest.mark.parametrize("wait_s", [0.0, PASS_S + 1.0])
def test_room_that_the_next_request_cannot_use_goes_to_the_one_after_it(uneven, wait_s):
    submit(uneven, "small", THIRD)
    uneven.tick(wait_s)
    for name in started(uneven, "a1"):
        finish(uneven, name)
    assert started(uneven, "a1")[-1] == "small"
    submit(uneven, "new", 4)
    assert started(uneven, "a1")[-1] == "new", "big can never run there"
    finish(uneven, started(uneven, "a0")[0])
    assert started(uneven, "a0")[-1] == "big"


def test_room_that_is_kept_for_a_request_is_not_given_to_one_that_could_go_elsewhere(make_bench):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_model_len=100, max_num_choices=2)
    bench.join("a1", max_model_len=40, max_num_choices=2)
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "big", CALM, prompt=60, n=2)
    submit(bench, "small", THIRD)
    bench.tick(PASS_S + 1.0)
    finish(bench, started(bench, "a0")[0])
    assert bench.core.dispatcher.num_waiting == 2
    finish(bench, started(bench, "a1")[0])
    assert started(bench, "a1")[-1] == "small"
    finish(bench, started(bench, "a0")[1])
    assert started(bench, "a0")[-1] == "big"


def test_weights_that_the_next_request_cannot_use_serve_the_one_after_it(make_bench):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=2)
    bench.join("a1", max_num_choices=2, model_fingerprint=b"new")
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "image", CALM, model_fingerprint=b"w")
    submit(bench, "text", THIRD)
    bench.tick(PASS_S + 1.0)
    finish(bench, started(bench, "a1")[0])
    assert started(bench, "a1")[-1] == "text"


@pytest.mark.parametrize("is_draining", [False, True])
def test_room_of_a_worker_that_can_never_hold_the_choices_is_kept_for_nobody(make_bench, is_draining):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=4)
    for number in range(4):
        submit(bench, f"f{number}", FLOOD)
    bench.join("a1", max_num_choices=2)
    submit(bench, "c0", CALM, n=4)
    bench.heartbeat("a0", is_draining=is_draining)
    bench.now += PASS_S
    submit(bench, "t0", THIRD)
    assert started(bench, "a1") == ["t0"]


def test_room_is_kept_for_fewer_choices_also_where_more_wait(make_bench):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=4)
    bench.join("a1", max_num_choices=2)
    for number in range(6):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "c0", CALM, n=4)
    submit(bench, "c1", CALM, n=2)
    bench.now += PASS_S
    finish(bench, started(bench, "a1")[0])
    with pytest.raises(Overloaded):
        submit(bench, "f9", FLOOD)
    finish(bench, started(bench, "a1")[1])
    assert started(bench, "a1")[-1] == "c1"


@pytest.mark.parametrize("is_one_ahead", [False, True])
def test_room_is_kept_for_a_request_also_while_one_ahead_looks_in_its_place(uneven, is_one_ahead):
    finish(uneven, "big")
    for worker in ("a0", "a1"):
        assert len(started(uneven, worker)) == 2
    submit(uneven, "two", CALM, n=2)
    uneven.tick(PASS_S + 1.0)
    if is_one_ahead:
        submit(uneven, "sooner", THIRD, n=2, priority=-1)
    submit(uneven, "long", 4, prompt=60)
    finish(uneven, started(uneven, "a0")[0])
    assert len(started(uneven, "a0")) == 2
    finish(uneven, started(uneven, "a0")[1])
    assert started(uneven, "a0")[-1] == ("sooner" if is_one_ahead else "two")


@pytest.mark.parametrize("wanted", [({"prompt": 60}, {"prompt": 70}), ({"n": 4}, {"n": 3})], ids=["tokens", "choices"])
def test_reason_of_one_request_does_not_tell_another_key_what_it_needs(make_bench, wanted):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_model_len=100, max_num_choices=4)
    bench.join("a1", max_model_len=40, max_num_choices=2)
    for number in range(6):
        submit(bench, f"f{number}", FLOOD)
    submit(bench, "x", CALM, **wanted[0])
    bench.now = 0.5
    submit(bench, "sooner", THIRD, priority=-1, **wanted[1])
    bench.heartbeat("a0", is_draining=True, num_running=4)
    for second in range(1, 11):
        bench.wait(float(second))
        bench.heartbeat("a0", is_draining=True, num_running=4)
        bench.heartbeat("a1", num_running=2)
    message = bench.error("x").message
    assert "take no requests at the moment; no worker could continue the request for 10 s" in message
    assert not re.search(r"90|n = 3", message)


def test_no_room_is_kept_for_a_request_while_its_grammar_is_refused(full):
    submit(full, "c0", CALM, n=2)
    full.tick(PASS_S)
    finish(full, "f0")
    finish(full, "f1")
    full.fails("a0", GRAMMAR, "c0")
    submit(full, "f8", FLOOD)
    submit(full, "f9", FLOOD)
    assert started(full)[-3:] == ["c0", "f8", "f9"]


@pytest.mark.parametrize("other_waits", [False, True])
def test_room_is_kept_for_a_request_at_workers_that_do_not_refuse_its_grammar(two_full, other_waits):
    submit(two_full, "c0", CALM, n=2)
    two_full.tick(PASS_S)
    of_first, of_second = started(two_full, "a0"), started(two_full, "a1")
    for name in of_first[:2]:
        finish(two_full, name)
    two_full.fails("a0", GRAMMAR, "c0")
    two_full.heartbeat("a0", num_running=4)  # of another router, too
    if other_waits:
        submit(two_full, "t0", THIRD)
    finish(two_full, of_second[0])
    with pytest.raises(Overloaded):
        submit(two_full, "f8", FLOOD)
    finish(two_full, of_second[1])
    assert started(two_full, "a1")[-1] == "c0.2"


def start_held(full):
    """Hold a request for two places, then let ``a0`` begin it; join ``a1``."""
    submit(full, "c0", CALM, n=2)
    full.tick(PASS_S)
    finish(full, "f0")
    finish(full, "f1")
    assert started(full)[-1] == "c0"
    full.join("a1", max_num_choices=4)


def test_a_held_request_that_was_lost_and_then_refused_is_held_again(full):
    start_held(full)
    full.leave("a0")
    full.fails("a1", ErrorInfo.of(Overloaded("others were sooner")), "c0.2")
    full.now += 1.0
    full.heartbeat("a1", num_running=3)
    with pytest.raises(Overloaded):
        submit(full, "f8", FLOOD)
    full.heartbeat("a1", num_running=2)
    full.do(full.core.on_timer(full.now))
    assert started(full, "a1")[-1] == "c0.3"


def test_a_held_request_that_was_lost_is_held_again_while_the_others_are_full(full):
    start_held(full)
    full.heartbeat("a1", num_running=4)
    full.leave("a0")
    full.now += 1.0
    full.heartbeat("a1", num_running=3)
    with pytest.raises(Overloaded):
        submit(full, "f8", FLOOD)
    full.heartbeat("a1", num_running=2)
    full.do(full.core.on_timer(full.now))
    assert started(full, "a1")[0] == "c0.2"


def one_is_refused(make_bench, num_of_flood, num_of_calm, why):
    """Return a bench of two keys with so many open requests at a full worker, which has just refused the last one, ``c0``."""
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=num_of_flood + num_of_calm)
    for number in range(num_of_flood):
        submit(bench, f"f{number}", FLOOD)
    for number in reversed(range(num_of_calm)):
        submit(bench, f"c{number}", CALM)
    assert started(bench)[-1] == "c0"
    bench.fails("a0", why, "c0")
    return bench


@pytest.mark.parametrize("why", [GRAMMAR, ErrorInfo.of(Overloaded("full"))], ids=["grammar", "full"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_refused_request_that_makes_its_key_s_share_equal_waits_as_a_new_one_does(make_bench, number, why):
    bench = one_is_refused(make_bench, number, number, why)
    assert "c0" not in bench.ended
    bench.tick(2.0)
    assert started(bench)[-1] == "c0.2"


@pytest.mark.parametrize(("num_of_flood", "num_of_calm"), [(0, 1), (0, 4), (1, 2), (3, 4), (3, 5)])
def test_an_equal_share_is_not_exceeded_by_a_refused_request_either(make_bench, num_of_flood, num_of_calm):
    bench = one_is_refused(make_bench, num_of_flood, num_of_calm, GRAMMAR)
    assert bench.error("c0").http_status == 429


def test_a_request_that_waits_after_a_refusal_does_so_although_its_share_shrinks(make_bench):
    bench = one_is_refused(make_bench, 4, 2, ErrorInfo.of(Overloaded("full")))
    for number in range(3):
        finish(bench, f"f{number}")
    assert "c0" not in bench.ended, "a new one would get 429 until the worker's next heartbeat"
    with pytest.raises(Overloaded):
        submit(bench, "c2", CALM)
    bench.tick(2.0)
    assert started(bench)[-1] == "c0.2"


def test_a_request_that_was_refused_does_not_wait_where_a_new_one_would_not(make_bench):
    bench = make_bench(max_requests=100)
    bench.join("a0", max_num_choices=4)
    for name, tenant in (("f0", FLOOD), ("f1", FLOOD), ("c0", CALM)):
        submit(bench, name, tenant)
    bench.heartbeat("a0", is_draining=True)
    with pytest.raises(NoWorker):
        submit(bench, "c1", CALM)
    bench.fails("a0", ErrorInfo.of(Overloaded("full")), "c0")
    assert bench.error("c0").http_status == 429
