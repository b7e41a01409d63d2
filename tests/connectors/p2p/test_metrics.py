"""The connector's metrics, as a scrape shows them."""

import pytest
from prometheus_client import CollectorRegistry

from connectors.p2p.metrics import P2PMetrics
from connectors.reports import LoadEnded
from core.wire.messages import ErrorInfo, TransferUsage


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry) -> P2PMetrics:
    return P2PMetrics(registry)


def test_loads_are_counted_by_transport(metrics, registry):
    for transport, num_bytes in (("tcp", 100), ("shm", 7), ("tcp", 50)):
        cost = TransferUsage(
            transport=transport, transferred_bytes=num_bytes, transfer_ms=500.0, verify_ms=250.0, verified_blocks=2
        )
        metrics.count_load(LoadEnded("r", cost))
    assert registry.get_sample_value("kvferry_kv_transfers_total", {"transport": "tcp"}) == 2
    assert registry.get_sample_value("kvferry_kv_transfer_bytes_total", {"transport": "tcp"}) == 150
    assert registry.get_sample_value("kvferry_kv_transfer_bytes_total", {"transport": "shm"}) == 7
    assert registry.get_sample_value("kvferry_kv_transfer_seconds_sum", {"transport": "tcp"}) == 1.0
    assert registry.get_sample_value("kvferry_kv_verify_seconds_sum", {"transport": "tcp"}) == 0.5
    assert registry.get_sample_value("kvferry_kv_verified_blocks_total") == 6


def test_failures_are_counted_by_the_reason_in_the_answer(metrics, registry):
    for code in ("deadline", "deadline", "lease_expired", "stale", "something else"):
        error = ErrorInfo(code=code, message="no")
        metrics.count_load(LoadEnded("r", TransferUsage(transport="tcp", verified_blocks=1), error, invalid_block_ids=(1,)))
    for reason in ("deadline", "stale"):
        assert registry.get_sample_value("kvferry_kv_transfer_failures_total", {"reason": reason}) == 2
    assert registry.get_sample_value("kvferry_kv_transfer_failures_total", {"reason": "rejected"}) == 1
    assert registry.get_sample_value("kvferry_kv_transfers_total", {"transport": "tcp"}) is None
    assert registry.get_sample_value("kvferry_kv_verified_blocks_total") == 5


def test_aborted_load_is_neither_success_nor_failure(metrics, registry):
    metrics.count_load(LoadEnded("r", None))
    names = ("kvferry_kv_transfers_total", "kvferry_kv_transfer_failures_total")
    assert not any(sample.value for family in registry.collect() for sample in family.samples if sample.name in names)


def test_transport_in_use_reads_one(metrics, registry):
    in_use = {"tcp"}
    metrics.start_transports(("shm", "tcp"), lambda: in_use)
    assert registry.get_sample_value("kvferry_kv_transport_info", {"transport": "shm"}) == 0
    assert registry.get_sample_value("kvferry_kv_transport_info", {"transport": "tcp"}) == 1
    in_use.clear()
    assert registry.get_sample_value("kvferry_kv_transport_info", {"transport": "tcp"}) == 0


def test_gauges_and_events_are_read_at_each_scrape(metrics, registry):
    blocks, events = {"leased": 3, "loading": 4}, {"lease_expired": 0}
    metrics.read_at_scrape(lambda: blocks["leased"], lambda: blocks["loading"], lambda: events)
    assert registry.get_sample_value("kvferry_kv_leased_blocks") == 3
    assert registry.get_sample_value("kvferry_kv_loading_blocks") == 4
    blocks["leased"], events["lease_expired"] = 0, 2
    assert registry.get_sample_value("kvferry_kv_leased_blocks") == 0
    assert registry.get_sample_value("kvferry_kv_handoff_events_total", {"event": "lease_expired"}) == 2


def test_broken_transports_are_counted_by_transport_at_each_scrape(metrics, registry):
    broken = {"tcp": 2}
    metrics.read_broken_transports(("shm", "tcp"), lambda: broken)
    assert registry.get_sample_value("kvferry_kv_broken_transports", {"transport": "tcp"}) == 2
    assert registry.get_sample_value("kvferry_kv_broken_transports", {"transport": "shm"}) == 0
    broken.clear()
    assert registry.get_sample_value("kvferry_kv_broken_transports", {"transport": "tcp"}) == 0
