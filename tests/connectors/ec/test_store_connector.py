"""EC connector "shared": embeddings computed by other workers, found in each tier, and the effects of the store's failures."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from connectors.ec.jobs import FetchingMetadata
from connectors.ec.store_connector import StoreECConnector
from connectors.testing import ec_engine
from connectors.testing.contexts import ec_context
from connectors.testing.ec_engine import NamedImage, embed
from connectors.testing.ec_suite import CHUNK_BYTES, SETTINGS, SHORT_S, ECSide, poll_until
from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.errors import EncoderInputMissing, EngineDead, Full
from core.ids import RandomIds
from kvstore.arena import round_slot_bytes
from kvstore.build import machine_options, make_tiers
from kvstore.server import StoreServer

SLOT_BYTES = round_slot_bytes(CHUNK_BYTES)


def never(error):
    raise AssertionError("the store has died") from error


@pytest.fixture
async def new_store():
    servers = []

    async def start(address="tcp://127.0.0.1:0", **changed):
        config = KVStoreSection(request_timeout_s=0.5, heartbeat_interval_s=0.1, **changed)
        server = StoreServer(machine_options(config, RandomIds()), make_tiers(config, RandomIds()), SystemClock(), never)
        servers.append(server)
        return server, msgspec.structs.replace(config, address=server.start(address))

    async def stop(server):
        servers.remove(server)
        await asyncio.to_thread(server.stop)

    start.stop = stop
    yield start
    for server in list(servers):
        await stop(server)


@pytest.fixture
async def new_side():
    sides = []

    async def make(name, config, **changed):
        context = ec_context(
            "encode" if name == "encoder" else "prefill",
            engine_id=name,
            ec_connector=msgspec.structs.replace(SETTINGS, name="shared", **changed),
            kvstore=config,
        )
        side = ECSide(StoreECConnector(context))
        sides.append(side)
        return await side.start()

    yield make
    for side in reversed(sides):
        await side.connector.stop()


async def stored(side):
    """Wait until nothing of a worker is on its way to the store."""

    def is_stored():
        side.engine.step()
        return not side.connector.num_saving_bytes

    await poll_until(is_stored)


async def test_what_one_reader_has_computed_another_finds(new_store, new_side):
    _, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    first, second = await new_side("first", config), await new_side("second", config)
    image = NamedImage("a", 100)
    await first.engine.run(first.engine.add("r", [image]))
    await stored(first)
    await second.engine.run(second.engine.add("r", [image], has_images=False))
    assert (first.engine.computed, second.engine.loaded) == ([image.identifier], [image.identifier])


async def test_what_was_computed_twice_with_other_last_bits_is_found(new_store, new_side, monkeypatch):
    """The store keeps the first put; the second worker announces the item nevertheless."""
    _, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    first, encoder, reader = [await new_side(name, config) for name in ("first", "encoder", "reader")]
    image = NamedImage("a", 100)
    await first.engine.run(first.engine.add("r", [image]))
    await stored(first)
    with monkeypatch.context() as patched:
        patched.setattr(ec_engine, "embed", lambda *of: embed(*of) + 1e-7)
        source = await encoder.engine.save(image)
    assert encoder.engine.computed == [image.identifier], "it is announced by the one who has not put it"
    await reader.engine.run(reader.engine.add("r", [image], [source], has_images=False))
    assert reader.engine.errors == {}
    assert reader.engine.loaded == [image.identifier]


async def test_embeddings_come_back_from_disk(new_store, new_side, tmp_path):
    """The arena has room for eight chunks; what was stored first is on disk only."""
    server, config = await new_store(memory_bytes=9 * SLOT_BYTES, disk_path=str(tmp_path / "disk"), disk_bytes=1 << 20)
    encoder, reader = await new_side("encoder", config), await new_side("reader", config)
    images = [NamedImage(str(number), 2 * 64) for number in range(6)]
    for image in images:
        await encoder.engine.save(image)
        await poll_until(lambda: not server.machine.tiering.num_saving)  # a store hands down only so much at a time
    for image in images:
        await reader.engine.run(reader.engine.add(image.name, [image], has_images=False))
    assert reader.engine.errors == {}
    assert reader.engine.loaded == [image.identifier for image in images]


async def test_embeddings_that_the_store_has_lost_are_offered_once_more_and_no_longer(new_store, new_side):
    server, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    encoder = await new_side("encoder", config)
    image = NamedImage("a")
    source = await encoder.engine.save(image)
    assert encoder.engine.worker.find_source(image.identifier) == source
    (key,) = server.machine.memory._residents
    server.machine.memory.drop(key)
    encoder.engine.worker.find_source(image.identifier)
    await poll_until(lambda: encoder.engine.worker.find_source(image.identifier) is None)
    await encoder.engine.save(image)
    assert encoder.engine.computed == [image.identifier] * 2


async def test_store_that_is_started_again_is_used_again(new_store, new_side):
    server, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    encoder, reader = await new_side("encoder", config), await new_side("reader", config)
    await encoder.engine.save(NamedImage("a"))
    await new_store.stop(server)
    lost = reader.engine.add("lost", [NamedImage("a")])
    await reader.engine.run(lost)
    assert reader.engine.computed == [NamedImage("a").identifier]
    await new_store(config.address, memory_bytes=64 * SLOT_BYTES)
    await poll_until(lambda: encoder.connector._store.is_connected and reader.connector._store.is_connected)
    await encoder.engine.save(NamedImage("b"))
    await reader.engine.run(reader.engine.add("found", [NamedImage("b")]))
    assert reader.engine.loaded == [NamedImage("b").identifier]


@pytest.mark.slow
@pytest.mark.parametrize("has_images", [True, False])
async def test_frozen_store_costs_no_more_than_the_time_there_is(new_store, new_side, monkeypatch, has_images):
    """It answers no request; other requests continue meanwhile, and afterwards it is used again."""
    server, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    encoder, reader = await new_side("encoder", config), await new_side("reader", config)
    sources = [await encoder.engine.save(NamedImage(name)) for name in ("a", "b")]
    request = reader.engine.add("r", [NamedImage("a")], sources[:1], has_images=has_images)
    request.deadline = SystemClock().now() + SHORT_S
    text = reader.engine.add("text", [])
    with monkeypatch.context() as frozen:
        frozen.setattr(server.machine, "on_parcel", lambda *_: [])
        reader.engine.step()
        assert text.request_id in reader.engine.ran, "a request without images waits for another's"
        await reader.engine.run(request)
    assert ("r" in reader.engine.ran) == has_images
    assert (reader.engine.computed == [NamedImage("a").identifier]) == has_images
    if not has_images:
        assert reader.engine.errors["r"].code == EncoderInputMissing.code
        assert "deadline" in reader.engine.errors["r"].message
    await reader.engine.until(lambda: not reader.connector.scheduler.num_fetching_items)
    await poll_until(lambda: reader.connector._store.is_connected)
    await reader.engine.run(reader.engine.add("again", [NamedImage("b")], sources[1:], has_images=False))
    assert reader.engine.loaded == [NamedImage("b").identifier]


async def test_bug_in_taking_something_in_ends_the_worker(new_store, new_side):
    _, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    reader = await new_side("reader", config)
    reader.connector._order(FetchingMetadata(fetches=[None]))

    def is_dead():
        try:
            reader.engine.step()
        except EngineDead:
            return True
        return False

    await poll_until(is_dead)


async def test_copies_for_the_store_are_bounded(new_store, new_side):
    _, config = await new_store(memory_bytes=64 * SLOT_BYTES)
    encoder = await new_side("encoder", config, memory_bytes=2 * CHUNK_BYTES)
    encoder.connector._offers._submit = lambda order: None  # nothing is ever stored
    for name in "abc":
        assert encoder.engine.worker.has_room(64) == (name != "c")
        encoder.engine.encoder_cache[NamedImage(name).identifier] = embed(NamedImage(name).identifier, 64)
        encoder.engine.worker.save_caches(encoder.engine.encoder_cache, NamedImage(name).identifier)
    report = encoder.engine.worker.get_finished(set())
    assert list(report.failed_saving) == [NamedImage("c").identifier]
    assert report.failed_saving[NamedImage("c").identifier].code == Full.code
    assert encoder.connector.num_saving_bytes == 2 * CHUNK_BYTES
