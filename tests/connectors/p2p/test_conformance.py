"""The conformance suite of connectors, over every transport of the p2p connector."""

from __future__ import annotations

from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import create_transport
from connectors.registry import ConnectorContext
from connectors.testing.connector_pair import FINGERPRINT, INCARNATIONS, LAYOUT
from connectors.testing.connector_suite import ConnectorConformance
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from core.clock import SystemClock
from core.config import ConnectorSection
from core.ids import RandomIds


class P2PConformance(ConnectorConformance):
    transport: ClassVar[str]

    def make_connector(self, role, patience_s):
        settings = {"transports": (self.transport,), "transfer_deadline_s": patience_s, "handshake_timeout_s": patience_s}
        context = ConnectorContext(
            role=role,
            engine_id=f"{role}-0",
            incarnation=INCARNATIONS[role],
            model_fingerprint=FINGERPRINT,
            layout=LAYOUT,
            config=ConnectorSection(**settings),  # not load_config: it knows no "inproc"
            control_address="tcp://127.0.0.1:0",
            advertise_host="",
            clock=SystemClock(),
            ids=RandomIds(),
            metrics=CollectorRegistry(),
        )
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
