"""The cost of each worker for a prompt, from the router's own messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.kv.hashing import BlockHasher
from core.request import extra_keys_of
from core.wire.contents import ContentReport
from core.wire.messages import Abort, Generate, Heartbeat, PrefillDone, Tokens, Usage
from core.wire.sampling import SamplingParams
from router.dispatch.offers import WorkerOffer, report
from router.dispatch.policy import Demand, choose_route
from router.dispatch.route_costs import RouteCosts
from tests.router.dispatch.test_policy import member
from tests.support.prompt_keys import prompt_keys

PROMPT = tuple(range(2000))


def send(costs, worker, request_id, prompt=PROMPT, now=0.0, **fields):
    sampling = SamplingParams(max_tokens=5, **fields)
    costs.on_sent(worker, Generate(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, handoff=True), now)


def done(costs, request_id, now, prefill_ms=100.0, num_cached_tokens=0, *, tells_hits=True, tells_queue=True):
    message = PrefillDone(
        request_id=request_id,
        choices=(),
        prefill_ms=prefill_ms,
        num_cached_tokens=num_cached_tokens,
        tells_hits=tells_hits,
    )
    costs.on_prefill_done(message, now, tells_queue=tells_queue)


@pytest.fixture
def workers():
    roomy = {"num_blocks": 1000}
    return [replace_facts(member("prefill", "p0"), **roomy), replace_facts(member("prefill", "p1"), **roomy)]


def replace_facts(worker, **facts):
    import msgspec

    return replace(worker, facts=msgspec.structs.replace(worker.facts, **facts))


def offers(costs, workers, prompt=PROMPT, salt="", now=0.0):
    found = costs.offers(workers, prompt, extra_keys_of((), salt), now)
    return {key.engine_id: offer for key, offer in found.items()}


def test_a_worker_with_the_prefix_is_cheapest(workers):
    costs = RouteCosts()
    send(costs, workers[1], "a")
    done(costs, "a", now=1.0)
    found = offers(costs, workers, now=1.0)
    assert found["p1"].hit_tokens > found["p0"].hit_tokens == 0
    assert found["p1"].score < found["p0"].score


def test_a_burst_of_equal_prompts_meets_itself(workers):
    costs = RouteCosts()
    send(costs, workers[0], "a")
    assert offers(costs, workers)["p0"].hit_tokens > 0


def test_queued_prompts_are_waited_for(workers):
    costs = RouteCosts()
    send(costs, workers[0], "a", prompt=tuple(range(5000, 9000)))
    found = offers(costs, workers)
    assert found["p0"].wait_ms > found["p1"].wait_ms == 0


@pytest.mark.parametrize("end", ["abort", "drop", "done"])
def test_a_prompt_that_has_ended_is_not_waited_for(workers, end):
    costs = RouteCosts()
    send(costs, workers[0], "a")
    match end:
        case "abort":
            costs.on_sent(workers[0], Abort(request_ids=("a",), reason="test"), 0.1)
        case "drop":
            costs.drop("a", 0.1)
        case "done":
            done(costs, "a", 0.1)
    assert offers(costs, workers, now=0.1)["p0"].wait_ms == 0


def test_the_prefill_time_is_learned_from_completions(workers):
    costs = RouteCosts()
    for number in range(60):
        prompt = tuple(range(number * 10_000, number * 10_000 + 500 + 37 * number))
        send(costs, workers[0], str(number), prompt, now=float(number))
        done(costs, str(number), number + 0.5, prefill_ms=20 + 2.0 * len(prompt))
    assert costs.prefill_time(workers[1]).ms(1000, 0) == pytest.approx(2020, rel=0.05)


def test_the_queue_of_a_worker_that_does_not_tell_it_is_no_prefill_time(workers):
    costs = RouteCosts()
    for burst in range(6):
        for number in range(10):
            first = 2000 * (10 * burst + number)
            send(costs, workers[0], f"{burst}.{number}", tuple(range(first, first + 2000)), now=10.0 * burst)
        for number in range(10):
            stay_ms = 100.0 * (number + 1)
            done(costs, f"{burst}.{number}", 10.0 * burst + stay_ms / 1e3, prefill_ms=stay_ms, tells_queue=False)
    assert costs.prefill_time(workers[0]).ms(2000, 0) == pytest.approx(100, rel=0.05)


def test_a_worker_that_left_is_forgotten(workers):
    costs = RouteCosts()
    send(costs, workers[0], "a")
    costs.forget(workers[0].key)
    assert offers(costs, workers)["p0"].hit_tokens == 0
    done(costs, "a", 1.0)


def test_hits_that_do_not_come_true_lose_their_credit(workers):
    costs = RouteCosts()
    for number in range(8):
        send(costs, workers[0], str(number), now=float(number))
        done(costs, str(number), number + 0.5, num_cached_tokens=0)
    assert offers(costs, workers, now=9.0)["p0"].hit_tokens == 0
    assert costs._workers[workers[0].key].accuracy.is_wrong


def truthful(costs, worker):
    """Let a worker compute a prompt, and then find all of it a few times; 10 s."""
    for number in range(10):
        send(costs, worker, f"before {number}", now=float(number))
        found = {"num_cached_tokens": 1984, "prefill_ms": 10.0} if number else {}
        done(costs, f"before {number}", number + 0.1, **found)


def test_a_prompt_that_reads_no_cache_does_not_judge_its_worker(workers):
    costs = RouteCosts()
    truthful(costs, workers[0])
    counted = costs.num_predicted_hit_tokens, costs.num_real_hit_tokens
    for number in range(5):
        send(costs, workers[0], str(number), now=10.0 + number, prompt_logprobs=0)
        done(costs, str(number), 10.1 + number, num_cached_tokens=0)
    assert costs._workers[workers[0].key].accuracy.share == 1
    assert offers(costs, workers, now=20.0)["p0"].hit_tokens == 1984
    assert (costs.num_predicted_hit_tokens, costs.num_real_hit_tokens) == counted


def test_a_prompt_that_reads_no_cache_is_expected_to_be_computed_whole(workers):
    costs = RouteCosts()
    truthful(costs, workers[0])
    cold = costs.offers(workers, PROMPT, None, 10.0)
    assert {offer.hit_tokens for offer in cold.values()} == {0}
    assert cold[workers[0].key].own_ms > offers(costs, workers, now=10.0)["p0"].own_ms
    send(costs, workers[0], "cold", now=10.0, prompt_logprobs=0)
    assert costs.num_queued_tokens(workers[0].key) == len(PROMPT)
    assert costs.wait_s(workers[0], 10.0) == pytest.approx(cold[workers[0].key].own_ms / 1e3)


def test_a_salt_separates_equal_prompts(workers):
    costs = RouteCosts()
    send(costs, workers[0], "a")
    assert offers(costs, workers, salt="tenant")["p0"].hit_tokens == 0


def test_routing_by_load_offers_nothing(workers):
    costs = RouteCosts()
    costs.is_enabled = False
    send(costs, workers[0], "a")
    assert costs.offers(workers, PROMPT, (), 0.0) == {}


def test_the_cheapest_pair_is_chosen_before_the_least_loaded(workers):
    decode = member("decode", "d0")
    busy = replace(workers[0], num_running=3)
    route = choose_route([busy, workers[1], decode], Demand(num_tokens=10, costs={busy.key: 5.0, workers[1].key: 9.0}))
    assert route.prefill is busy


def test_the_decode_worker_that_holds_fewer_tokens_is_chosen(workers):
    full = replace(member("decode", "d0"), num_inflight_tokens=900)
    route = choose_route([workers[0], full, member("decode", "d1")], Demand(num_tokens=10))
    assert route.decode.key.engine_id == "d1"


def test_patient_workers_compute_short_prompts_first(workers):
    patient = [replace_facts(worker, has_patience=True) for worker in workers]
    costs = RouteCosts()
    send(costs, patient[0], "running", prompt=tuple(range(3000)))
    send(costs, patient[0], "long", prompt=tuple(range(100_000, 150_000)))
    short = tuple(range(60_000, 60_100))
    found = offers(costs, patient, prompt=short)["p0"]
    assert 0 < found.patience_ms < offers(costs, patient, prompt=tuple(range(10_000)))["p0"].patience_ms
    assert found.score > found.wait_ms + 3 * found.own_ms  # the long one waits for it
    costs.drop("long", 0.0)
    assert offers(costs, patient, prompt=short)["p0"].wait_ms == found.wait_ms


def test_workers_in_order_of_arrival_get_no_patience(workers):
    costs = RouteCosts()
    assert offers(costs, workers)["p0"].patience_ms == 0


def offer(score, hit_tokens=0):
    return WorkerOffer(hit_tokens=hit_tokens, patience_ms=0.0, wait_ms=10.0, own_ms=20.0, score=score)


@pytest.mark.parametrize(
    ("chosen", "other", "reason"),
    [
        (offer(1, hit_tokens=64), offer(2), "prefix"),
        (offer(1), offer(2, hit_tokens=64), "wait"),
        (offer(1), offer(2), "load"),
        (offer(2, hit_tokens=64), offer(1), "availability"),
    ],
)
def test_the_reason_of_a_placement(chosen, other, reason):
    found = report(chosen, [chosen, other])
    assert (found.reason, found.candidates, found.predicted_ttft_ms) == (reason, 2, 30.0)


def test_predicted_and_real_hits_are_counted(workers):
    costs = RouteCosts()
    for number in range(2):
        send(costs, workers[0], str(number))
        done(costs, str(number), 1.0, num_cached_tokens=640 * number)
    assert (costs.num_predicted_hit_tokens, costs.num_real_hit_tokens) == (1984, 640)


def first_token(costs, request_id, now, num_cached_tokens=0):
    usage = Usage(num_cached_tokens=num_cached_tokens)
    costs.on_tokens(Tokens(request_id, 0, 0, (7,), usage=usage), now)


@pytest.fixture
def aggregated():
    return replace_facts(member("aggregated", "a0"), num_blocks=1000)


def test_the_prefill_time_of_an_aggregated_worker_is_learned_from_first_tokens(aggregated):
    costs = RouteCosts()
    for number in range(5):
        prompt = tuple(range(number, number + 2000))
        send(costs, aggregated, f"r{number}", prompt, now=10.0 * number)
        first_token(costs, f"r{number}", now=10.0 * number + 4.0)
    assert costs.prefill_time(aggregated).ms(2000, 0) == pytest.approx(4000, rel=0.05)


def test_a_prompt_that_waited_teaches_no_prefill_time(aggregated):
    costs = RouteCosts()
    send(costs, aggregated, "first", now=0.0)
    send(costs, aggregated, "second", tuple(range(5000, 7000)), now=0.0)
    first_token(costs, "first", now=1.0)
    learned = costs.prefill_time(aggregated)
    first_token(costs, "second", now=2.0)
    assert costs.prefill_time(aggregated) == learned
    assert not offers(costs, [aggregated], (1,), now=2.0)["a0"].wait_ms


def heartbeat(costs, worker, now, num_prompts=0, num_tokens=0):
    """Let a worker tell of the queued prompts of other routers."""
    message = Heartbeat(
        engine_id=worker.key.engine_id,
        incarnation=worker.key.incarnation,
        num_queued_prompts_of_others=num_prompts,
        num_queued_tokens_of_others=num_tokens,
    )
    costs.on_heartbeat(worker, message, now)


def test_a_prompt_behind_those_of_another_router_teaches_no_prefill_time(aggregated):
    costs = RouteCosts()
    learned = costs.prefill_time(aggregated)
    heartbeat(costs, aggregated, 0.0, num_prompts=2, num_tokens=20_000)
    send(costs, aggregated, "behind", now=0.0)
    first_token(costs, "behind", now=2.2)
    assert costs.prefill_time(aggregated) == learned
    heartbeat(costs, aggregated, 3.0)
    send(costs, aggregated, "alone", now=3.0)
    first_token(costs, "alone", now=3.2)
    assert costs.prefill_time(aggregated).ms(2000, 0) == pytest.approx(200, rel=0.05)


def test_prompts_of_another_router_are_waited_for_one_by_one(workers):
    """Their pairs of tokens do not count across prompts."""
    costs = RouteCosts()
    each_ms = costs.prefill_time(workers[0]).ms(8000, 0)
    heartbeat(costs, workers[0], 0.0, num_prompts=30, num_tokens=240_000)
    assert offers(costs, workers)["p0"].wait_ms == pytest.approx(30 * each_ms)
    heartbeat(costs, workers[0], 0.0, num_tokens=8000)  # a worker of an earlier release
    assert offers(costs, workers)["p0"].wait_ms == pytest.approx(each_ms)


def test_the_error_of_the_prefill_time_is_that_of_present_pools_that_are_known_well(workers):
    costs = RouteCosts()
    old = replace_facts(member("prefill", "old"), model_fingerprint=b"old", num_blocks=1000)
    for worker, num_prompts in ((old, 9), (workers[0], 9)):
        costs.join(worker)
        for number in range(num_prompts):
            name = f"{worker.key.engine_id}.{number}"
            send(costs, worker, name, tuple(range(9000 * number, 9000 * number + 1000 + number)))
            done(costs, name, 1.0, prefill_ms=100.0 if worker is workers[0] or number % 2 else 900.0)
            if number == 0:
                assert costs.mean_error() == 0 or worker is workers[0]  # one prompt says nothing
    assert costs.mean_error() > 0.5
    costs.forget(old.key)
    assert 0 < costs.mean_error() < 0.5


def test_an_answer_that_comes_as_a_whole_teaches_no_prefill_time(aggregated):
    costs = RouteCosts()
    learned = costs.prefill_time(aggregated)
    send(costs, aggregated, "a", prompt_logprobs=0)
    whole = Tokens("a", 0, 0, (7,) * 500, finish_reason="length", usage=Usage(num_cached_tokens=0, is_late=True))
    costs.on_tokens(whole, 20.0, tells_hits=False)
    assert costs.prefill_time(aggregated) == learned
    assert not offers(costs, [aggregated], now=20.0)["a0"].wait_ms
    assert costs._unjudged == {}
    send(costs, aggregated, "b", tuple(range(5000, 7000)), now=30.0)
    costs.on_tokens(Tokens("b", 0, 0, (7,), finish_reason="length", usage=Usage()), 30.4, tells_hits=False)
    assert costs.prefill_time(aggregated).ms(2000, 0) == pytest.approx(400, rel=0.05)


def test_real_hits_of_an_aggregated_worker_count(aggregated):
    costs = RouteCosts()
    for number in range(6):
        send(costs, aggregated, f"r{number}", now=float(number))
        first_token(costs, f"r{number}", now=number + 0.5)
    assert costs._workers[aggregated.key].accuracy.is_wrong
    assert costs.num_real_hit_tokens == 0 < costs.num_predicted_hit_tokens


def test_before_its_first_prompt_a_role_takes_the_time_of_another(workers, aggregated):
    costs = RouteCosts()
    for number in range(5):
        send(costs, workers[0], f"r{number}", tuple(range(number, number + 2000)), now=10.0 * number)
        done(costs, f"r{number}", now=10.0 * number + 1.0, prefill_ms=1000.0)
    assert costs.prefill_time(aggregated) == costs.prefill_time(workers[0])
    other_model = replace_facts(aggregated, model_fingerprint=b"other")
    assert costs.prefill_time(other_model).ms(2000, 0) < 500


@pytest.mark.parametrize(("own_salt", "other_salt"), [("a", "b"), ("a", ""), ("", "b")])
def test_no_salt_finds_what_another_one_has_placed_or_reported(workers, own_salt, other_salt):
    costs = RouteCosts()
    costs.join(workers[0])
    keys = prompt_keys(BlockHasher(b"w"), PROMPT, extra_keys_of((), own_salt), 64)
    stored = b"".join(key.to_bytes(8, "little") for key in keys)
    costs.on_report(workers[0].key, ContentReport(engine_id="p0", incarnation=1, number=0, is_snapshot=True, stored=stored))
    costs.on_sent(
        workers[1],
        Generate(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(), cache_salt=own_salt),
        0.0,
    )
    own, other = offers(costs, workers, salt=own_salt), offers(costs, workers, salt=other_salt)
    assert min(own["p0"].hit_tokens, own["p1"].hit_tokens) > 0
    assert other["p0"].hit_tokens == other["p1"].hit_tokens == 0


def test_a_fair_worker_makes_no_key_wait_for_a_flood_of_another(workers):
    costs = RouteCosts()
    fair = replace_facts(workers[0], has_fair_shares=True)
    for number in range(20):
        for worker in (fair, workers[1]):
            prompt = tuple(range(number * 1000, number * 1000 + 500))
            name = f"{worker.key.engine_id}.{number}"
            message = Generate(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(), tenant=1)
            costs.on_sent(worker, message, 0.0)
    found = {
        tenant: costs.offers([fair, workers[1]], tuple(range(90_000, 90_500)), (), 0.0, tenant=tenant) for tenant in (1, 2)
    }
    assert found[1][fair.key].wait_ms == found[1][workers[1].key].wait_ms == found[2][workers[1].key].wait_ms
    assert 0 < found[2][fair.key].wait_ms < 0.2 * found[1][fair.key].wait_ms


@pytest.mark.parametrize(("score", "reason"), [(100.0, "load"), (101.0, "session"), (120.0, "availability")])
def test_a_choice_by_session_says_so(score, reason):
    best = WorkerOffer(0, 0.0, 0.0, 50.0, 100.0)
    chosen = WorkerOffer(0, 0.0, 0.0, 50.0, score)
    assert report(chosen, [best, chosen], slack_ms=2.5).reason == reason


def test_a_worker_that_does_not_tell_its_hits_is_believed(aggregated):
    costs = RouteCosts()
    for number in range(12):
        send(costs, aggregated, str(number), now=float(number))
        usage = Usage(num_cached_tokens=0)
        costs.on_tokens(Tokens(str(number), 0, 0, (7,), usage=usage), number + 0.5, tells_hits=False)
    assert costs.offers([aggregated], PROMPT, (), 20.0)[aggregated.key].hit_tokens > 1900
    assert not costs._workers[aggregated.key].accuracy.is_wrong
    assert costs.num_real_hit_tokens == costs.num_predicted_hit_tokens == 0  # nobody can compare them


def test_a_prefill_worker_that_does_not_tell_its_hits_is_believed(workers):
    costs = RouteCosts()
    for number in range(12):
        send(costs, workers[0], str(number), now=float(number))
        done(costs, str(number), number + 0.5, prefill_ms=10.0 if number else 100.0, tells_hits=False)
    found = offers(costs, workers, now=20.0)
    assert found["p0"].hit_tokens > 1900
    assert (found["p0"].own_ms < 20, found["p1"].own_ms > 80) == (True, True)
    assert not costs._workers[workers[0].key].accuracy.is_wrong
    assert costs.num_real_hit_tokens == costs.num_predicted_hit_tokens == 0


def streamed(costs, worker, request_id, found, *, is_late=True, now=0.0):
    """Let a worker answer that tells with the last of three tokens what it had found."""
    send(costs, worker, request_id, now=now)
    costs.on_tokens(Tokens(request_id, 0, 0, (7,), usage=Usage()), now, tells_hits=False)
    costs.on_tokens(Tokens(request_id, 0, 1, (8,)), now, tells_hits=False)
    last = Usage(num_cached_tokens=found, is_late=is_late)
    costs.on_tokens(Tokens(request_id, 0, 2, (9,), finish_reason="length", usage=last), now, tells_hits=False)


@pytest.mark.parametrize(("is_late", "is_wrong"), [(True, True), (False, False)])
def test_a_worker_that_tells_its_hits_with_the_last_token_is_judged_by_them(aggregated, is_late, is_wrong):
    costs = RouteCosts()
    for number in range(12):
        streamed(costs, aggregated, str(number), found=0, is_late=is_late, now=float(number))
    assert costs._workers[aggregated.key].accuracy.is_wrong == is_wrong
    assert costs._unjudged == {}


def test_the_choice_that_computes_the_prompt_judges_it_also_if_another_ends_first(aggregated):
    costs = RouteCosts()
    send(costs, aggregated, "r")
    for index in (0, 1):
        costs.on_tokens(Tokens("r", index, 0, (7,), usage=Usage()), 0.0, tells_hits=False)
    for index, found in ((2, 1984), (1, 1984), (0, 5)):
        last = Usage(num_cached_tokens=found, is_late=True)
        costs.on_tokens(Tokens("r", index, 1, (9,), finish_reason="stop", usage=last), 1.0, tells_hits=False)
    costs.on_sent(aggregated, Abort(request_ids=("r/1",), reason="stop"), 1.0)
    assert costs.num_real_hit_tokens == 5


def test_answers_that_were_placed_before_a_snapshot_judge_nothing_after_it(aggregated):
    costs = RouteCosts()
    costs.join(aggregated)
    send(costs, aggregated, "r")
    costs.on_tokens(Tokens("r", 0, 0, (7,), usage=Usage()), 0.0, tells_hits=False)
    costs.on_report(aggregated.key, ContentReport(engine_id="a0", incarnation=1, number=0, is_snapshot=True, stored=b""))
    assert costs._unjudged == {}


def test_late_hits_that_come_true_count(aggregated):
    costs = RouteCosts()
    for number in range(6):
        streamed(costs, aggregated, str(number), found=1984 if number else 0)
    assert not costs._workers[aggregated.key].accuracy.is_wrong
    assert costs.num_predicted_hit_tokens == costs.num_real_hit_tokens == 5 * 1984


@pytest.mark.parametrize("end", ["abort", "abort of its choice", "fail", "leave", "again"])
def test_an_answer_without_a_last_token_leaves_nothing_to_judge(aggregated, end):
    costs = RouteCosts()
    send(costs, aggregated, "r")
    costs.on_tokens(Tokens("r", 0, 0, (7,), usage=Usage()), 0.0, tells_hits=False)
    assert "r" in costs._unjudged
    match end:
        case "abort":
            costs.on_sent(aggregated, Abort(request_ids=("r",)), 1.0)
        case "abort of its choice":
            costs.on_sent(aggregated, Abort(request_ids=("r/0",), reason="stop"), 1.0)
        case "fail":
            costs.drop("r", 1.0)
        case "leave":
            costs.forget(aggregated.key)
        case "again":
            send(costs, aggregated, "r", now=1.0)
    assert costs._unjudged == {}
