"""Control sockets on loopback, and what an owner answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from connectors.p2p.control import ControlServer
from core.errors import ProtocolError
from core.wire.codec import KIND_CONTROL, KIND_ROUTER, WIRE_VERSION, decode_control_frame, encode_control_message
from core.wire.kv import ControlMessage, LeaseRelease, LeaseRenew, LeaseState
from core.wire.sockets import AsyncContext, AsyncSocket

WAIT_S = 20.0
ANY = "tcp://127.0.0.1:0"
QUESTION = LeaseRenew(transfer_ids=("a", "b"), number=3)
ANSWER = LeaseState(incarnation=5, left_ms={"a": 1, "b": 1}, number=3)
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
            return LeaseState(incarnation=5, left_ms=dict.fromkeys(message.transfer_ids, 1), number=message.number)
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
