"""A message that the owner's code fails on: its sender hears which one, and nothing of the cause."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from connectors.p2p.control import ControlServer
from core.wire.codec import decode_control_frame, encode_control_message
from core.wire.kv import ControlError, ControlMessage, LeaseRenew, PrefixQuestion, kind_of
from core.wire.sockets import AsyncContext

WAIT_S = 20.0


def fail(message: ControlMessage) -> ControlMessage:
    raise RuntimeError("a cause that is ours alone")


def unexpected(error: BaseException) -> None:
    raise AssertionError(f"no task was expected to die: {error!r}")


@pytest.mark.parametrize(
    "message",
    [
        LeaseRenew(transfer_ids=("t",), number=8),
        PrefixQuestion(number=1, engine_id="p", incarnation=1, model_fingerprint=b"model", block_size=16, chain=bytes(16)),
    ],
    ids=["lease question", "prefix question"],
)
async def test_a_message_that_cannot_be_handled_is_named_to_its_sender(message):
    context = AsyncContext()
    server = ControlServer(context, fail, unexpected)
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(server.start("tcp://127.0.0.1:0"))
        async with asyncio.timeout(WAIT_S):
            await socket.send(encode_control_message(message))
            reply = decode_control_frame(await socket.recv())
    finally:
        await server.stop()
        context.destroy(linger=0)
    reason = "the message could not be handled"
    assert reply == ControlError(code="internal_error", message=reason, kind=kind_of(type(message)), number=message.number)
