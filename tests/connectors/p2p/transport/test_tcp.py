from pathlib import Path

import pytest

from connectors.p2p.transport.tcp import TcpTransport
from core.errors import ConfigError
from core.ids import RandomIds
from core.testing.transport_suite import TransportSuite

FACTORIES = Path(__file__).with_name("transport_factories.py")


class TestTcpTransport(TransportSuite):
    factory = f"{FACTORIES}:make_tcp"


def test_wildcard_is_bound_only_under_another_name():
    nameless = TcpTransport(RandomIds(), "tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match=r"worker\.advertise_host"):
        nameless.describe()
    nameless.close()
    named = TcpTransport(RandomIds(), "tcp://0.0.0.0:0", "pod-3")
    assert b"tcp://pod-3:" in named.describe()
    named.close()
