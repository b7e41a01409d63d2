"""Links follow the name service, and a name service that is down takes nothing away."""

from __future__ import annotations

import asyncio

import pytest

from core.engine.router_sockets import RouterSockets
from core.errors import PeerUnreachable

WAIT_S = 10.0


class Names:
    """A name service whose answer can be changed."""

    def __init__(self, *addresses):
        self.answer = list(addresses)
        self._was_asked = asyncio.Event()

    async def resolve(self, name):
        self._was_asked.set()
        if self.answer is None:
            raise PeerUnreachable(f"{name} does not resolve")
        return self.answer

    async def asked_again(self):
        """Return once an answer that was set before has been acted on."""
        for _ in range(2):
            self._was_asked.clear()
            await asyncio.wait_for(self._was_asked.wait(), WAIT_S)


class Links:
    """Notes what it is told."""

    def __init__(self):
        self.events = []

    def on_connect(self, link):
        self.events.append(f"+{link}")

    def on_disconnect(self, link):
        self.events.append(f"-{link}")

    def on_frame(self, link, frames):
        self.events.append(frames)


@pytest.fixture
def links():
    return Links()


@pytest.fixture
def names():
    return Names("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")


@pytest.fixture
async def sockets(names, links):
    sockets = RouterSockets(["tcp://routers:5570"], links, names.resolve, interval_s=0.001)
    sockets.start()
    yield sockets
    await sockets.close(0.0)


async def test_one_link_per_machine_behind_the_name(sockets, names, links):
    await names.asked_again()
    assert links.events == ["+tcp://127.0.0.1:1", "+tcp://127.0.0.1:2"]


async def test_links_follow_the_name(sockets, names, links):
    await names.asked_again()
    names.answer = ["tcp://127.0.0.1:2", "tcp://127.0.0.1:3"]
    await names.asked_again()
    assert links.events[2:] == ["+tcp://127.0.0.1:3", "-tcp://127.0.0.1:1"]


async def test_name_service_that_is_down_closes_no_link(sockets, names, links):
    await names.asked_again()
    names.answer = None
    await names.asked_again()
    assert len(links.events) == 2
    names.answer = ["tcp://127.0.0.1:1"]
    await names.asked_again()
    assert links.events[2:] == ["-tcp://127.0.0.1:2"]


async def test_sending_where_nobody_listens_is_refused_not_queued(sockets, names):
    await names.asked_again()
    assert sockets.send("tcp://127.0.0.1:1", b"frame") is False
    assert sockets.send("tcp://127.0.0.1:9", b"frame") is False


async def test_closing_twice_is_harmless(sockets):
    await sockets.close(0.0)
    assert sockets.send("tcp://127.0.0.1:1", b"frame") is False
