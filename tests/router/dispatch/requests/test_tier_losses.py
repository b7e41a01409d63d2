"""Failed loads from a tier: usage reports them, and no handoff is counted."""

from __future__ import annotations

import pytest

from core.wire.messages import PrefillChoice, TransferUsage, Usage

LOST = TransferUsage(
    transport="offload",
    transferred_tokens=16,
    transferred_bytes=2048,
    transfer_ms=3.0,
    verified_blocks=1,
    recomputed_tokens=32,
    fallback_reason="digest",
)
TRANSFERRED = TransferUsage(transport="shm", transferred_tokens=10, verified_blocks=1)


def last_report(bench):
    return [update.handoff for update in bench.updates["r1"] if update.handoff is not None][-1]


def lost_by(bench):
    cost = last_report(bench).cost
    return cost.recomputed_tokens, cost.fallback_reason


@pytest.fixture
def alone(make_bench):
    """Return a bench whose request r1 has begun on an aggregated worker."""
    bench = make_bench("a0", "a1")
    bench.submit()
    return bench


def test_aggregated_worker_reports_what_its_tier_has_lost(alone):
    alone.tokens(0, 50, peer="a0", usage=Usage(num_cached_tokens=3, kv_transfer=LOST))
    alone.tokens(1, 51, peer="a0", usage=Usage(num_cached_tokens=3, kv_transfer=LOST), finish_reason="stop")
    report = last_report(alone)
    assert (report.cost, report.first_token, report.second_token) == (LOST, None, None)
    assert report.outcome is None, "there was no handoff"
    alone.assert_idle()


def test_tier_that_has_lost_nothing_is_not_told(alone):
    loaded = TransferUsage(transport="offload", transferred_tokens=48, verified_blocks=3)
    alone.tokens(0, 50, peer="a0", usage=Usage(num_cached_tokens=48, kv_transfer=loaded), finish_reason="stop")
    assert [update.handoff for update in alone.updates["r1"]] == [None]


def test_choices_of_an_aggregated_worker_add_up_what_they_have_lost(make_bench):
    bench = make_bench("a0")
    bench.submit(n=2)
    bench.tokens(0, 50, peer="a0", index=0, usage=Usage(kv_transfer=LOST))
    bench.tokens(0, 50, peer="a0", index=1, usage=Usage(kv_transfer=LOST))
    assert lost_by(bench) == (64, "digest")


def test_what_a_lost_aggregated_worker_had_told_stands(alone):
    alone.tokens(0, 50, peer="a0", usage=Usage(kv_transfer=LOST))
    alone.leave("a0")
    alone.tokens(1, 51, peer="a1", request_id="r1.2", usage=Usage(kv_transfer=TransferUsage()), finish_reason="stop")
    assert lost_by(alone) == (32, "digest")
    assert last_report(alone).num_retries == 1


def test_successor_of_an_aggregated_worker_tells_its_own_loss(alone):
    alone.tokens(0, 50, peer="a0", usage=Usage())
    alone.leave("a0")
    alone.tokens(1, 51, peer="a1", request_id="r1.2", usage=Usage(kv_transfer=LOST), finish_reason="stop")
    assert lost_by(alone) == (32, "digest")


def test_prefill_worker_reports_what_its_tier_has_lost(pair):
    pair.submit()
    pair.prefill_done(recomputed_tokens=6, fallback_reason="store_miss")
    assert lost_by(pair) == (6, "store_miss")
    assert last_report(pair).outcome is None, "the handoff is not over yet"
    pair.tokens(1, 51, usage=Usage(kv_transfer=TRANSFERRED), finish_reason="stop")
    report = last_report(pair)
    assert lost_by(pair) == (6, "store_miss")
    assert (report.cost.transport, report.cost.transferred_tokens) == ("shm", 10)
    assert report.outcome == "loaded", "the tier of the prefill worker says nothing of the handoff"


def test_request_that_ends_on_the_prefill_worker_tells_its_loss(pair):
    pair.submit(max_tokens=1)
    only = PrefillChoice(index=0, token_id=50, finish_reason="length")
    pair.prefill_done(choices=(only,), kv_handoff=None, recomputed_tokens=6, fallback_reason="digest")
    assert lost_by(pair) == (6, "digest")
    pair.assert_idle()


def test_reason_of_the_handoff_comes_before_that_of_the_prefill_worker(pair):
    pair.submit()
    pair.prefill_done(recomputed_tokens=6, fallback_reason="store_miss")
    cost = TransferUsage(recomputed_tokens=10, fallback_reason="peer_lost")
    pair.tokens(1, 51, usage=Usage(kv_transfer=cost), finish_reason="stop")
    assert lost_by(pair) == (16, "peer_lost")
    assert last_report(pair).outcome == "peer_lost"


def test_decode_worker_alone_counts_no_token_twice(make_bench):
    bench = make_bench("p0", "d0")
    bench.leave("p0")
    bench.submit()
    bench.tokens(0, 50, usage=Usage(num_cached_tokens=4, kv_transfer=LOST), finish_reason="stop")
    assert lost_by(bench) == (6, "no_prefill")
    assert last_report(bench).outcome == "no_prefill"
