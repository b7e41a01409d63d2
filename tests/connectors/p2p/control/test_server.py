"""The owner's control socket on loopback: good messages get through between bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
import zmq

from connectors.p2p.control import ControlServer
from core.errors import ConfigError, ProtocolError
from core.wire.codec import MAX_CONTROL_FRAME_BYTES, WIRE_VERSION, decode_control_frame, encode_control_message
from core.wire.kv import ControlError, ControlMessage, LeaseRelease, LeaseRenew, LeaseState
from core.wire.version import encode_refusal
from tests.connectors.p2p.control.conftest import ANSWER, ANY, BAD_FRAMES, QUESTION, WAIT_S, answer, ask, unexpected


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
    assert reply == ControlError(code="protocol_error", message="LeaseState is not for me", kind="lease", number=3)


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


@pytest.mark.slow
async def test_reply_above_the_cap_is_reported_and_the_next_good_one_served(server, connect):
    """A question just below the cap can have an answer above it: names come back with numbers."""
    question = LeaseRenew(transfer_ids=tuple(f"{index:x}" for index in range(1 << 16, (1 << 16) + 690_000)), number=5)
    socket = connect(server.start(ANY))
    frame = encode_control_message(question)
    assert len(frame) <= MAX_CONTROL_FRAME_BYTES
    reply = await ask(socket, frame)
    assert isinstance(reply, ControlError)
    assert (reply.kind, reply.number) == ("renew", 5)
    assert await ask(socket, encode_control_message(QUESTION)) == ANSWER


async def test_long_complaint_is_cut(context, connect):
    def complain(message: ControlMessage) -> None:
        raise ProtocolError("x" * (MAX_CONTROL_FRAME_BYTES + 1))

    server = ControlServer(context, complain, unexpected)
    reply = await ask(connect(server.start(ANY)), encode_control_message(QUESTION))
    assert reply == ControlError(code="protocol_error", message="x" * 1000, kind="renew", number=3)
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
