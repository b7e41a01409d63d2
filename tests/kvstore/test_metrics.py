"""The counts of a store can be scraped, before its first client and after."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvstore.metrics import register_store_metrics
from kvstore.server_state import ServerOptions, ServerState
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import NUM_SLOTS, get, lookup, put


@pytest.fixture
def registry():
    return CollectorRegistry()


def test_a_store_without_clients_reads_zero(registry):
    register_store_metrics(registry, ServerState(ServerOptions(1, pytest.fail)), [])
    assert registry.get_sample_value("kvferry_kvstore_memory_slots") == 0
    assert registry.get_sample_value("kvferry_kvstore_lookup_keys_total") == 0


def test_blocks_pins_and_tiers_are_counted(registry, embedded_store, tmp_path):
    with embedded_store(disk_path=str(tmp_path), disk_bytes=64 << 20) as store:
        register_store_metrics(registry, store.machine, store.workers)
        blocks = [make_block(number) for number in range(3)]
        put(store, blocks)
        assert store.flush()
        lookup(store, [block.key for block in blocks])
        ticket = get(store, [blocks[0].key])

        def value(name, **labels):
            return registry.get_sample_value(f"kvferry_kvstore_{name}", labels)

        assert (value("memory_slots"), value("memory_blocks"), value("pinned_slots")) == (NUM_SLOTS, 3, 1)
        assert (value("put_blocks_total"), value("lookup_hits_total"), value("get_hits_total")) == (3, 3, 1)
        assert (value("tier_blocks", tier="disk"), value("tier_saved_blocks_total", tier="disk")) == (3, 3)
        assert value("tier_used_bytes", tier="disk") > 3 * BLOCK_BYTES
        store.release(ticket)
        assert value("pinned_slots") == 0


def test_every_metric_is_documented_and_no_other(registry, embedded_store, tmp_path):
    page = (Path(__file__).parents[2] / "docs/kvstore.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page[page.index("## Metrics") :], re.MULTILINE)
    documented = {re.sub("_total$", "", name) for row in rows for name in re.findall(r"`([a-z_]+)", row)}
    with embedded_store(disk_path=str(tmp_path), disk_bytes=64 << 20) as store:
        register_store_metrics(registry, store.machine, store.workers)
        assert {f"kvferry_kvstore_{name}" for name in documented} == {family.name for family in registry.collect()}
