"""Pairs whose handoffs keep failing are avoided while there is another."""

from __future__ import annotations

import pytest

from core.errors import TransferTimeout
from core.wire.messages import ErrorInfo, TransferUsage, Usage


def serve(bench, request_id: str, reason: str = "") -> tuple[str, str]:
    """Serve a request whose handoff ends for this reason; return its workers."""
    bench.submit(request_id, max_tokens=2)
    request = bench.core.dispatcher.requests[request_id]
    prefill, decode = request.attempt.prefill.engine_id, request.attempt.decode.engine_id
    bench.prefill_done(request_id, prefill)
    cost = TransferUsage(fallback_reason=reason)
    bench.tokens(1, 51, peer=decode, request_id=request_id, usage=Usage(kv_transfer=cost), finish_reason="length")
    return prefill, decode


@pytest.mark.parametrize("reason", ["deadline", "peer_lost"])
def test_a_pair_that_cannot_handoff_is_avoided_for_a_while(make_bench, reason):
    bench = make_bench("p0", "d0", "d1", max_requests=9)
    served = [serve(bench, f"r{number}", reason if number % 2 == 0 else "") for number in range(4)]
    assert served == [("p0", "d0"), ("p0", "d1")] * 2
    assert [serve(bench, f"s{number}")[1] for number in range(4)] == ["d1"] * 4
    bench.tick(120.0)
    assert {serve(bench, f"t{number}")[1] for number in range(4)} == {"d0", "d1"}


def test_a_pair_whose_handoffs_end_requests_is_avoided_as_well(make_bench):
    """Under the load failure policy "fail"."""
    bench = make_bench("p0", "d0", "d1", max_requests=9)
    for number in range(4):
        if number % 2:
            serve(bench, f"r{number}")
            continue
        bench.submit(f"r{number}")
        bench.prefill_done(f"r{number}")
        bench.fails("d0", ErrorInfo.of(TransferTimeout("late")), f"r{number}")
        assert bench.error(f"r{number}").code == TransferTimeout.code
    assert [serve(bench, f"s{number}")[1] for number in range(4)] == ["d1"] * 4


def test_the_only_pair_is_used_however_often_it_fails(make_bench):
    bench = make_bench("p0", "d0", max_requests=9)
    assert [serve(bench, f"r{number}", "deadline") for number in range(5)] == [("p0", "d0")] * 5


def test_a_handoff_goes_to_a_worker_that_can_read_it(make_bench):
    bench = make_bench("p0", "d0", "d1", "d2", max_requests=9)
    for number in range(6):
        serve(bench, f"r{number}", "deadline" if number % 3 == 1 else "")
    bench.submit("r9")
    bench.leave(bench.core.dispatcher.requests["r9"].attempt.decode.engine_id)
    bench.heartbeat("d2", num_running=3)
    bench.prefill_done("r9")
    assert bench.core.dispatcher.requests["r9"].attempt.decode.engine_id == "d2", "it has more to do than d1"


def test_the_choices_of_one_handoff_count_as_one_failure(make_bench):
    bench = make_bench("p0", "d0", "d1", max_requests=9)
    bench.submit("r1", n=3)
    decode = bench.core.dispatcher.requests["r1"].attempt.decode.engine_id
    bench.prefill_done("r1", n=3)
    usage = Usage(kv_transfer=TransferUsage(fallback_reason="deadline"))
    for index in range(3):
        bench.tokens(1, 51, peer=decode, request_id="r1", index=index, usage=usage, finish_reason="length")
    assert bench.core.dispatcher._pairs.bad(bench.now) == frozenset()


def test_pairs_of_a_worker_that_has_left_are_forgotten(make_bench):
    bench = make_bench("p0", "d0", max_requests=9)
    for number in range(2):
        serve(bench, f"r{number}", "deadline")
    assert len(bench.core.dispatcher._pairs.bad(bench.now)) == 1
    bench.leave("d0")
    assert bench.core.dispatcher._pairs.bad(bench.now) == frozenset()


def test_a_pair_whose_worker_left_during_the_handoff_is_not_remembered(make_bench):
    bench = make_bench("p0", "d0", max_requests=9)
    bench.submit("r", max_tokens=2)
    bench.prefill_done("r")
    bench.leave("p0")
    usage = Usage(kv_transfer=TransferUsage(fallback_reason="peer_lost"))
    bench.tokens(1, 51, peer="d0", request_id="r", usage=usage, finish_reason="length")
    bench.tick(1200.0)
    assert bench.core.dispatcher._pairs.bad(bench.now) == frozenset()
    assert len(bench.core.dispatcher._pairs) == 0
