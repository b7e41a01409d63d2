"""Links follow the name service, a name service that is down takes nothing away, and no fault leaves a worker deaf."""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import asynccontextmanager

import pytest
import zmq

from core.errors import ConfigError, PeerUnreachable
from core.ids import RandomIds
from core.wire.curve import derive_keys, new_cluster_key
from core.wire.sockets import AsyncContext, SocketOptions, bind, dealer_socket, router_socket, split_tcp
from core.worker.router_sockets import RouterSockets
from tests.support.polling import until
from tests.support.tcp_proxy import TcpProxy

WAIT_S = 10.0


class Names:
    """A name service whose answer can be changed."""

    def __init__(self, *addresses):
        self.answer = list(addresses)
        self.hangs = False
        self._was_asked = asyncio.Event()

    async def resolve(self, name):
        self._was_asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.answer is None:
            raise PeerUnreachable(f"{name} does not resolve")
        return self.answer

    async def asked_again(self, times=2):
        """Return once it was asked; with two ``times``, once an answer that was set before has been acted on."""
        for _ in range(times):
            self._was_asked.clear()
            await asyncio.wait_for(self._was_asked.wait(), WAIT_S)


class Links:
    """Records its calls."""

    def __init__(self):
        self.events = []
        self.deaths = asyncio.Queue()

    def on_connect(self, link):
        self.events.append(f"+{link}")

    def on_disconnect(self, link):
        self.events.append(f"-{link}")

    def on_frame(self, link, frames):
        self.events.append(frames)

    def on_links_death(self, error):
        self.deaths.put_nowait(error)


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


async def test_one_link_per_machine_of_a_name(sockets, names, links):
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


async def test_sending_to_a_closed_address_is_refused_not_queued(sockets, names):
    await names.asked_again()
    assert sockets.send("tcp://127.0.0.1:1", b"frame") is False
    assert sockets.send("tcp://127.0.0.1:9", b"frame") is False


async def test_closing_twice_is_harmless(sockets):
    await sockets.close(0.0)
    assert sockets.send("tcp://127.0.0.1:1", b"frame") is False


class ClumsyLinks(Links):
    """Fails over the first frame."""

    def __init__(self):
        super().__init__()
        self.frames = asyncio.Queue()

    def on_frame(self, link, frames):
        self.frames.put_nowait(frames)
        if frames == [b"first"]:
            raise ValueError("first frame")


async def test_handler_that_raises_gets_the_next_frame(names, caplog):
    context, links = AsyncContext(), ClumsyLinks()
    router = context.socket(zmq.ROUTER)
    names.answer = [f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"]
    sockets = RouterSockets(["tcp://routers:5570"], links, names.resolve, interval_s=0.001)
    sockets.start()
    await names.asked_again()
    async with asyncio.timeout(WAIT_S):
        await sockets._sockets[names.answer[0]].send(b"here I am")
        identity, _ = await router.recv_multipart()
        await router.send_multipart([identity, b"first"])
        await router.send_multipart([identity, b"second"])
        assert [await links.frames.get() for _ in range(2)] == [[b"first"], [b"second"]]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "router_frame_failed" in errors[0]
    assert links.deaths.empty()
    await sockets.close(0.0)
    context.destroy(linger=0)


async def test_resolver_that_ends_by_a_bug_is_reported(links):
    async def broken(_name):
        raise ValueError("a bug")

    sockets = RouterSockets(["tcp://routers:5570"], links, broken)
    sockets.start()
    async with asyncio.timeout(WAIT_S):
        assert str(await links.deaths.get()) == "a bug"
    await sockets.close(0.0)


async def test_reader_whose_socket_is_closed_under_it_is_reported(sockets, names, links):
    await names.asked_again()
    sockets._sockets["tcp://127.0.0.1:1"].close(linger=0)
    async with asyncio.timeout(WAIT_S):
        await links.deaths.get()


async def test_leaving_and_closing_in_good_order_is_no_death(sockets, names, links):
    await names.asked_again()
    names.answer = ["tcp://127.0.0.1:2"]
    await names.asked_again()
    await sockets.close(0.0)
    await asyncio.sleep(0)  # done-callbacks run in the next turn
    assert links.events[2:] == ["-tcp://127.0.0.1:1"]
    assert links.deaths.empty()


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_router_that_had_no_key_or_one_too_many_is_met_once_it_is_started_again(has_key):
    """ZeroMQ itself never tries again after such a refusal."""
    keys = derive_keys(new_cluster_key(RandomIds()))
    context, links = AsyncContext(), Links()
    router = router_socket(context, SocketOptions(max_message_bytes=1000, keys=None if has_key else keys))
    address = bind(router, "tcp://127.0.0.1:0")
    sockets = RouterSockets([address], links, Names(address).resolve, interval_s=0.05, keys=keys if has_key else None)
    sockets.start()
    try:
        await until(lambda: f"-{address}" in links.events)
        router.close(linger=0)
        router = router_socket(context, SocketOptions(max_message_bytes=1000, keys=keys if has_key else None))
        await until(lambda: can_bind(router, address))
        await until(lambda: sockets.send(address, b"hello"))
        assert (await asyncio.wait_for(router.recv_multipart(), WAIT_S))[1:] == [b"hello"]
    finally:
        await sockets.close(0.0)
        context.destroy(linger=0)


def can_bind(router, address):
    """Bind; False while ZeroMQ's thread has not closed the socket before."""
    try:
        bind(router, address)
    except ConfigError:
        return False
    return True


class DamageableLink:
    """A link to a router with a key, through a proxy."""

    def __init__(self, proxy, router, keys, interval_s):
        self.proxy, self.router = proxy, router
        self.address = "tcp://{}:{}".format(*proxy.address)
        self.names, self.links = Names(self.address), Links()
        self.sockets = RouterSockets(["name"], self.links, self.names.resolve, interval_s=interval_s, keys=keys)

    async def connected(self):
        await until(lambda: self.sockets.why_unusable().get(self.address) == "")

    async def damage(self):
        """Have a frame of the router damaged on its way."""
        self.sockets.send(self.address, b"hello")
        peer, _ = await self.router.recv_multipart()
        self.proxy.damage_answers()
        await self.router.send_multipart([peer, b"damaged on the way"])

    async def made_anew(self):
        anew = [f"+{self.address}", f"-{self.address}", f"+{self.address}"]
        await until(lambda: self.sockets.note_events() or self.links.events == anew)
        await self.connected()


@asynccontextmanager
async def damageable_link(interval_s):
    context, keys = AsyncContext(), derive_keys(new_cluster_key(RandomIds()))
    router = router_socket(context, SocketOptions(max_message_bytes=1000, keys=keys))
    with TcpProxy(split_tcp(bind(router, "tcp://127.0.0.1:0"))) as proxy:
        link = DamageableLink(proxy, router, keys, interval_s)
        link.sockets.start()
        try:
            await link.connected()
            yield link
        finally:
            await link.sockets.close(0.0)
            context.destroy(linger=0)


async def test_a_link_that_a_damaged_frame_has_ended_is_made_anew_at_once():
    """libzmq connects no more after one."""
    async with damageable_link(interval_s=3600.0) as link:
        await link.damage()
        await link.made_anew()
        link.sockets.send(link.address, b"here again")
        assert (await link.router.recv_multipart())[1] == b"here again"


async def test_a_broken_link_is_made_anew_while_the_name_service_is_down():
    async with damageable_link(interval_s=0.01) as link:
        link.names.hangs = True
        await link.names.asked_again(1)
        await link.damage()
        await link.made_anew()


async def test_a_link_that_cannot_be_made_for_want_of_a_descriptor_is_tried_again(monkeypatch):
    failures = [zmq.ZMQError(errno.EMFILE), None]

    def make(context, options):
        if failure := failures.pop(0):
            raise failure
        return dealer_socket(context, options)

    monkeypatch.setattr("core.worker.router_sockets.dealer_socket", make)
    links = Links()
    sockets = RouterSockets(["name"], links, Names("tcp://127.0.0.1:9").resolve, interval_s=0.01)
    sockets.start()
    await until(lambda: links.events == ["+tcp://127.0.0.1:9"])
    await sockets.close(0.0)
    assert links.deaths.empty()


async def test_what_was_made_of_a_link_that_cannot_be_made_is_closed(monkeypatch):
    made = []

    def fail(dealer, address, keys):
        made.append(dealer)
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("core.worker.router_sockets.connect_with_each_key", fail)
    sockets = RouterSockets(["name"], Links(), Names("tcp://127.0.0.1:9").resolve, interval_s=0.01)
    sockets.start()
    await until(lambda: len(made) > 1)
    assert made[0].closed  # else closing would wait for it
    await sockets.close(0.0)
