"""Which EC connector the settings mean, and which settings mean none."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from connectors.ec.p2p import P2PECConnector
from connectors.ec.registry import build_ec_connector
from connectors.ec.store_connector import StoreECConnector
from core.clock import SystemClock
from core.config import load_config
from core.ec_connector import EmbeddingsLayout
from core.errors import ConfigError, ConnectorUnavailable
from core.ids import RandomIds


def build(role, *assignments):
    host = SimpleNamespace(
        config=load_config(None, assignments),
        role=role,
        engine_id="worker",
        incarnation=1,
        clock=SystemClock(),
        ids=RandomIds(),
        metrics=CollectorRegistry(),
    )
    return build_ec_connector(host, b"model")


def test_none_is_the_default():
    assert build("prefill") is None


@pytest.mark.parametrize(
    ("role", "name", "kind"),
    [
        ("encode", "p2p", P2PECConnector),
        ("prefill", "p2p", P2PECConnector),
        ("decode", "p2p", P2PECConnector),
        ("encode", "shared", StoreECConnector),
        ("prefill", "shared", StoreECConnector),
        ("aggregated", "shared", StoreECConnector),
    ],
)
def test_connector_of_a_name(role, name, kind):
    connector = build(role, f"ec_connector.name={name}", "kvstore.address=tcp://127.0.0.1:9")
    assert isinstance(connector, kind)
    assert connector.name == name


@pytest.mark.parametrize(
    ("assignments", "param"),
    [
        (["ec_connector.name=disk"], "ec_connector.name"),
        (["ec_connector.name=p2p", "ec_connector.transports=[driver-pigeon]"], "ec_connector.transports"),
        (["ec_connector.name=shared"], "ec_connector.kvstore_address"),
        (["ec_connector.name=shared", "ec_connector.kvstore_address=here"], "ec_connector.kvstore_address"),
        (
            ["ec_connector.name=shared", "connector.name=store", "kvstore.address=tcp://127.0.0.1:9"],
            "kvstore.block_bytes",
        ),
    ],
)
def test_settings_that_lead_nowhere_are_refused(assignments, param):
    with pytest.raises(ConfigError) as caught:
        load_config(None, assignments)
    assert caught.value.param == param


def test_a_store_of_their_own_lets_embeddings_and_blocks_differ_in_size():
    own = "ec_connector.kvstore_address=tcp://127.0.0.1:9"
    load_config(None, ["ec_connector.name=shared", own])
    load_config(None, ["ec_connector.name=shared", "connector.name=store", "kvstore.address=tcp://127.0.0.1:8", own])


def test_memory_for_less_than_a_chunk_is_refused_by_its_setting():
    connector = build("prefill", "ec_connector.name=p2p", "ec_connector.memory_bytes=100")
    with pytest.raises(ConfigError) as caught:
        connector.worker.register_caches(EmbeddingsLayout(8, "float32"))
    assert caught.value.param == "ec_connector.memory_bytes"


async def test_wildcard_without_an_advertised_host_is_refused_where_others_read():
    connector = build("encode", "ec_connector.name=p2p", "worker.control_address=tcp://0.0.0.0:0")
    connector.worker.register_caches(EmbeddingsLayout(8, "float32"))
    with pytest.raises(ConfigError, match="set it to the host name"):
        await connector.start()
    await connector.stop()


async def test_no_transport_at_all_is_refused():
    connector = build("prefill", "ec_connector.name=p2p", "ec_connector.transports=[]")
    connector.worker.register_caches(EmbeddingsLayout(8, "float32"))
    with pytest.raises(ConnectorUnavailable):
        await connector.start()
    await connector.stop()
