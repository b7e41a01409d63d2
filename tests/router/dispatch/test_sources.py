"""Where the beginning of a prompt is loaded from, and what that changes in the cost of a worker."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from core.wire.messages import Generate, PrefillDone, TransferUsage
from core.wire.sampling import SamplingParams
from router.dispatch.offers import report, source_of
from router.dispatch.route_costs import RouteCosts
from router.routing.transfer import FIRST_ASKED_MS, FIRST_BASE_MS, pays
from tests.router.dispatch.test_policy import member

PROMPT = tuple(range(5000))


def serving(worker, **facts):
    name = worker.key.engine_id
    return replace(
        worker, facts=msgspec.structs.replace(worker.facts, prefix_address=f"tcp://{name}:1", num_blocks=1000, **facts)
    )


@pytest.fixture
def prefills():
    return [serving(member("prefill", "p0")), serving(member("prefill", "p1"))]


@pytest.fixture
def decode():
    return serving(member("decode", "d0"))


def compute(costs, worker, prompt=PROMPT, request_id="before", prefill_ms=2000.0):
    """Let a worker have computed a prompt: without reports the router's own placements count as its contents."""
    message = Generate(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5))
    costs.on_sent(worker, message, 0.0)
    costs.on_prefill_done(PrefillDone(request_id=request_id, choices=(), prefill_ms=prefill_ms), 2.0)


def offers(costs, workers, members, prompt=PROMPT):
    found = costs.offers(workers, prompt, (), 3.0, members)
    return {key.engine_id: offer for key, offer in found.items()}


def test_the_decode_worker_that_holds_the_prompt_is_the_source(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode)
    found = offers(costs, prefills, [*prefills, decode])
    for offer in found.values():
        assert offer.source.holder.worker.key == decode.key
        assert offer.own_ms < offer.alone_ms
        source = source_of(offer)
        assert (source.engine_id, source.control_address) == ("d0", "tcp://d0:1")
        assert source.num_tokens > 4900
        assert source.patience_ms == pytest.approx(offer.alone_ms - (offer.own_ms - offer.source.transfer_ms), abs=1)
        assert report(offer, found.values()).source == "d0"
        assert report(offer, found.values()).reason == "source"


def test_those_that_hold_less_are_named_behind_it_if_they_can_be_read(prefills, decode):
    costs = RouteCosts()
    other_model = serving(member("decode", "d9"), model_fingerprint=b"another")
    holders = [decode, prefills[0], other_model]
    for number, worker in enumerate(holders):
        compute(costs, worker, PROMPT[: 5000 - 500 * number], f"r{number}")
    found = offers(costs, prefills, [*prefills, decode, other_model])
    source = source_of(found["p1"])
    assert (source.engine_id, [each.engine_id for each in source.others]) == ("d0", ["p0"])
    assert source.num_tokens > source.others[0].num_tokens > 4400
    assert not source_of(found["p0"]).others  # not itself


def test_only_what_the_reader_lacks_is_loaded(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode)
    compute(costs, prefills[0], PROMPT[:4000], "shorter")
    found = offers(costs, prefills, [*prefills, decode])
    assert found["p0"].source.transfer_ms < found["p1"].source.transfer_ms
    assert found["p0"].score < found["p1"].score


@pytest.mark.parametrize("why", ["serves none", "reads none", "draining", "holds as much", "another model"])
def test_a_worker_that_cannot_help_is_no_source(prefills, decode, why):
    costs = RouteCosts()
    compute(costs, decode)
    match why:
        case "serves none":
            decode = replace(decode, facts=msgspec.structs.replace(decode.facts, prefix_address=""))
        case "reads none":
            prefills = [replace(worker, facts=msgspec.structs.replace(worker.facts, prefix_address="")) for worker in prefills]
        case "draining":
            decode.is_draining = True
        case "holds as much":
            for number, worker in enumerate(prefills):
                compute(costs, worker, request_id=str(number))
        case "another model":
            decode = serving(decode, model_fingerprint=b"other")
    assert all(offer.source is None for offer in offers(costs, prefills, [*prefills, decode]).values())


def test_a_slow_link_is_not_used(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode)
    transport = decode.facts.transports[0] if decode.facts.transports else "shm"
    for _ in range(50):
        costs.sources.observe(TransferUsage(transport=transport, transferred_bytes=1 << 20, transfer_ms=60_000.0))
    assert all(offer.source is None for offer in offers(costs, prefills, [*prefills, decode]).values())


def test_a_block_is_loaded_before_enough_is_measured_to_tell_what_it_saves(prefills, decode):
    """Turn 2 of the first conversation: of one short prompt's time, all but a little may be the fixed time of a step."""
    costs = RouteCosts()
    turns = PROMPT[:86], (*PROMPT[:86], *range(9000, 9030))
    compute(costs, decode, turns[0], prefill_ms=100.0)
    time = costs.prefill_time(prefills[0])
    assert not pays(FIRST_ASKED_MS + FIRST_BASE_MS, time.ms(116, 0), time.ms(52, 64))
    assert offers(costs, prefills, [*prefills, decode], turns[1])["p0"].source is not None
    for number in range(10):
        compute(
            costs, prefills[1], tuple(range(10_000 + 100 * number, 10_000 + 100 * number + 70 + number)), f"{number}", 100.0
        )
    assert offers(costs, prefills, [*prefills, decode], turns[1])["p0"].source is None


def test_a_trial_has_the_time_that_it_is_hoped_to_save(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode, PROMPT[:86], prefill_ms=100.0)
    offer = offers(costs, prefills, [*prefills, decode], (*PROMPT[:86], *range(9000, 9030)))["p0"]
    assert source_of(offer).patience_ms > offer.source.transfer_ms
    assert offer.own_ms < offer.alone_ms


def test_trials_end_where_nothing_is_measured(prefills, decode):
    """Aggregated workers under load: only prompts that meet no other one show what a prompt takes."""
    costs = RouteCosts()
    turns = PROMPT[:86], (*PROMPT[:86], *range(9000, 9030))
    compute(costs, decode, turns[0], prefill_ms=100.0)
    for number in range(8):
        source = source_of(offers(costs, prefills, [*prefills, decode], turns[1])["p0"])
        other = tuple(range(10_000 + 100 * number, 10_090 + 100 * number))
        message = Generate(request_id=f"{number}", prompt_token_ids=other, sampling=SamplingParams(), kv_source=source)
        costs.on_sent(prefills[1], message, 3.0)
    assert offers(costs, prefills, [*prefills, decode], turns[1])["p0"].source is None


def test_the_transfer_of_a_prefill_worker_teaches_the_link_and_not_the_prefill_time(prefills):
    costs = RouteCosts()
    message = Generate(request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=5))
    costs.on_sent(prefills[0], message, 0.0)
    usage = TransferUsage(transport="shm", transferred_tokens=4000, transferred_bytes=1000, transfer_ms=400.0, queue_ms=5.0)
    done = PrefillDone(request_id="a", choices=(), prefill_ms=500.0, num_cached_tokens=4000, kv_transfer=usage)
    costs.on_prefill_done(done, 1.0)
    assert costs.sources.times["shm"].base_ms > FIRST_BASE_MS
    assert costs.sources.asking.ms < FIRST_ASKED_MS
    assert costs.prefill_time(prefills[0]).ms(1000, 4000) == pytest.approx(100.0, rel=0.1)


def prompts_until_a_source_is_used(costs, prefills, decode):
    """Choose the offer without a source again and again; return how often."""
    for number in range(3000):
        offer = offers(costs, prefills, [*prefills, decode])["p0"]
        if offer.source is not None:
            return number
        costs.on_chosen(offer)
    pytest.fail("no source is used any more")


def test_sources_that_answered_late_under_load_are_used_again(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode)
    for _ in range(60):
        costs.sources.asking.observe(4000.0)
    assert 100 < prompts_until_a_source_is_used(costs, prefills, decode) < 2000


def test_sources_behind_a_link_that_was_slow_for_a_while_are_used_again(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode)
    for _ in range(50):
        costs.sources.observe(TransferUsage(transport="shm", transferred_bytes=1 << 20, transfer_ms=60_000.0))
    assert prompts_until_a_source_is_used(costs, prefills, decode) > 100


def test_a_decode_worker_may_load_the_prompt_again_from_who_holds_most(prefills, decode):
    costs = RouteCosts()
    compute(costs, prefills[1])
    source = costs.source_for(decode, PROMPT, (), [*prefills, decode])
    assert source.engine_id == "p1"
    assert costs.source_for(decode, tuple(range(9000, 9500)), (), [*prefills, decode]) is None


def test_a_prompt_that_reads_no_cache_has_no_source_and_none_loses_trust_by_it(prefills, decode):
    costs = RouteCosts()
    compute(costs, decode)
    members = [*prefills, decode]
    source = source_of(offers(costs, prefills, members)["p0"])
    assert all(offer.source is None for offer in costs.offers(prefills, PROMPT, None, 3.0, members).values())
    sampling = SamplingParams(max_tokens=5, prompt_logprobs=0)
    costs.on_sent(prefills[0], Generate(request_id="a", prompt_token_ids=PROMPT, sampling=sampling, kv_source=source), 3.0)
    costs.on_prefill_done(PrefillDone(request_id="a", choices=(), prefill_ms=2000.0), 5.0)
    assert costs.sources.trust.share == 1
    assert not any(time.num_seen for time in costs.sources.times.values())
