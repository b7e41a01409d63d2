"""The suite of tiers, for the arena of a worker's own."""

from __future__ import annotations

import dataclasses

import pytest

from connectors.offload.arena import offload_connector
from connectors.testing.contexts import connector_context
from connectors.testing.delayed_device import DelayedDevice
from connectors.testing.tier_suite import TierConformance, TierWorker
from core.config_workers import ConnectorSection, OffloadSection


@pytest.fixture
def context():
    def make(**settings):
        return connector_context(
            "decode",
            engine_id="decode-0",
            incarnation=5,
            connector=ConnectorSection(offload=OffloadSection(**{"memory_bytes": 4 << 20, **settings})),
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


@pytest.mark.slow
class TestOffloadBesideDevice(TestOffload):
    """The pool is on a device that copies when it likes to; the arena is pinned."""

    @pytest.fixture(autouse=True)
    def _device(self):
        self.device = DelayedDevice(seed=1)
        self.pinned = []
        yield
        assert not self.pinned, "the arena is pinned when it is gone"

    def make_connector(self, name):
        connector = super().make_connector(name)
        register = connector.worker.register_kv_caches
        connector.worker.register_kv_caches = lambda region: register(self.on_device(region))
        return connector

    def on_device(self, region):
        return dataclasses.replace(self.device.holding(region), pin_memory=self.pin)

    def pin(self, memory):
        self.pinned.append(memory)
        return self.pinned.clear

    async def test_blocks_go_to_the_device_from_where_they_lie(self, saver, monkeypatch):
        await saver.save("a", list(range(100, 200)))
        copied = []
        monkeypatch.setattr(saver.connector._store, "copy_out", lambda block, target: copied.append(block))
        saver.forget()
        await saver.run("b", list(range(100, 200)))
        assert saver.num_loaded("b") == 3
        assert copied == []


async def test_arena_that_cannot_be_pinned_is_used_all_the_same(context):
    beside = TestOffloadBesideDevice()
    beside.context, beside.device, beside.pinned = context, DelayedDevice(seed=1), []
    beside.pin = lambda memory: None
    worker = TierWorker("saver", beside.make_connector("saver"))
    await worker.connector.start()
    await worker.save("a", list(range(100, 200)))
    worker.forget()
    await worker.run("b", list(range(100, 200)))
    assert worker.num_loaded("b") == 3
    await worker.close()
