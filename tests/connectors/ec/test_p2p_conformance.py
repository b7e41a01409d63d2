"""The suite of EC connectors, for "p2p" over every transport."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from connectors.ec.p2p import P2PECConnector
from connectors.p2p.transport.factory import create_transport
from connectors.testing.contexts import ec_context
from connectors.testing.ec_suite import ECConformance
from connectors.testing.inproc_transport import InprocFabric, InprocTransport

INCARNATIONS = {"encoder": 7, "reader": 8}


class P2PConformance(ECConformance):
    transport: ClassVar[str]

    def make_connector(self, name, is_encoder, settings):
        settings = msgspec.structs.replace(settings, name="test", transports=(self.transport,), handshake_timeout_s=2.0)
        context = ec_context(
            "encode" if is_encoder else "prefill", engine_id=name, incarnation=INCARNATIONS.get(name, 9), ec_connector=settings
        )
        return P2PECConnector(context, self.create)

    def create(self, name, settings):
        return create_transport(name, settings)

    def damage(self, encoder, image):
        item = encoder.connector._offers._chunk_cache.get(image.identifier)
        encoder.connector._memory.rows(item.first_chunk, item.num_embeds)[1000] ^= 1

    async def lose(self, encoder):
        await encoder.connector.stop()

    def num_held(self, side):
        scheduler = side.connector.scheduler
        return scheduler.num_wanted_chunks + scheduler.num_quarantined_chunks + scheduler.num_fetching_items


@pytest.mark.full
class TestInproc(P2PConformance):
    transport = "inproc"

    @pytest.fixture(autouse=True)
    def _fabric(self):
        self.fabric = InprocFabric()

    def create(self, name, settings):
        return InprocTransport(self.fabric)


@pytest.mark.slow
class TestShm(P2PConformance):
    transport = "shm"


class TestTcp(P2PConformance):
    transport = "tcp"


@pytest.mark.full
class TestNixl(P2PConformance):
    transport = "nixl"
