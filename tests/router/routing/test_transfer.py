"""When loading tokens from another worker is predicted to pay."""

from __future__ import annotations

import pytest

from router.routing.transfer import (
    FIRST_ASKED_MS,
    FIRST_BASE_MS,
    FIRST_BYTES_PER_MS,
    TRIAL_SPEED,
    AskTime,
    SourceTrust,
    TransferTime,
    pays,
    trial_rest_ms,
)


def test_an_unknown_link_is_tried_and_a_failed_trial_makes_the_figures_conservative():
    time = TransferTime()
    assert time.ms(500_000_000) == FIRST_BASE_MS + 500_000_000 / FIRST_BYTES_PER_MS / TRIAL_SPEED
    time.fail()
    assert time.ms(500_000_000) > FIRST_BASE_MS + 500_000_000 / FIRST_BYTES_PER_MS


def test_a_first_transfer_that_is_slow_to_open_the_peer_does_not_condemn_the_link():
    time = TransferTime()
    time.observe(5_000_000, 1000.0)
    assert time.ms(5_000_000) < 2 * (FIRST_BASE_MS + 5_000_000 / FIRST_BYTES_PER_MS)


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


def test_a_large_transfer_that_takes_less_than_the_fixed_time_corrects_it():
    time = TransferTime()
    for _ in range(60):
        time.observe(3_000_000, 2.0)
    assert time.ms(3_000_000) == pytest.approx(2.0, rel=0.1)


def test_a_source_that_answers_late_once_does_not_count_as_slow():
    asking = AskTime()
    asking.observe(60_000.0)
    assert asking.ms < 2 * FIRST_ASKED_MS
    for _ in range(60):
        asking.observe(3.0)
    assert asking.ms == pytest.approx(3.0, rel=0.1)
    asking.observe(0.0)
    assert asking.ms > 0


def test_slow_sources_are_asked_again_after_a_while():
    asking = AskTime()
    for _ in range(30):
        asking.observe(1500.0)
    assert asking.ms > 1000.0
    for _ in range(1000):
        asking.recover()
    assert FIRST_ASKED_MS < asking.ms < 200.0
    fast = AskTime(ms=3.0)
    fast.recover()
    assert fast.ms == 3.0


def test_a_trial_takes_all_tokens_to_cost_alike():
    assert trial_rest_ms(200.0, 100, 25) == 50.0


def test_transfers_of_nothing_teach_nothing():
    time = TransferTime()
    time.observe(0, 5.0)
    time.observe(1 << 24, 0.0)
    assert (time.num_seen, time.base_ms) == (0, FIRST_BASE_MS)


def test_sources_that_bring_less_than_they_claimed_count_less_and_are_tried_again():
    trust = SourceTrust()
    assert trust.credit(1000) == 1000
    for _ in range(40):
        trust.observe(1000, 0)
    assert trust.credit(1000) < 50
    for _ in range(500):
        trust.recover()
    assert trust.credit(1000) == 1000
    trust.observe(0, 0)
    assert trust.share == 1.0


def test_a_transfer_must_save_clearly_more_than_it_takes():
    assert pays(79.0, compute_ms=150.0, rest_ms=50.0)
    assert not pays(81.0, compute_ms=150.0, rest_ms=50.0)


def test_a_link_that_was_slow_for_a_while_is_used_again():
    link = TransferTime()
    for _ in range(20):
        link.observe(100_000_000, 50.0)
    usual_ms = link.ms(100_000_000)
    for _ in range(6):
        link.observe(100_000_000, 5000.0)
    link.observe(1000, 5000.0)
    assert link.ms(100_000_000) > 4 * usual_ms
    for _ in range(3000):
        link.recover()
    assert usual_ms < link.ms(100_000_000) < 1.5 * usual_ms


def test_a_link_that_was_never_fast_recovers_to_the_first_figures():
    link = TransferTime()
    for _ in range(60):
        link.fail()
    for _ in range(3000):
        link.recover()
    assert link.ms(500_000_000) == pytest.approx(FIRST_BASE_MS + 500_000_000 / FIRST_BYTES_PER_MS, rel=0.1)


def test_a_fast_link_that_was_only_seen_once_does_not_recover_to_slower_figures():
    link = TransferTime()
    link.observe(900_000, 0.3)
    seen_ms = link.ms(100_000_000)
    for _ in range(1000):
        link.recover()
    assert link.ms(100_000_000) <= seen_ms
