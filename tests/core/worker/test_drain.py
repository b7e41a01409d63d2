from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.worker.drain import DrainPhases

moments = st.sampled_from([0.0, 1.0, 5.0, 10.0, 10.5, 30.0])


@given(timeout_s=moments, lease_s=moments, now=moments, num_requests=st.integers(0, 1))
def test_the_next_look_is_always_ahead(timeout_s, lease_s, now, num_requests):
    drain = DrainPhases()
    drain.start(0.0, timeout_s)
    drain.is_over(0.0, num_requests, 1, lease_s)
    drain.is_over(now, num_requests, 1, lease_s)
    assert now < drain.next_timer(now, 0.1) <= now + 0.1


def test_who_serves_is_neither_out_of_time_nor_over():
    drain = DrainPhases()
    assert not drain.is_draining
    assert not drain.is_out_of_time(1e9)
    assert not drain.is_over(1e9, 0, 0, 0.0)
    assert drain.next_timer(1e9, 0.1) is None


def test_renewals_move_the_end_of_readers_no_more():
    drain = DrainPhases()
    drain.start(0.0, 10.0)
    assert not drain.is_over(5.0, 0, 3, 20.0)
    assert not drain.is_over(24.0, 0, 3, 20.0)
    assert drain.is_over(25.0, 0, 3, 20.0)
