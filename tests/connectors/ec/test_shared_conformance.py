"""The suite of EC connectors, for "shared": over an arena that is mapped, and over frames."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
import pytest

from connectors.ec.store_connector import StoreECConnector
from connectors.testing.contexts import ec_context
from connectors.testing.ec_suite import CHUNK_BYTES, ECConformance
from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.ids import RandomIds
from kvstore import client as kvstore_client
from kvstore.arena import round_slot_bytes
from kvstore.build import machine_options
from kvstore.server import StoreServer


def never(error):
    raise AssertionError("the store has died") from error


@pytest.mark.slow
class TestOnThisHost(ECConformance):
    announces: ClassVar[bool] = False
    maps_arena: ClassVar[bool] = True

    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch):
        if not self.maps_arena:
            monkeypatch.setattr(kvstore_client, "own_process", lambda: None)
        config = KVStoreSection(
            memory_bytes=200 * round_slot_bytes(CHUNK_BYTES), request_timeout_s=0.5, heartbeat_interval_s=0.1
        )
        self.server = StoreServer(machine_options(config, RandomIds()), (), SystemClock(), never)
        self.is_lost = False
        self.config = msgspec.structs.replace(config, address=self.server.start("tcp://127.0.0.1:0"))
        yield
        if not self.is_lost:
            self.server.stop()

    def make_connector(self, name, is_encoder, settings):
        context = ec_context(
            "encode" if is_encoder else "prefill",
            engine_id=name,
            ec_connector=msgspec.structs.replace(settings, name="shared"),
            kvstore=self.config,
        )
        return StoreECConnector(context)

    def damage(self, encoder, image):
        memory = self.server.machine.memory
        memory.content(next(iter(memory._residents.values())))[1000] ^= 1

    async def lose(self, encoder):
        self.is_lost = True
        await asyncio.to_thread(self.server.stop)

    def num_held(self, side):
        scheduler = side.connector.scheduler
        return scheduler.num_wanted_chunks + scheduler.num_fetching_items + side.connector.num_saving_bytes


@pytest.mark.full
class TestElsewhere(TestOnThisHost):
    maps_arena = False
