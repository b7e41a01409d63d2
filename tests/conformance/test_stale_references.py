"""No stale reference changes an output token, over every transport of connector p2p.

To run a transport of your own through it, derive from ``P2PStaleReferences`` and return yours from ``create``; for a connector
of your own, derive from ``connectors.testing.stale_reference_suite.StaleReferenceSuite`` and make it there.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import TransportSettings, create_transport
from connectors.p2p.transport.interface import Transport
from connectors.p2p.transport.nixl import NixlTransport
from connectors.testing.contexts import connector_context
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.stale_reference_suite import StaleReferenceSuite, SuiteWorker
from core.config_workers import ConnectorSection
from core.ids import RandomIds
from core.wire.kv import KVVerify


class P2PStaleReferences(StaleReferenceSuite):
    """The suite over one transport, by the name under which it is configured."""

    transport: ClassVar[str]
    kv_verify: ClassVar[KVVerify] = "auto"

    def make_connector(self, worker: SuiteWorker) -> P2PConnector:
        context = connector_context(
            worker.role,
            engine_id=f"{worker.role}-{worker.incarnation}",
            incarnation=worker.incarnation,
            model_fingerprint=worker.model_fingerprint,
            layout=worker.layout,
            connector=ConnectorSection(name="test", transports=(self.transport,), kv_verify=self.kv_verify),
        )
        return P2PConnector(context, self.create)

    def create(self, name: str, settings: TransportSettings) -> Transport:
        return create_transport(name, settings)


class TestInproc(P2PStaleReferences):
    transport = "inproc"

    @pytest.fixture(autouse=True)
    def _fabric(self):
        self.fabric = InprocFabric()

    def create(self, name, settings):
        return InprocTransport(self.fabric)


class TestTcp(P2PStaleReferences):
    transport = "tcp"


@pytest.mark.slow
class TestShm(P2PStaleReferences):
    transport = "shm"


@pytest.mark.slow
class TestShmWithDigests(P2PStaleReferences):
    transport = "shm"
    kv_verify = "digest"


@pytest.mark.slow
@pytest.mark.skipif(
    NixlTransport(RandomIds(), "probe").unavailable_reason() is not None, reason="NIXL is not installed: the extra 'nixl'"
)
class TestNixl(P2PStaleReferences):
    transport = "nixl"
