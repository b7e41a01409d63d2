"""The suite of tiers, for a store that workers share: over memory that they map, over frames, and inside one worker."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
import pytest

from connectors.store import shared
from connectors.store.shared import store_connector
from connectors.testing.connector_pair import PROMPT
from connectors.testing.contexts import connector_context
from connectors.testing.tier_suite import TierConformance, TierWorker
from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.ids import RandomIds
from kvstore import client as kvstore_client
from kvstore.build import machine_options
from kvstore.server import StoreServer

pytestmark = pytest.mark.slow


def make_context(name, kvstore):
    return connector_context("prefill", engine_id=name, incarnation=5, kvstore=kvstore)


def never(error):
    raise AssertionError("the store has died") from error


class TestOnThisHost(TierConformance):
    """Workers map the server's arena."""

    is_shared: ClassVar[bool] = True
    maps_arena: ClassVar[bool] = True

    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch):
        if not self.maps_arena:
            monkeypatch.setattr(kvstore_client, "own_process", lambda: None)
        config = KVStoreSection(memory_bytes=4 << 20, request_timeout_s=0.5, heartbeat_interval_s=0.1)
        self.server = StoreServer(machine_options(config, RandomIds()), (), SystemClock(), never)
        self.is_lost = False
        self.config = msgspec.structs.replace(config, address=self.server.start("tcp://127.0.0.1:0"))
        yield
        if not self.is_lost:
            self.server.stop()

    def make_connector(self, name):
        return store_connector(make_context(name, self.config))

    def damage(self, connector, num_blocks):
        memory = self.server.machine.memory
        for resident in list(memory._residents.values())[:num_blocks]:
            memory.content(resident)[1000] ^= 1

    async def lose_store(self, connector):
        self.is_lost = True
        await asyncio.to_thread(self.server.stop)

    async def test_workers_use_the_store_as_they_should(self, saver):
        assert saver.connector._store.is_local == self.maps_arena


class TestElsewhere(TestOnThisHost):
    """Blocks travel in frames."""

    maps_arena = False


class TestWithoutServer(TierConformance):
    """Each worker has a store of its own, with the tiers that are configured."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.config = KVStoreSection(memory_bytes=4 << 20, disk_path=str(tmp_path / "blocks"))

    def make_connector(self, name):
        return store_connector(make_context(name, self.config))


async def test_a_server_that_is_not_there_does_not_keep_a_worker_from_starting(monkeypatch):
    monkeypatch.setattr(shared, "CONNECT_TIMEOUT_S", 0.05)
    config = KVStoreSection(address="tcp://127.0.0.1:9", request_timeout_s=0.1)
    worker = TierWorker("alone", store_connector(make_context("alone", config)))
    try:
        await worker.connector.start()
        request = await worker.run("a", PROMPT)
        worker.engine.finish(request)
        await worker.saved()
        worker.assert_is_empty()
    finally:
        await worker.close()
