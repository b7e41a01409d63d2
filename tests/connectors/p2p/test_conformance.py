"""The conformance suite of connectors, over every transport of the p2p connector."""

from __future__ import annotations

from typing import ClassVar

import pytest

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import create_transport
from connectors.testing.connector_suite import ConnectorConformance
from connectors.testing.contexts import connector_context
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from core.config_workers import ConnectorSection


class P2PConformance(ConnectorConformance):
    transport: ClassVar[str]

    def make_connector(self, role, patience_s):
        settings = {"transports": (self.transport,), "transfer_deadline_s": patience_s, "handshake_timeout_s": patience_s}
        context = connector_context(role, connector=ConnectorSection(name="test", **settings))
        return P2PConnector(context, self.create)

    def create(self, name, settings):
        return create_transport(name, settings)

    def num_loading_blocks(self, connector):
        return connector.num_loading_blocks() + connector.num_quarantined_blocks()


class TestInproc(P2PConformance):
    transport = "inproc"

    @pytest.fixture(autouse=True)
    def _fabric(self):
        self.fabric = InprocFabric()

    def create(self, name, settings):
        return InprocTransport(self.fabric)


class TestInprocWithLateBytes(TestInproc):
    def create(self, name, settings):
        return InprocTransport(self.fabric, late_bytes=True)


class TestTcp(P2PConformance):
    transport = "tcp"


class TestShm(P2PConformance):
    transport = "shm"


@pytest.mark.slow
class TestNixl(P2PConformance):
    transport = "nixl"
