"""EC connector "p2p" when time, leases and peers do not keep to what was agreed."""

from __future__ import annotations

import msgspec
import pytest

from connectors.ec.p2p import P2PECConnector
from connectors.ec.p2p_adapter import decode_held, encode_held
from connectors.p2p.actions import ConsumerStep
from connectors.testing.contexts import ec_context
from connectors.testing.ec_engine import NamedImage
from connectors.testing.ec_suite import CHUNK_BYTES, SETTINGS, SHORT_S, ECSide, poll_until
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from core.clock import SystemClock
from core.config_workers import WorkerSection
from core.errors import EngineDead, Full

ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def fabric():
    return InprocFabric()


@pytest.fixture
async def new_side(fabric):
    sides = []

    async def make(name, incarnation, *, late_bytes=False, address=ANY, model_fingerprint=b"model", **changed):
        settings = msgspec.structs.replace(SETTINGS, name="test", transports=("inproc",), **changed)
        context = ec_context(
            "encode" if name == "encoder" else "prefill",
            engine_id=name,
            incarnation=incarnation,
            model_fingerprint=model_fingerprint,
            ec_connector=settings,
            worker=WorkerSection(control_address=address),
        )
        connector = P2PECConnector(context, lambda name, settings: InprocTransport(fabric, late_bytes))
        connector.metrics = context.metrics
        side = ECSide(connector)
        sides.append(side)
        return await side.start()

    yield make
    for side in reversed(sides):
        await side.connector.stop()


async def release(encoder, source):
    """End a lease as the encode worker does; it is over when this returns."""
    await poll_until(encoder.connector.num_leased_chunks)
    encoder.connector.release([source])
    await poll_until(lambda: not encoder.connector.num_leased_chunks())


def value(side, name, **labels):
    return side.connector.metrics.get_sample_value(f"kvferry_{name}", labels)


async def test_embeddings_of_another_incarnation_of_the_encoder_are_refused(new_side):
    encoder = await new_side("encoder", 1)
    reader = await new_side("reader", 2, transfer_deadline_s=5.0)
    sources = [await encoder.engine.save(NamedImage(name)) for name in ("a", "b")]
    await reader.engine.run(reader.engine.add("first", [NamedImage("a")], sources[:1]))
    address = encoder.connector.driver.control_address
    await encoder.connector.stop()
    again = await new_side("encoder", 3, address=address)
    await again.engine.save(NamedImage("b"))
    await reader.engine.run(reader.engine.add("second", [NamedImage("b")], sources[1:]))
    assert reader.engine.computed == [NamedImage("b").identifier]
    assert reader.connector.scheduler.counts["stale"] + reader.connector.scheduler.counts["peer_lost"] == 1
    third = await again.engine.save(NamedImage("c"))
    await reader.engine.run(reader.engine.add("third", [NamedImage("c")], [third]))
    assert reader.engine.loaded[-1] == NamedImage("c").identifier, "a new life of the encoder is not read"


async def test_chunks_that_were_given_to_another_image_are_refused(new_side, caplog):
    """The lease has ended, and the encoder's memory holds something else by now."""
    encoder = await new_side("encoder", 1, memory_bytes=2 * CHUNK_BYTES)
    reader = await new_side("reader", 2)
    source = await encoder.engine.save(NamedImage("a"))
    await release(encoder, source)
    for number in range(2):
        await release(encoder, await encoder.engine.save(NamedImage(f"other-{number}")))
    held = decode_held(source.payload)
    fresh = await encoder.engine.save(NamedImage("fresh"))
    lease = decode_held(fresh.payload).transfer_id
    stale = msgspec.structs.replace(source, payload=encode_held(msgspec.structs.replace(held, transfer_id=lease)))
    await reader.engine.run(reader.engine.add("r", [NamedImage("a")], [stale]))
    assert reader.engine.computed == [NamedImage("a").identifier]
    assert reader.connector.scheduler.counts["stale"] == 1
    (line,) = [record.msg.fields for record in caplog.records if getattr(record.msg, "name", "") == "ec_load_failed"]
    assert (line["item"], line["reason"]) == (NamedImage("a").identifier.hex()[:16], "stale")
    assert line["peer"] == encoder.connector.driver.control_address


async def test_lease_that_has_ended_costs_a_computation(new_side):
    encoder = await new_side("encoder", 1)
    reader = await new_side("reader", 2)
    source = await encoder.engine.save(NamedImage("a"))
    await release(encoder, source)
    await reader.engine.run(reader.engine.add("r", [NamedImage("a")], [source]))
    assert reader.engine.computed == [NamedImage("a").identifier]


async def test_leases_end_by_themselves(new_side):
    encoder = await new_side("encoder", 1, lease_s=0.05)
    await encoder.engine.save(NamedImage("a"))
    assert encoder.connector.longest_lease_s() <= 0.05
    await poll_until(lambda: not encoder.connector.num_leased_chunks())


async def test_leased_embeddings_are_not_evicted_and_unleased_ones_are(new_side):
    encoder = await new_side("encoder", 1, memory_bytes=2 * CHUNK_BYTES)
    reader = await new_side("reader", 2)
    sources = [await encoder.engine.save(NamedImage(name)) for name in ("a", "b")]
    assert not encoder.engine.worker.has_room(1)
    with pytest.raises(KeyError):
        await encoder.engine.save(NamedImage("c"))
    assert encoder.engine.not_saved[NamedImage("c").identifier].code == Full.code
    for source, name in zip(sources, ("a", "b"), strict=True):
        await reader.engine.run(reader.engine.add(name, [NamedImage(name)], [source]))
    reader.engine.step()
    assert reader.engine.computed == []
    await poll_until(lambda: not encoder.connector.num_leased_chunks())
    assert encoder.engine.worker.has_room(2 * 64)
    assert not encoder.engine.worker.has_room(2 * 64 + 1)
    await encoder.engine.save(NamedImage("c"))
    assert encoder.engine.worker.find_source(NamedImage("a").identifier) is None
    assert encoder.engine.worker.find_source(NamedImage("b").identifier) is not None


async def test_a_repeated_image_is_not_encoded_again(new_side):
    encoder = await new_side("encoder", 1)
    first = await encoder.engine.save(NamedImage("a"))
    second = await encoder.engine.save(NamedImage("a"))
    assert encoder.engine.computed == [NamedImage("a").identifier]
    assert first.seal == second.seal
    assert decode_held(first.payload).transfer_id != decode_held(second.payload).transfer_id
    assert encoder.connector.num_leased_chunks() <= 2


@pytest.mark.slow
@pytest.mark.parametrize("has_images", [True, False])
@pytest.mark.parametrize("late_bytes", [False, True])
async def test_frozen_encoder_costs_no_more_than_the_time_there_is(new_side, fabric, late_bytes, has_images):
    """Its late bytes do no harm: the chunks that they may hit are in quarantine until then."""
    encoder = await new_side("encoder", 1)
    reader = await new_side("reader", 2, late_bytes=late_bytes)
    sources = [await encoder.engine.save(NamedImage(name)) for name in ("warm", "a")]
    await reader.engine.run(reader.engine.add("warm", [NamedImage("warm")], sources[:1]))
    fabric.set_frozen(1, True)
    fabric.set_frozen(2, True)
    request = reader.engine.add("r", [NamedImage("a")], sources[1:], has_images=has_images)
    request.deadline = SystemClock().now() + SHORT_S
    text = reader.engine.add("text", [])
    reader.engine.step()
    assert text.request_id in reader.engine.ran, "a request without images waits for another's"
    await reader.engine.run(request)
    assert ("r" in reader.engine.ran) == has_images
    if not has_images:
        assert "deadline" in reader.engine.errors["r"].message or "did not end" in reader.engine.errors["r"].message
    fabric.set_frozen(1, False)
    fabric.set_frozen(2, False)

    def is_free():
        reader.engine.step()
        return not reader.connector.scheduler.num_quarantined_chunks

    await poll_until(is_free)
    assert value(reader, "ec_fetches_total", result="deadline") == 1


async def test_reader_of_another_model_is_refused(new_side):
    encoder = await new_side("encoder", 1)
    source = await encoder.engine.save(NamedImage("a"))
    reader = await new_side("reader", 2, model_fingerprint=b"another")
    await reader.engine.run(reader.engine.add("r", [NamedImage("a")], [source]))
    assert reader.engine.computed == [NamedImage("a").identifier]
    assert reader.connector.scheduler.counts == {"layout": 1}


async def test_bug_in_taking_something_in_ends_the_worker(new_side):
    reader = await new_side("reader", 2)
    reader.connector.driver.agent.consumer.handlers[ConsumerStep] = None
    reader.engine.add("r", [NamedImage("a")], [])
    reader.connector.driver.handle(ConsumerStep())
    with pytest.raises(EngineDead):
        reader.engine.step()


async def test_gauges_follow_a_request_and_end_at_zero(new_side):
    encoder = await new_side("encoder", 1)
    reader = await new_side("reader", 2)
    source = await encoder.engine.save(NamedImage("a", 100))
    await poll_until(lambda: value(encoder, "ec_leased_blocks") == 2)
    request = reader.engine.add("r", [NamedImage("a", 100)], [source])
    reader.engine.step()
    names = ("ec_waiting_requests", "ec_fetching_items", "ec_wanted_chunks", "ec_quarantined_chunks")
    assert [value(reader, name) for name in names] == [1, 1, 2, 0]
    await reader.engine.run(request)
    reader.engine.finish(request)
    assert [value(reader, name) for name in names] == [0, 0, 0, 0]
    assert value(reader, "ec_fetches_total", result="ok") == 1
    assert value(reader, "ec_transfer_bytes_total", transport="inproc") == 2 * CHUNK_BYTES
    reader.engine.step()
    await poll_until(lambda: value(encoder, "ec_leased_blocks") == 0)
