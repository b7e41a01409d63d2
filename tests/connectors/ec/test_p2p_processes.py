"""EC connector "p2p" between real processes, of which the one that holds the embeddings is killed, stopped, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from connectors.ec.p2p import P2PECConnector
from connectors.ec.p2p_adapter import decode_held
from connectors.testing.contexts import ec_context
from connectors.testing.ec_engine import NamedImage
from connectors.testing.ec_suite import SETTINGS, ECSide, poll_until
from core.wire.media import ECSource

OWNER = Path(__file__).with_name("held_by_process.py")
IMAGE = NamedImage("a", 500)
DEADLINE_S = 3.0

pytestmark = [pytest.mark.slow, pytest.mark.full]


class Owner:
    """The process that holds the image, and its announcements."""

    def __init__(self, transport, incarnation, address="tcp://127.0.0.1:0"):
        arguments = [transport, str(incarnation), address, str(IMAGE.num_embeds)]
        command = [sys.executable, str(OWNER), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        kind, _, content = self.process.stdout.readline().decode().partition(" ")
        assert kind == "source"
        self.source = msgspec.msgpack.decode(bytes.fromhex(content), type=ECSource)

    @property
    def address(self):
        return decode_held(self.source.payload).control_address

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_owner():
    owners = []

    def start(*arguments):
        owners.append(Owner(*arguments))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param


@pytest.fixture
async def reader(transport):
    settings = msgspec.structs.replace(
        SETTINGS, name="p2p", transports=(transport,), transfer_deadline_s=DEADLINE_S, handshake_timeout_s=DEADLINE_S
    )
    context = ec_context("prefill", engine_id="reader", incarnation=99, ec_connector=settings)
    side = await ECSide(P2PECConnector(context)).start()
    yield side
    assert not side.connector.scheduler.num_wanted_chunks
    await side.connector.stop()


async def ends_empty(reader, request):
    reader.engine.finish(request)

    def is_empty():
        reader.engine.step()
        scheduler = reader.connector.scheduler
        return not (scheduler.num_wanted_chunks or scheduler.num_quarantined_chunks or scheduler.num_fetching_items)

    await poll_until(is_empty)


async def test_embeddings_cross_processes(reader, transport, start_owner):
    request = reader.engine.add("r", [IMAGE], [start_owner(transport, 1).source])
    await reader.engine.run(request)
    assert reader.engine.loaded == [IMAGE.identifier]
    await ends_empty(reader, request)


async def test_killed_owner_is_noticed_at_once(reader, transport, start_owner):
    owner = start_owner(transport, 1)
    owner.process.kill()
    owner.process.wait()
    request = reader.engine.add("r", [IMAGE], [owner.source])
    await reader.engine.run(request)
    assert reader.engine.computed == [IMAGE.identifier]
    assert reader.connector.scheduler.counts == {"peer_lost": 1}
    await ends_empty(reader, request)


async def test_owner_that_is_killed_during_the_fetch(reader, transport, start_owner):
    owner = start_owner(transport, 1)
    os.kill(owner.process.pid, signal.SIGSTOP)
    request = reader.engine.add("r", [IMAGE], [owner.source])
    reader.engine.step()
    owner.process.kill()
    await reader.engine.run(request)
    assert reader.engine.computed == [IMAGE.identifier]
    await ends_empty(reader, request)


@pytest.mark.parametrize("has_images", [True, False])
async def test_stopped_owner_costs_the_time_there_is(reader, transport, start_owner, has_images):
    owner = start_owner(transport, 1)
    os.kill(owner.process.pid, signal.SIGSTOP)
    request = reader.engine.add("r", [IMAGE], [owner.source], has_images=has_images)
    await reader.engine.run(request)
    assert ("r" in reader.engine.ran) == has_images
    assert reader.engine.loaded == []
    os.kill(owner.process.pid, signal.SIGCONT)
    await ends_empty(reader, request)


async def test_owner_that_was_started_again_at_the_same_address(reader, transport, start_owner):
    owner = start_owner(transport, 1)
    first = reader.engine.add("first", [IMAGE], [owner.source])
    await reader.engine.run(first)
    await ends_empty(reader, first)
    owner.close()
    again = start_owner(transport, 2, owner.address)
    reader.engine.forget()
    reader.connector.scheduler._chunk_cache.drop(reader.connector.scheduler._chunk_cache.get(IMAGE.identifier))
    stale = reader.engine.add("stale", [IMAGE], [owner.source])
    await reader.engine.run(stale)
    assert reader.engine.computed == [IMAGE.identifier]
    reader.engine.forget()
    fresh = reader.engine.add("fresh", [IMAGE], [again.source])
    await reader.engine.run(fresh)
    assert reader.engine.loaded == [IMAGE.identifier] * 2
    await ends_empty(reader, stale)
    await ends_empty(reader, fresh)
