from pathlib import Path

from core.testing.transport_suite import TransportSuite

FACTORIES = Path(__file__).with_name("transport_factories.py")


class TestTcpTransport(TransportSuite):
    factory = f"{FACTORIES}:make_tcp"
