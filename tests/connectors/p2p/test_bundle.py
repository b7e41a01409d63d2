"""The p2p connector's start refuses what its peers could not use."""

import pytest
from prometheus_client import CollectorRegistry

from connectors.p2p.bundle import P2PConnector
from connectors.registry import ConnectorContext
from core.clock import SystemClock
from core.config import load_config
from core.errors import ConfigError
from core.ids import RandomIds
from core.testing.connector_suite import FINGERPRINT, LAYOUT


def never(name, settings):
    raise AssertionError("no transport was expected to be opened")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
async def test_wildcard_without_an_advertised_host_is_refused_before_anything_is_open(address):
    context = ConnectorContext(
        role="prefill",
        engine_id="prefill-0",
        incarnation=1,
        model_fingerprint=FINGERPRINT,
        layout=LAYOUT,
        config=load_config().connector,
        control_address=address,
        advertise_host="",
        clock=SystemClock(),
        ids=RandomIds(),
        metrics=CollectorRegistry(),
    )
    connector = P2PConnector(context, never)
    connector.worker.register_kv_caches(object())
    with pytest.raises(ConfigError, match="set it to the host name") as caught:
        await connector.start()
    assert caught.value.param == "worker.advertise_host"
    await connector.stop()
