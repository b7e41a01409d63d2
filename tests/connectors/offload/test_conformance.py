"""The suite of tiers, for the arena of a worker's own."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from connectors.offload.arena import offload_connector
from connectors.registry import ConnectorContext
from core.clock import SystemClock
from core.config import ConnectorSection, OffloadSection
from core.ids import RandomIds
from core.testing.connector_pair import FINGERPRINT, LAYOUT
from core.testing.tier_suite import TierConformance


@pytest.fixture
def context():
    def make(**settings):
        return ConnectorContext(
            role="decode",
            engine_id="decode-0",
            incarnation=5,
            model_fingerprint=FINGERPRINT,
            layout=LAYOUT,
            config=ConnectorSection(offload=OffloadSection(**{"memory_bytes": 4 << 20, **settings})),
            control_address="tcp://127.0.0.1:0",
            advertise_host="",
            clock=SystemClock(),
            ids=RandomIds(),
            metrics=CollectorRegistry(),
        )

    return make


class TestOffload(TierConformance):
    @pytest.fixture(autouse=True)
    def _context(self, context):
        self.context = context

    def make_connector(self, name):
        return offload_connector(self.context())

    def damage(self, connector, num_blocks):
        memory = connector._store.machine.memory
        for resident in list(memory._residents.values())[:num_blocks]:
            memory.content(resident)[1000] ^= 1
