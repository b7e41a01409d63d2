"""Which settings of EC connectors are refused, and when."""

from dataclasses import replace

import pytest

from connectors.registry import ec_connector_factory
from connectors.testing.contexts import ec_context
from core.config import load_config
from core.ec_connector import EmbeddingsLayout
from core.errors import ConfigError


def build(role, *assignments):
    config = load_config(None, assignments)
    return ec_connector_factory(config.ec_connector.name)(replace(ec_context(role), config=config))


@pytest.mark.parametrize(
    ("assignments", "param"),
    [
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


def test_no_transport_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"ec_connector\.transports is empty"):
        build("prefill", "ec_connector.name=p2p", "ec_connector.transports=[]")
