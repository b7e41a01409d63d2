"""The conformance suites of connectors and of early pulls, over every transport of the p2p connector."""

from __future__ import annotations

from typing import ClassVar

import pytest

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import create_transport
from connectors.testing.connector_pairs import ConnectorPairs
from connectors.testing.connector_suite import ConnectorConformance
from connectors.testing.contexts import connector_context
from connectors.testing.early_suite import EarlyPullConformance
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from core.config_workers import ConnectorSection


class P2PPairs(ConnectorPairs):
    transport: ClassVar[str]
    kv_verify: ClassVar[str] = "auto"
    copies_from_devices = False

    def make_connector(self, role, patience_s):
        section = ConnectorSection(
            name="test",
            transports=(self.transport,),
            transfer_deadline_s=patience_s,
            handshake_timeout_s=patience_s,
            kv_verify=self.kv_verify,
        )
        context = connector_context(role, connector=section)
        return P2PConnector(context, self.create)

    def create(self, name, settings):
        return create_transport(name, settings)

    def num_loading_blocks(self, connector):
        return connector.num_loading_blocks() + connector.num_quarantined_blocks()


class OverInproc(P2PPairs):
    transport = "inproc"
    late_bytes = False

    @pytest.fixture(autouse=True)
    def _fabric(self):
        self.fabric = InprocFabric()

    def create(self, name, settings):
        return InprocTransport(self.fabric, late_bytes=self.late_bytes)


class OverTcp(P2PPairs):
    transport = "tcp"
    copies_from_devices = True


class OverShm(P2PPairs):
    transport = "shm"


class OverNixl(P2PPairs):
    transport = "nixl"


class TestInproc(OverInproc, ConnectorConformance):
    meets_producers = True
    can_be_damaged = False


@pytest.mark.slow
class TestInprocWithLateBytes(TestInproc):
    late_bytes = True


@pytest.mark.slow
class TestInprocWithDigests(TestInproc):
    kv_verify = "digest"
    can_be_damaged = True


class TestTcp(OverTcp, ConnectorConformance):
    meets_producers = True


@pytest.mark.slow
class TestShm(OverShm, ConnectorConformance):
    meets_producers = True
    can_be_damaged = False


@pytest.mark.slow
class TestNixl(OverNixl, ConnectorConformance):
    meets_producers = True
    can_be_damaged = False


class TestEarlyInproc(OverInproc, EarlyPullConformance):
    pass


@pytest.mark.slow
class TestEarlyInprocWithLateBytes(TestEarlyInproc):
    late_bytes = True


@pytest.mark.slow
class TestEarlyTcp(OverTcp, EarlyPullConformance):
    pass


@pytest.mark.slow
class TestEarlyShm(OverShm, EarlyPullConformance):
    pass


@pytest.mark.slow
class TestEarlyNixl(OverNixl, EarlyPullConformance):
    pass
