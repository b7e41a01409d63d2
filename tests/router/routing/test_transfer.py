"""When loading tokens from another worker is predicted to pay."""

from __future__ import annotations

import pytest

from router.routing.transfer import FIRST_BASE_MS, FIRST_BYTES_PER_MS, TransferTime, pays


def test_before_the_first_transfer_the_figures_are_conservative():
    assert TransferTime().ms(500_000_000) == FIRST_BASE_MS + 500_000_000 / FIRST_BYTES_PER_MS


def test_the_speed_follows_the_transfers():
    slow, fast = TransferTime(), TransferTime()
    for _ in range(60):
        slow.observe(100_000_000, 10_000.0)
        fast.observe(100_000_000, 50.0)
    assert slow.ms(100_000_000) == pytest.approx(10_000.0, rel=0.05)
    assert fast.ms(100_000_000) < 60.0


def test_small_transfers_teach_the_fixed_time_only():
    time = TransferTime()
    for _ in range(60):
        time.observe(1000, 5.0)
    assert time.ms(0) == pytest.approx(5.0, rel=0.05)
    assert time.bytes_per_ms == FIRST_BYTES_PER_MS


def test_transfers_of_nothing_teach_nothing():
    time = TransferTime()
    time.observe(0, 5.0)
    time.observe(1 << 24, 0.0)
    assert (time.num_seen, time.base_ms) == (0, FIRST_BASE_MS)


def test_a_transfer_must_save_clearly_more_than_it_takes():
    assert pays(79.0, compute_ms=150.0, rest_ms=50.0)
    assert not pays(81.0, compute_ms=150.0, rest_ms=50.0)
