"""What the connector counts, as a scrape shows it."""

import pytest
from prometheus_client import CollectorRegistry

from connectors.p2p.metrics import P2PMetrics
from core.wire.messages import TransferUsage


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry) -> P2PMetrics:
    return P2PMetrics(registry)


def test_loads_are_counted_by_transport(metrics, registry):
    for transport, num_bytes in (("tcp", 100), ("shm", 7), ("tcp", 50)):
        metrics.count_load(TransferUsage(transport=transport, transferred_bytes=num_bytes, transfer_ms=500.0))
    assert registry.get_sample_value("kvferry_kv_transfers_total", {"transport": "tcp"}) == 2
    assert registry.get_sample_value("kvferry_kv_transfer_bytes_total", {"transport": "tcp"}) == 150
    assert registry.get_sample_value("kvferry_kv_transfer_bytes_total", {"transport": "shm"}) == 7
    assert registry.get_sample_value("kvferry_kv_transfer_seconds_sum", {"transport": "tcp"}) == 1.0


def test_failures_are_counted_by_code(metrics, registry):
    metrics.count_failure("deadline")
    metrics.count_failure("deadline")
    metrics.count_failure("stale")
    assert registry.get_sample_value("kvferry_kv_transfer_failures_total", {"reason": "deadline"}) == 2
    assert registry.get_sample_value("kvferry_kv_transfer_failures_total", {"reason": "stale"}) == 1


def test_transport_in_use_reads_one(metrics, registry):
    metrics.set_transport("shm", is_used=False)
    metrics.set_transport("tcp", is_used=False)
    metrics.set_transport("tcp", is_used=True)
    assert registry.get_sample_value("kvferry_kv_transport_info", {"transport": "shm"}) == 0
    assert registry.get_sample_value("kvferry_kv_transport_info", {"transport": "tcp"}) == 1


def test_gauges_and_events_are_read_at_each_scrape(metrics, registry):
    blocks, events = {"leased": 3, "loading": 4}, {"lease_expired": 0}
    metrics.read_at_scrape(lambda: blocks["leased"], lambda: blocks["loading"], lambda: events)
    assert registry.get_sample_value("kvferry_kv_leased_blocks") == 3
    assert registry.get_sample_value("kvferry_kv_loading_blocks") == 4
    blocks["leased"], events["lease_expired"] = 0, 2
    assert registry.get_sample_value("kvferry_kv_leased_blocks") == 0
    assert registry.get_sample_value("kvferry_kv_handover_events_total", {"event": "lease_expired"}) == 2
