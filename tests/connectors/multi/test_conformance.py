"""The conformance suite of connectors, for handoff and tiers at once: p2p keeps its promises together with others."""

from __future__ import annotations

import pytest

from connectors.multi.connector import MultiConnector
from connectors.offload.arena import offload_connector
from connectors.p2p.connector import P2PConnector
from connectors.store.shared import store_connector
from connectors.testing.connector_pairs import ConnectorPairs
from connectors.testing.connector_suite import ConnectorConformance
from connectors.testing.contexts import connector_context
from connectors.testing.early_suite import EarlyPullConformance
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from core.config_workers import ConnectorSection, KVStoreSection, OffloadSection

ARENA_BYTES = 4 << 20


class Pairs(ConnectorPairs):
    copies_from_devices = False

    @pytest.fixture(autouse=True)
    def _fabric(self):
        self.fabric = InprocFabric()

    def make_connector(self, role, patience_s):
        context = connector_context(
            role,
            connector=ConnectorSection(
                name="test",
                transports=("inproc",),
                transfer_deadline_s=patience_s,
                handshake_timeout_s=patience_s,
                offload=OffloadSection(memory_bytes=ARENA_BYTES),
            ),
            kvstore=KVStoreSection(memory_bytes=ARENA_BYTES),
        )
        p2p = P2PConnector(context, lambda name, settings: InprocTransport(self.fabric))
        return MultiConnector([p2p, offload_connector(context), store_connector(context)])

    def num_loading_blocks(self, connector):
        p2p, *_tiers = connector._connectors
        return p2p.num_loading_blocks() + p2p.num_quarantined_blocks()


@pytest.mark.slow
class TestWithTiers(Pairs, ConnectorConformance):
    meets_producers = True
    can_be_damaged = False


@pytest.mark.slow
class TestEarlyWithTiers(Pairs, EarlyPullConformance):
    pass
