"""Prefill workers that leave the first token to the decode worker, as agents of vLLM servers do."""

from __future__ import annotations

import pytest

from core.wire.messages import Abort, ErrorInfo, Generate, Release, Renew, TokenLogprobs

FULL = ErrorInfo(code="overloaded", message="full", http_status=429, retryable=True)
DEAD = ErrorInfo(code="engine_dead", message="the engine died", http_status=503, retryable=True)


@pytest.fixture
def bench(make_bench):
    bench = make_bench("d0", "d1")
    bench.join("p0", leaves_first_token=True)
    return bench


def computed(bench, request_id="r1", **changes):
    """Let the prefill worker answer without tokens; return the name of the decode worker that got the request."""
    bench.prefill_done(request_id, **{"choices": ()} | changes)
    return bench.sent[-1][0]


def reports(bench):
    return [update.prompt for update in bench.updates["r1"] if update.prompt is not None]


def test_all_tokens_come_from_the_decode_worker(bench):
    bench.submit(n=2)
    bench.now = 1.0
    decode = computed(bench)
    message = bench.generated(decode)
    assert message.kv_handoff == bench.handoff()
    assert [(choice.index, choice.output_token_ids) for choice in message.choices] == [(0, ()), (1, ())]
    assert bench.core.dispatcher.requests["r1"].first_token_at is None
    bench.now = 3.0
    bench.tokens(0, 7, 8, peer=decode, finish_reason="length")
    bench.tokens(0, 9, peer=decode, index=1, finish_reason="stop")
    assert (bench.output(), bench.output(index=1)) == ([7, 8], [9])
    assert bench.ended["r1"].request.first_token_at == 3.0
    assert [report.num_cached_tokens for report in reports(bench)] == [4]
    bench.assert_idle()


@pytest.mark.parametrize("how", ["lost", DEAD, FULL], ids=["lost", "dead", "full"])
def test_another_decode_worker_reads_the_same_handoff(bench, how):
    bench.submit()
    first = computed(bench)
    second = {"d0": "d1", "d1": "d0"}[first]
    if how == "lost":
        bench.leave(first)
    else:
        bench.fails(first, how)
    again = bench.generated(second)
    assert (again.request_id, again.kv_handoff) == ("r1.2", bench.handoff())
    assert len(bench.to("p0", Generate)) == 1, "nothing is computed again"
    assert bench.to("p0", Release) == []
    assert bench.kinds() == ["handoff"]
    assert len(bench.core.dispatcher.requests["r1"].retries.blamed) == (0 if how is FULL else 1)
    bench.tokens(0, 7, peer=second, request_id="r1.2", finish_reason="length")
    assert bench.output() == [7]
    bench.assert_idle()


def test_without_its_prefill_worker_the_next_decode_worker_computes(bench):
    bench.submit()
    first = computed(bench)
    second = {"d0": "d1", "d1": "d0"}[first]
    bench.leave("p0")
    bench.leave(first)
    assert bench.generated(second).kv_handoff is None
    bench.tokens(0, 7, peer=second, request_id="r1.2", finish_reason="length")
    assert bench.output() == [7]


def test_a_prompt_that_was_not_kept_begins_again_when_its_decode_worker_dies(bench):
    rows = (None, TokenLogprobs((1,), (-0.5,), 1))
    bench.submit(prompt_logprobs=0)
    first = computed(bench, kv_handoff=None, prompt_logprobs=rows)
    assert bench.generated(first).sampling.prompt_logprobs is None
    bench.fails(first, DEAD)
    assert bench.generated("p0").request_id == "r1.2", "from the beginning"
    second = computed(bench, "r1.2", prompt_logprobs=rows)
    bench.tokens(0, 7, peer=second, request_id="r1.2", finish_reason="length")
    assert bench.output() == [7]
    assert [report.prompt_logprobs for report in reports(bench)] == [rows], "once"


def test_an_abort_releases_the_handoff_once(bench):
    bench.submit()
    decode = computed(bench)
    bench.do(bench.core.abort("r1", "client", bench.now))
    assert [message.transfer_ids for message in bench.to("p0", Release)] == [("t-r1",)]
    assert len(bench.to(decode, Abort)) == 1
    bench.assert_idle()


def test_the_lease_is_renewed_while_the_request_waits_for_room(bench):
    bench.submit()
    first = computed(bench)
    bench.fails(first, FULL)
    bench.fails({"d0": "d1", "d1": "d0"}[first], FULL, "r1.2")
    bench.tick(25.0)
    assert bench.to("p0", Renew)
    assert "r1" not in bench.ended or bench.ended["r1"].request.error is not None


def test_a_worker_that_does_not_say_so_must_send_the_first_tokens(pair):
    pair.submit()
    pair.prefill_done(choices=())
    assert pair.error().code == "protocol_error"
    assert [message.transfer_ids for message in pair.to("p0", Release)] == [("t-r1",)]
