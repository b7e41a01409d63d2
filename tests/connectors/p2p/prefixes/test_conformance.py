"""The conformance suite of prefixes from other workers, over transports of the p2p connector."""

from __future__ import annotations

from typing import ClassVar

import pytest

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import create_transport
from connectors.testing.connector_pair import INCARNATIONS
from connectors.testing.contexts import connector_context
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.prefix_suite import ROLES, PrefixConformance
from core.config_workers import ConnectorSection, WorkerSection


class P2PPrefixes(PrefixConformance):
    transport: ClassVar[str]

    def make_connector(self, engine_id):
        role = ROLES[engine_id]
        sections = {
            "connector": ConnectorSection(name="test", transports=(self.transport,), peer_prefixes=True),
            "worker": WorkerSection(control_address="tcp://127.0.0.1:0"),
        }
        context = connector_context(role, engine_id=engine_id, incarnation=INCARNATIONS[role], **sections)
        return P2PConnector(context, self.create)

    def create(self, name, settings):
        return create_transport(name, settings)


class TestInproc(P2PPrefixes):
    transport = "inproc"

    @pytest.fixture(autouse=True)
    def _fabric(self):
        self.fabric = InprocFabric()

    def create(self, name, settings):
        return InprocTransport(self.fabric)


@pytest.mark.slow
class TestInprocWithLateBytes(TestInproc):
    def create(self, name, settings):
        return InprocTransport(self.fabric, late_bytes=True)


@pytest.mark.slow
class TestTcp(P2PPrefixes):
    transport = "tcp"


@pytest.mark.slow
class TestShm(P2PPrefixes):
    transport = "shm"
