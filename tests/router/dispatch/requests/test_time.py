"""Deadlines and leases under a clock that the test moves."""

from __future__ import annotations

from core.wire.messages import Generate, Renew
from router.dispatch.request_state import RequestPhase


def test_the_deadline_ends_a_request_in_any_phase(make_bench):
    bench = make_bench("p0", "d0", "a0")
    bench.submit("r1")
    bench.submit("r2")
    bench.prefill_done("r1")
    bench.tick(59.9)
    assert bench.ended == {}
    bench.tick(60.0)
    assert {bench.error("r1").code, bench.error("r2").code} == {"deadline_exceeded"}
    assert bench.error("r1").http_status == 504
    bench.assert_idle()


def test_the_deadline_travels_as_what_is_left(pair):
    pair.submit()
    pair.now = 12.0
    pair.prefill_done()
    assert pair.to("d0", Generate)[0].deadline_ms == 48_000


def test_the_lease_is_renewed_until_decode_shows_a_token(pair):
    pair.submit()
    pair.prefill_done()
    pair.tick(4.0)
    assert pair.to("p0", Renew) == []
    pair.tick(10.0)
    pair.tick(14.0)
    pair.tick(20.0)
    assert pair.to("p0", Renew) == [Renew(transfer_ids=("t-r1",))] * 2
    pair.tokens(1, 51)
    pair.tick(30.0)
    assert len(pair.to("p0", Renew)) == 2


def test_leases_of_one_worker_are_renewed_together(pair):
    for request_id in ("r1", "r2"):
        pair.submit(request_id)
        pair.prefill_done(request_id)
    pair.tick(10.0)
    assert pair.to("p0", Renew) == [Renew(transfer_ids=("t-r1", "t-r2"))]


def test_a_handoff_is_renewed_until_every_choice_has_shown_a_token(after_handoff):
    after_handoff.tokens(1, 60, index=0)
    after_handoff.tick(10.0)
    assert len(after_handoff.to("p0", Renew)) == 1
    after_handoff.tokens(1, 61, index=1)
    after_handoff.tick(20.0)
    assert len(after_handoff.to("p0", Renew)) == 1


def test_a_choice_that_has_ended_is_not_waited_for(after_handoff):
    after_handoff.do(after_handoff.core.finish_choice("r1", 1, after_handoff.now))
    after_handoff.tokens(1, 60, index=0)
    assert after_handoff.count(RequestPhase.DECODE) == 1
