"""A minute of traffic between workers: rates by pair, transports, and bounds."""

from __future__ import annotations

import pytest

from core.wire.messages import TransferUsage
from router.records.traffic import MAX_PAIRS, Traffic

SHM = TransferUsage(transport="shm", transferred_bytes=6000)
FAILED = TransferUsage(fallback_reason="peer_lost")


def test_rates_are_of_the_last_minute():
    traffic = Traffic()
    traffic.on_handoff("p0", "d0", SHM, 0.0)
    for second in range(100, 160):
        traffic.on_handoff("p0", "d1", SHM, second)
    (pair,) = traffic.pairs(160.0)
    assert (pair.prefill, pair.decode, pair.transport) == ("p0", "d1", "shm")
    assert (pair.handoffs_per_s, pair.bytes_per_s) == (1.0, 6000)
    assert traffic.pairs(221.0) == []


def test_the_rates_of_a_young_router_are_not_diluted():
    traffic = Traffic()
    for second in range(10):
        traffic.on_prompt("p0", second)
    assert traffic.prompts_per_s(10.0) == {"p0": 1.0}
    assert traffic.prompts_per_s(1000.0) == {}
    traffic.on_prompt("p0", 1000.0)
    assert traffic.prompts_per_s(1001.0)["p0"] == pytest.approx(1 / 60, abs=1e-3)


def test_a_failed_load_counts_as_handoff_and_keeps_the_transport():
    traffic = Traffic()
    traffic.on_handoff("p0", "d0", SHM, 0.0)
    traffic.on_handoff("p0", "d0", FAILED, 1.0)
    (pair,) = traffic.pairs(10.0)
    assert (pair.handoffs_per_s, pair.failed_per_s, pair.transport) == (0.2, 0.1, "shm")
    assert [traffic.transport(name, 10.0) for name in ("p0", "d0", "d1")] == ["shm", "shm", ""]
    assert traffic.transport("p0", 700.0) == ""


def test_the_busiest_pair_comes_first():
    traffic = Traffic()
    for prefill, count in (("p0", 1), ("p1", 3), ("p2", 2)):
        for _ in range(count):
            traffic.on_handoff(prefill, "d0", SHM, 0.0)
    assert [pair.prefill for pair in traffic.pairs(5.0)] == ["p1", "p2", "p0"]


def test_names_of_workers_cannot_fill_the_memory():
    traffic = Traffic()
    for number in range(2 * MAX_PAIRS):
        traffic.on_handoff(f"p{number}", "d0", SHM, 0.0)
        traffic.on_prompt(f"p{number}", 0.0)
    assert len(traffic.pairs(1.0)) == MAX_PAIRS
    assert len(traffic.prompts_per_s(1.0)) == MAX_PAIRS
    assert len(traffic._transports) <= MAX_PAIRS
