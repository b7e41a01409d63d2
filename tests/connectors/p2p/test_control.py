"""The control sockets on loopback: good messages get through between bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from connectors.p2p.control import ControlClients, ControlServer
from core.errors import ConfigError, ProtocolError
from core.wire.codec import (
    KIND_CONTROL,
    KIND_ROUTER,
    MAX_CONTROL_FRAME_BYTES,
    WIRE_VERSION,
    decode_control_frame,
    encode_control_message,
)
from core.wire.kv import ControlError, ControlMessage, LeaseRelease, LeaseRenew, LeaseState
from core.wire.sockets import AsyncContext, AsyncSocket, join_tcp, split_tcp
from core.wire.version import encode_refusal

WAIT_S = 20.0
ANY = "tcp://127.0.0.1:0"
QUESTION = LeaseRenew(transfer_ids=("a", "b"))
ANSWER = LeaseState(incarnation=5, left_ms={"a": 1, "b": 1})
HEADER = bytes((WIRE_VERSION, KIND_CONTROL))

BAD_FRAMES = [
    b"",
    b"\x00",
    HEADER,
    bytes((WIRE_VERSION, KIND_ROUTER)) + encode_control_message(QUESTION)[2:],
    encode_control_message(QUESTION)[:-1],
    encode_control_message(QUESTION) + b"\x00",
    HEADER + b"\x81\xa4type\xa7unknown",
    HEADER + b"\x82\xa4type\xa5renew\xactransfer_ids\x91\xa0",  # an empty name
    HEADER + b"\x91" * 3000 + b"\x90",
    HEADER + b"\xc1",
]


def answer(message: ControlMessage) -> ControlMessage | None:
    """The answers of an owner: everything is held for 1 ms; releases have no reply; the rest is nonsense."""
    match message:
        case LeaseRenew():
            return LeaseState(incarnation=5, left_ms=dict.fromkeys(message.transfer_ids, 1))
        case LeaseRelease():
            return None
    raise ProtocolError(f"{type(message).__name__} is not for me")


def unexpected(error: BaseException) -> None:
    raise AssertionError(f"no task was expected to die: {error!r}")


@pytest.fixture
async def context() -> AsyncIterator[AsyncContext]:
    context = AsyncContext()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def server(context) -> AsyncIterator[ControlServer]:
    server = ControlServer(context, answer, unexpected)
    yield server
    await server.stop()


@pytest.fixture
def connect(context) -> Callable[[str], AsyncSocket]:
    """Open a bare DEALER, which says what it likes."""

    def connect(address: str) -> AsyncSocket:
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        return socket

    return connect


async def ask(socket: AsyncSocket, *frames: bytes) -> ControlMessage:
    async with asyncio.timeout(WAIT_S):
        await socket.send_multipart(frames)
        (reply,) = await socket.recv_multipart()
    return decode_control_frame(reply)


# ---- owner


async def test_question_is_answered(server, connect):
    socket = connect(server.start(ANY))
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER


async def test_message_without_a_reply_gets_none(server, connect):
    socket = connect(server.start(ANY))
    await socket.send(encode_control_message(LeaseRelease(transfer_ids=("a",))))
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER


@pytest.mark.parametrize("frame", BAD_FRAMES, ids=range(len(BAD_FRAMES)))
async def test_bad_frame_is_reported_and_the_next_good_one_served(server, connect, frame):
    socket = connect(server.start(ANY))
    reply = await ask(socket, frame)
    assert isinstance(reply, ControlError)
    assert reply.code == "protocol_error"
    assert server.num_bad_frames == 1
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER


@pytest.mark.parametrize("num_frames", [2, 3, 50])
async def test_message_of_several_frames_is_reported_and_the_next_good_one_served(server, connect, num_frames):
    socket = connect(server.start(ANY))
    reply = await ask(socket, *[encode_control_message(QUESTION)] * num_frames)
    assert isinstance(reply, ControlError)
    assert f"not {num_frames}" in reply.message
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER


async def test_random_frames_do_no_harm(server, connect):
    socket = connect(server.start(ANY))
    source = random.Random(1)
    good = encode_control_message(QUESTION)
    for _ in range(300):
        frame = bytearray(good if source.random() < 0.5 else source.randbytes(source.randrange(60)))
        if frame:
            frame[source.randrange(len(frame))] = source.randrange(256)
            frame[0] = WIRE_VERSION  # of another version not every frame is answered
        assert isinstance(await ask(socket, bytes(frame)), ControlError | LeaseState)
    assert server.num_bad_frames > 100
    assert await ask(socket, good) == ANSWER


@pytest.mark.parametrize("frame", [b"GET / HTTP/1.1\r\n\r\n", encode_control_message(QUESTION, WIRE_VERSION + 1)])
async def test_frames_of_another_version_are_refused_once_and_logged_once(server, connect, caplog, frame):
    address = server.start(ANY)
    socket, good = connect(address), connect(address)
    for _ in range(500):
        await socket.send(frame)
    async with asyncio.timeout(WAIT_S):
        assert await socket.recv() == encode_refusal(WIRE_VERSION, frame[0])
        while server.num_bad_frames < 500:
            assert await ask(good, encode_control_message(QUESTION)) == ANSWER
    await socket.send(encode_control_message(QUESTION))
    async with asyncio.timeout(WAIT_S):
        assert decode_control_frame(await socket.recv()) == ANSWER  # nothing was in between
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"other_wire_version ours={WIRE_VERSION} theirs={frame[0]}" in line


async def test_a_refusal_is_never_answered(server, connect):
    socket = connect(server.start(ANY))
    for _ in range(20):
        await socket.send(encode_refusal(WIRE_VERSION + 1, WIRE_VERSION))
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER
    assert server.num_bad_frames == 20


async def test_message_for_another_recipient_is_reported(server, connect):
    socket = connect(server.start(ANY))
    reply = await ask(socket, encode_control_message(ANSWER))
    assert reply == ControlError(code="protocol_error", message="LeaseState is not for me", kind="lease")


async def test_oversized_frame_costs_only_its_sender_the_connection(server, connect):
    address = server.start(ANY)
    hostile, good = connect(address), connect(address)
    monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await hostile.send(bytes(MAX_CONTROL_FRAME_BYTES + 1))
    async with asyncio.timeout(WAIT_S):
        await monitor.recv_multipart()
    hostile.disable_monitor()
    assert await ask(good, encode_control_message(QUESTION)) == ANSWER
    assert server.num_bad_frames == 0


async def test_reply_above_the_cap_is_reported_and_the_next_good_one_served(server, connect):
    """A question just below the cap can have an answer above it: names come back with numbers."""
    question = LeaseRenew(transfer_ids=tuple(f"{index:x}" for index in range(1 << 16, (1 << 16) + 690_000)))
    socket = connect(server.start(ANY))
    frame = encode_control_message(question)
    assert len(frame) <= MAX_CONTROL_FRAME_BYTES
    reply = await ask(socket, frame)
    assert isinstance(reply, ControlError)
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER


async def test_long_complaint_is_cut(context, connect):
    def complain(message: ControlMessage) -> None:
        raise ProtocolError("x" * (MAX_CONTROL_FRAME_BYTES + 1))

    server = ControlServer(context, complain, unexpected)
    reply = await ask(connect(server.start(ANY)), encode_control_message(QUESTION))
    assert reply == ControlError(code="protocol_error", message="x" * 1000, kind="renew")
    await server.stop()


async def test_reader_that_left_before_its_reply_does_no_harm(context, connect):
    asked, may_answer = asyncio.Event(), []

    def answer_late(message: ControlMessage) -> ControlMessage | None:
        asked.set()
        may_answer.append(message)
        return answer(message)

    server = ControlServer(context, answer_late, unexpected)
    address = server.start(ANY)
    leaver = connect(address)
    for _ in range(50):
        await leaver.send(encode_control_message(QUESTION))
    async with asyncio.timeout(WAIT_S):
        await asked.wait()
    leaver.close(linger=0)
    assert await ask(connect(address), encode_control_message(QUESTION)) == ANSWER
    await server.stop()


async def test_address_in_use_is_a_configuration_error(context, server):
    address = server.start(ANY)
    other = ControlServer(context, answer, unexpected)
    with pytest.raises(ConfigError, match="cannot bind"):
        other.start(address)
    await other.stop()


async def test_stopped_server_frees_its_address(context, server, connect):
    first = ControlServer(context, answer, unexpected)
    address = first.start(ANY)
    await first.stop()
    async with asyncio.timeout(WAIT_S):
        while True:  # ZeroMQ's I/O thread closes the listener in its own time
            with contextlib.suppress(ConfigError):
                server.start(address)
                break
            await asyncio.sleep(0.01)
    assert await ask(connect(address), encode_control_message(QUESTION)) == ANSWER


async def test_fault_of_the_owner_costs_one_message(context, connect):
    def fail_once(message: ControlMessage) -> ControlMessage | None:
        if isinstance(message, LeaseRelease):
            raise ValueError("a bug")
        return answer(message)

    server = ControlServer(context, fail_once, unexpected)
    socket = connect(server.start(ANY))
    reply = await ask(socket, encode_control_message(LeaseRelease(transfer_ids=("a",))))
    assert isinstance(reply, ControlError)
    assert (reply.code, "a bug" in reply.message) == ("internal_error", False)
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER
    await server.stop()


async def test_server_that_ends_by_itself_is_reported_and_one_that_is_stopped_is_not(context):
    deaths: asyncio.Queue[BaseException] = asyncio.Queue()
    dying, stopped = (ControlServer(context, answer, deaths.put_nowait) for _ in range(2))
    dying.start(ANY)
    stopped.start(ANY)
    await asyncio.sleep(0)  # both listen
    await stopped.stop()
    await asyncio.sleep(0)  # done-callbacks run in the next turn
    assert deaths.empty()
    dying._socket.close(linger=0)
    async with asyncio.timeout(WAIT_S):
        await deaths.get()


# ---- reader


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
    """ZeroMQ says nothing about it. Without an end each such address would keep its sockets."""
    monkeypatch.setattr("connectors.p2p.control.CONNECT_TIMEOUT_S", 0.05)
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
