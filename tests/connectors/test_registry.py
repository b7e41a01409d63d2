"""Connectors by name."""

from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from connectors import p2p, registry
from connectors.p2p.connector import P2PConnector
from connectors.registry import connector_builder, connector_factory
from core.config import KVFerryConfig, load_config
from core.errors import ConfigError
from core.ids import IdSource, SeededIds
from core.testing.clock import FakeClock
from core.wire.kv import KVLayoutInfo

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=32, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=1024)


@dataclass
class Host:
    config: KVFerryConfig
    role: str
    clock: FakeClock
    ids: IdSource
    metrics: CollectorRegistry
    engine_id: str = "prefill-3"
    incarnation: int = 12


@pytest.fixture
def host() -> Host:
    assignments = ["worker.control_address=tcp://127.0.0.1:0", "worker.advertise_host=pod-3", "connector.lease_s=12"]
    return Host(load_config(assignments=assignments), "prefill", FakeClock(), SeededIds(1), CollectorRegistry())


def test_p2p_is_found_by_its_entry_point():
    assert connector_factory("p2p") is p2p.make_connector


def test_second_worker_of_a_process_finds_the_same_connector(host):
    """The entry point's name must not be that of a module: importing the module would take its place."""
    connector_builder("p2p")(host, LAYOUT, b"fingerprint")
    host.metrics = CollectorRegistry()
    assert isinstance(connector_builder("p2p")(host, LAYOUT, b"fingerprint"), P2PConnector)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'carrier-pigeon'.*known: .*p2p") as caught:
        connector_factory("carrier-pigeon")
    assert caught.value.param == "connector.name"


def test_unknown_name_is_told_before_a_model_is_loaded():
    with pytest.raises(ConfigError):
        connector_builder("carrier-pigeon")


def test_connector_that_is_not_installed_is_named_by_module_and_factory():
    assert connector_factory("connectors.p2p:make_connector") is p2p.make_connector


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:connector", "No module named 'no_such_module'"),
        ("connectors.p2p:carrier_pigeon", "no attribute 'carrier_pigeon'"),
        ("connectors.p2p:", "no attribute ''"),
        (":connector", "Empty module name"),
        ("connectors.registry:ENTRY_POINT_GROUP", "ENTRY_POINT_GROUP is not callable"),
    ],
)
def test_factory_that_cannot_be_imported_is_told_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        connector_factory(name)
    assert caught.value.param == "connector.name"
    assert repr(name) in caught.value.message


def test_builder_hands_on_everything_of_its_host(host, monkeypatch):
    contexts = []
    monkeypatch.setattr(registry, "connector_factory", lambda name: contexts.append)
    connector_builder("any")(host, LAYOUT, b"fingerprint")
    (context,) = contexts
    assert (context.role, context.engine_id, context.incarnation) == ("prefill", "prefill-3", 12)
    assert (context.model_fingerprint, context.layout) == (b"fingerprint", LAYOUT)
    assert (context.control_address, context.advertise_host) == ("tcp://127.0.0.1:0", "pod-3")
    assert context.config is host.config.connector
    assert (context.clock, context.ids, context.metrics) == (host.clock, host.ids, host.metrics)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_p2p_connector_is_built_before_anything_of_it_runs(host, role):
    host.role = role
    built = connector_builder("p2p")(host, LAYOUT, b"fingerprint")
    assert isinstance(built, P2PConnector)
    assert built.num_leased_blocks() == built.num_loading_blocks() == 0
    assert built.transports == ()  # known after start
