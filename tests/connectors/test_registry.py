"""Connectors by name."""

import pytest

from connectors.ec.p2p import P2PECConnector
from connectors.ec.store_connector import StoreECConnector
from connectors.p2p.connector import P2PConnector
from connectors.registry import connector_factory, ec_connector_factory
from connectors.testing.contexts import connector_context
from core.errors import ConfigError

FACTORIES = {"connector.name": connector_factory, "ec_connector.name": ec_connector_factory}


def test_connectors_are_found_by_their_entry_points():
    assert connector_factory("p2p") is P2PConnector
    assert ec_connector_factory("p2p") is P2PECConnector
    assert ec_connector_factory("shared") is StoreECConnector


def test_no_ec_connector_is_a_name_too():
    assert ec_connector_factory("none") is None


def test_second_worker_of_a_process_finds_the_same_connector():
    """Importing the module of a connector must not change what its entry point names."""
    for _ in range(2):
        assert isinstance(connector_factory("p2p")(connector_context("prefill")), P2PConnector)


@pytest.mark.parametrize("setting", FACTORIES)
def test_unknown_name_lists_the_known_ones(setting):
    with pytest.raises(ConfigError, match=rf"{setting} = 'carrier-pigeon'.*known: .*p2p") as caught:
        FACTORIES[setting]("carrier-pigeon")
    assert caught.value.param == setting


@pytest.mark.parametrize("setting", FACTORIES)
def test_connector_that_is_not_installed_is_named_by_module_and_factory(setting):
    assert FACTORIES[setting]("connectors.p2p.connector:P2PConnector") is P2PConnector


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:connector", "No module named 'no_such_module'; install it, or set PYTHONPATH to the folder"),
        ("no_such_module.part:connector", "No module named 'no_such_module'; install it"),
        ("connectors.no_such_part:connector", r"No module named 'connectors.no_such_part'$"),
        ("connectors.p2p:carrier_pigeon", "no attribute 'carrier_pigeon'"),
        ("connectors.p2p:", "no attribute ''"),
        (":connector", "Empty module name"),
        ("connectors.registry:CONNECTORS", "CONNECTORS is not callable"),
    ],
)
def test_factory_that_cannot_be_imported_is_told_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        connector_factory(name)
    assert caught.value.param == "connector.name"
    assert repr(name) in caught.value.message


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_p2p_connector_is_built_before_anything_of_it_runs(role):
    built = P2PConnector(connector_context(role))
    assert built.num_leased_blocks() == built.num_loading_blocks() == 0
    assert built.transports == ()  # known after start
