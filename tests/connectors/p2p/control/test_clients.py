"""The reader's control sockets on loopback: answers, lost connections, and owners that send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
import zmq

from connectors.p2p.control import ControlClients, ControlServer
from core.errors import ConfigError
from core.wire.codec import MAX_CONTROL_FRAME_BYTES, WIRE_VERSION, decode_control_frame, encode_control_message
from core.wire.kv import ControlError, ControlMessage, LeaseRelease, LeaseRenew, LeaseState
from core.wire.sockets import AsyncContext, AsyncSocket, join_tcp, split_tcp
from core.wire.version import encode_refusal
from tests.connectors.p2p.control.conftest import ANSWER, ANY, BAD_FRAMES, HEADER, QUESTION, WAIT_S, answer, unexpected


class Reader:
    """``ControlClients`` with its reports to its owner."""

    def __init__(self, context: AsyncContext) -> None:
        self.news: asyncio.Queue[tuple[str, ControlMessage | None]] = asyncio.Queue()  # None = disconnected
        self.deaths: asyncio.Queue[BaseException] = asyncio.Queue()
        self.clients = ControlClients(
            context,
            lambda address, message: self.news.put_nowait((address, message)),
            lambda address: self.news.put_nowait((address, None)),
            self.deaths.put_nowait,
        )

    async def next(self) -> tuple[str, ControlMessage | None]:
        async with asyncio.timeout(WAIT_S):
            return await self.news.get()


@pytest.fixture
async def reader(context) -> AsyncIterator[Reader]:
    reader = Reader(context)
    yield reader
    await reader.clients.stop()
    assert reader.deaths.empty()


@pytest.fixture
async def bare_owner(context) -> tuple[AsyncSocket, str]:
    """A ROUTER that says what it likes, and its address."""
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return socket, f"tcp://127.0.0.1:{port}"


async def test_first_message_opens_the_connection_and_answers_come_with_their_address(server, reader):
    address = server.start(ANY)
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, ANSWER)
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, ANSWER)


async def test_a_reader_is_told_that_the_owner_speaks_another_version(bare_owner, reader):
    owner, address = bare_owner
    reader.clients.send(address, QUESTION)
    async with asyncio.timeout(WAIT_S):
        identity, _ = await owner.recv_multipart()
        for frame in (encode_refusal(9, WIRE_VERSION), encode_control_message(ANSWER, 9)):
            await owner.send_multipart([identity, frame])
            found_at, message = await reader.next()
            assert (found_at, message.code) == (address, "version_mismatch")
            assert "version 9" in message.message
    assert not await owner.poll(50)  # it answers neither


@pytest.mark.parametrize(("bound", "host"), [("tcp://[::1]:0", "::1"), ("tcp://[::]:0", "::1"), ("tcp://[::]:0", "127.0.0.1")])
async def test_question_is_answered_over_ipv6(needs_ipv6, server, reader, bound, host):
    address = join_tcp(host, split_tcp(server.start(bound))[1])
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, ANSWER)


@pytest.mark.parametrize(("address", "num_warnings"), [(ANY, 0), ("tcp://0.0.0.0:0", 1)])
async def test_port_that_other_machines_reach_is_warned_about(server, caplog, address, num_warnings):
    server.start(address)
    assert sum("setting=worker.control_address" in record.message for record in caplog.records) == num_warnings


async def test_messages_to_one_address_keep_their_order(bare_owner, reader):
    owner, address = bare_owner
    sent = [LeaseRenew(transfer_ids=(f"t{index}",)) for index in range(100)]
    for message in sent:
        reader.clients.send(address, message)
    async with asyncio.timeout(WAIT_S):
        received = [(await owner.recv_multipart())[1] for _ in sent]
    assert [decode_control_frame(frame) for frame in received] == sent


@pytest.mark.parametrize("frames", [[frame] for frame in BAD_FRAMES] + [[HEADER, HEADER], [b""] * 20])
async def test_nonsense_from_an_owner_becomes_an_error_and_the_next_good_one_is_heard(bare_owner, reader, frames):
    owner, address = bare_owner
    reader.clients.send(address, QUESTION)
    async with asyncio.timeout(WAIT_S):
        identity, _ = await owner.recv_multipart()
        await owner.send_multipart([identity, *frames])
        await owner.send_multipart([identity, encode_control_message(ANSWER)])
    told, message = await reader.next()
    assert told == address
    assert isinstance(message, ControlError)
    assert reader.clients.num_bad_frames == 1
    assert await reader.next() == (address, ANSWER)


async def test_oversized_frame_from_an_owner_ends_the_connection(bare_owner, reader):
    owner, address = bare_owner
    reader.clients.send(address, QUESTION)
    async with asyncio.timeout(WAIT_S):
        identity, _ = await owner.recv_multipart()
        await owner.send_multipart([identity, bytes(MAX_CONTROL_FRAME_BYTES + 1)])
    assert await reader.next() == (address, None)


async def test_address_without_a_listener_is_reported_as_disconnected(bare_owner, reader):
    owner, address = bare_owner
    owner.close(linger=0)
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, None)


async def test_address_that_does_not_resolve_is_reported_as_disconnected(reader, monkeypatch):
    monkeypatch.setattr("connectors.p2p.control.CONNECT_TIMEOUT_S", 1000.0)  # for names that take long
    address = "tcp://[::1%no-such-zone]:7000"
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, None)


async def test_owner_that_answers_late_keeps_its_connection(bare_owner, reader, monkeypatch):
    monkeypatch.setattr("connectors.p2p.control.CONNECT_TIMEOUT_S", 0.05)
    owner, address = bare_owner
    reader.clients.send(address, QUESTION)
    async with asyncio.timeout(WAIT_S):
        identity, _ = await owner.recv_multipart()
    await asyncio.sleep(0.2)
    await owner.send_multipart([identity, encode_control_message(ANSWER)])
    assert await reader.next() == (address, ANSWER)


async def test_owner_that_ends_is_reported_once(server, reader):
    address = server.start(ANY)
    reader.clients.send(address, QUESTION)
    await reader.next()
    await server.stop()
    assert await reader.next() == (address, None)
    reader.clients.close(address)
    assert reader.news.empty()


async def test_connection_never_goes_over_to_the_next_process_at_the_address(context, reader):
    first = ControlServer(context, answer, unexpected)
    address = first.start(ANY)
    reader.clients.send(address, QUESTION)
    await reader.next()
    await first.stop()
    assert await reader.next() == (address, None)
    seen = []
    second = ControlServer(context, lambda message: seen.append(message) or answer(message), unexpected)
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(ConfigError):
                second.start(address)
                break
            await asyncio.sleep(0.01)
    reader.clients.send(address, LeaseRenew(transfer_ids=("new",)))
    assert await reader.next() == (address, LeaseState(incarnation=5, left_ms={"new": 1}))
    assert seen == [LeaseRenew(transfer_ids=("new",))]
    await second.stop()


async def test_address_that_makes_no_sense_is_counted_not_raised(reader):
    reader.clients.send("driver://pigeon", QUESTION)
    reader.clients.send("", QUESTION)
    assert reader.clients.num_dropped == 2


async def test_message_above_the_cap_is_counted_not_raised(server, reader):
    address = server.start(ANY)
    reader.clients.send(address, LeaseRelease(transfer_ids=("x" * 512,) * 10_000))
    assert reader.clients.num_dropped == 1
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, ANSWER)


async def test_closed_connection_says_nothing_and_the_next_message_opens_another(server, reader):
    address = server.start(ANY)
    reader.clients.send(address, QUESTION)
    await reader.next()
    reader.clients.close(address)
    reader.clients.close(address)
    reader.clients.close("tcp://unknown:1")
    reader.clients.send(address, QUESTION)
    assert await reader.next() == (address, ANSWER)
    assert reader.news.empty()


async def test_connection_that_an_answer_ends_is_closed_without_an_error(context, bare_owner):
    owner, address = bare_owner
    heard: list[ControlMessage] = []

    def hear(address: str, message: ControlMessage) -> None:
        heard.append(message)
        clients.close(address)

    clients = ControlClients(context, hear, lambda address: None, unexpected)
    clients.send(address, QUESTION)
    async with asyncio.timeout(WAIT_S):
        identity, _ = await owner.recv_multipart()
        (task, *_) = clients._links[address].tasks
        for _ in range(50):
            await owner.send_multipart([identity, encode_control_message(ANSWER)])
        await asyncio.wait([task])
    await clients.stop()
    assert heard == [ANSWER]
    assert task.cancelled() or task.exception() is None


async def test_closed_connections_leave_no_descriptor_open(no_garbage, server, reader, eventually):
    address = server.start(ANY)

    async def talk():
        reader.clients.send(address, QUESTION)
        await reader.next()
        reader.clients.close(address)

    await talk()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await talk()
    # ZeroMQ's own thread closes them a little later.
    await asyncio.to_thread(eventually, lambda: len(os.listdir("/proc/self/fd")) <= before + 2, "the descriptors to be closed")


async def test_peer_with_an_unhandled_message_is_lost_and_the_next_message_reconnects(context, server):
    news: asyncio.Queue[tuple[str, ControlMessage | None]] = asyncio.Queue()
    is_clumsy = [True]

    def on_message(address: str, message: ControlMessage) -> None:
        if is_clumsy.pop():
            raise ValueError("a bug")
        news.put_nowait((address, message))

    clients = ControlClients(context, on_message, lambda address: news.put_nowait((address, None)), unexpected)
    address = server.start(ANY)
    async with asyncio.timeout(WAIT_S):
        clients.send(address, QUESTION)
        assert await news.get() == (address, None)
        is_clumsy.append(False)
        clients.send(address, QUESTION)
        assert await news.get() == (address, ANSWER)
    await clients.stop()


async def test_loss_of_a_peer_that_cannot_be_handled_is_reported(context, bare_owner):
    deaths: asyncio.Queue[BaseException] = asyncio.Queue()

    def on_disconnected(address: str) -> None:
        raise ValueError("a bug")

    owner, address = bare_owner
    owner.close(linger=0)
    clients = ControlClients(context, lambda address, message: None, on_disconnected, deaths.put_nowait)
    clients.send(address, QUESTION)
    async with asyncio.timeout(WAIT_S):
        assert str(await deaths.get()) == "a bug"
    await clients.stop()


async def test_link_whose_reader_ends_by_itself_is_reported(context, server):
    deaths: asyncio.Queue[BaseException] = asyncio.Queue()
    news: asyncio.Queue[ControlMessage] = asyncio.Queue()
    clients = ControlClients(
        context, lambda address, message: news.put_nowait(message), lambda address: None, deaths.put_nowait
    )
    address = server.start(ANY)
    async with asyncio.timeout(WAIT_S):
        clients.send(address, QUESTION)
        await news.get()
        clients._links[address].tasks[0].cancel()
        assert isinstance(await deaths.get(), RuntimeError)
    await clients.stop()
