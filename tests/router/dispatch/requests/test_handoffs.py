"""Requests that pass from prefill to decode worker without failures."""

from __future__ import annotations

import pytest

from core.wire.messages import Abort, Generate, PrefillChoice, Release, TokenLogprobs, Tokens, Usage


def test_a_request_goes_to_prefill_then_to_decode_and_ends(pair):
    pair.submit(max_tokens=3)
    first = pair.to("p0", Generate)[0]
    assert (first.handoff, first.kv_handoff, first.choices, first.deadline_ms) == (True, None, (), 60_000)
    assert pair.to("d0", Generate) == []

    pair.prefill_done()
    second = pair.to("d0", Generate)[0]
    assert second.kv_handoff == pair.handoff()
    assert [(choice.index, choice.output_token_ids) for choice in second.choices] == [(0, (50,))]
    assert (second.prompt_token_ids, second.sampling) == (first.prompt_token_ids, first.sampling)
    assert pair.updates["r1"][0].prompt.num_cached_tokens == 4

    pair.tokens(1, 51)
    pair.tokens(2, 52, finish_reason="length")
    assert pair.output() == [50, 51, 52]
    assert pair.ended["r1"].request.error is None
    assert pair.to("p0", Release) == []
    assert pair.to("p0", Abort) == pair.to("d0", Abort) == []
    pair.assert_idle()


def test_a_handoff_without_transports_passes_through_shared_storage(make_bench):
    """Its decode worker looks for the prompt's KV by itself: in a store, say."""
    bench = make_bench()
    for name in ("p0", "d0"):
        bench.join(name, transports=())
    bench.submit(max_tokens=3)
    bench.prefill_done(kv_handoff=None)
    (second,) = bench.to("d0", Generate)
    assert second.kv_handoff is None
    assert [choice.output_token_ids for choice in second.choices] == [(50,)]
    bench.tokens(1, 51)
    bench.tokens(2, 52, finish_reason="length")
    assert bench.output() == [50, 51, 52]
    assert bench.ended["r1"].request.error is None
    bench.assert_idle()


def test_an_aggregated_worker_serves_alone(make_bench):
    bench = make_bench("a0")
    bench.submit()
    message = bench.to("a0", Generate)[0]
    assert not message.handoff
    bench.tokens(0, 50, peer="a0", usage=Usage(num_cached_tokens=3, prompt_logprobs=(None,)))
    bench.tokens(1, 51, peer="a0", finish_reason="stop", usage=Usage(num_cached_tokens=3))
    assert bench.output() == [50, 51]
    reports = [update.prompt for update in bench.updates["r1"]]
    assert reports[0].num_cached_tokens == 3
    assert reports[0].prompt_logprobs == (None,)
    assert reports[1] is None
    bench.assert_idle()


def test_a_request_that_ends_at_its_first_token_needs_no_decode_worker(pair):
    pair.submit(max_tokens=1)
    pair.prefill_done(choices=(PrefillChoice(index=0, token_id=50, finish_reason="length"),), kv_handoff=None)
    assert pair.to("d0", Generate) == []
    assert pair.output() == [50]
    assert pair.ended["r1"].request.finish_reasons == ["length"]
    pair.assert_idle()


def test_a_needless_handoff_is_released(pair):
    pair.submit(max_tokens=1)
    pair.prefill_done(choices=(PrefillChoice(index=0, token_id=50, finish_reason="length"),))
    assert pair.to("p0", Release) == [Release(transfer_ids=("t-r1",))]
    pair.assert_idle()


def test_several_choices_share_one_prefill_and_only_live_ones_continue(pair):
    pair.submit(n=3)
    ended = PrefillChoice(index=1, token_id=2, finish_reason="stop", stop_reason=2)
    pair.prefill_done(choices=(PrefillChoice(index=0, token_id=50), ended, PrefillChoice(index=2, token_id=52)))
    assert [choice.index for choice in pair.to("d0", Generate)[0].choices] == [0, 2]
    pair.tokens(1, 60, index=2, finish_reason="stop")
    assert "r1" not in pair.ended
    pair.tokens(1, 61, index=0, finish_reason="stop")
    assert (pair.output(index=0), pair.output(index=1), pair.output(index=2)) == ([50, 61], [2], [52, 60])
    assert "r1" in pair.ended
    pair.assert_idle()


def test_logprobs_pass_through(pair):
    pair.submit(logprobs=1)
    entry = TokenLogprobs((50, 50), (-0.5, -0.5), 1)
    pair.prefill_done(choices=(PrefillChoice(index=0, token_id=50, logprobs=entry),), prompt_logprobs=(None, entry))
    pair.tokens(1, 51, logprobs=(entry,))
    assert [update.choices[0].logprobs for update in pair.updates["r1"]] == [(entry,), (entry,)]
    assert pair.updates["r1"][0].prompt.prompt_logprobs == (None, entry)


def test_tokens_of_one_frame_make_one_update_per_request(make_bench):
    bench = make_bench("a0")
    bench.submit("r1", n=2)
    bench.submit("r2")
    bench.receive("a0", [Tokens("r1", 0, 0, (1,)), Tokens("r2", 0, 0, (2,)), Tokens("r1", 1, 0, (3,))])
    assert len(bench.updates["r1"]) == len(bench.updates["r2"]) == 1
    assert [choice.index for choice in bench.updates["r1"][0].choices] == [0, 1]


@pytest.mark.parametrize("policy", ["recompute", "fail", None])
def test_the_failure_policy_travels_on_both_legs(pair, policy):
    pair.do(pair.core.submit(pair.submission(kv_load_failure_policy=policy), 0.0))
    pair.prefill_done()
    assert [pair.generated(name).kv_load_failure_policy for name in ("p0", "d0")] == [policy, policy]
