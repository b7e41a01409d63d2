from __future__ import annotations

import asyncio
import select

import pytest
import zmq.asyncio

from core.clock import SystemClock
from router.dispatch.frame_reader import FrameReader

DEADLINE_S = 10.0


class Bench:
    """A reader at work on one end of a connection; ``write`` is the other end, which needs no event loop."""

    def __init__(self, read: zmq.asyncio.Socket, write: zmq.Socket) -> None:
        self.handled: list[bytes] = []
        self.write = write
        self.reader = FrameReader(read, SystemClock(), lambda parts: self.handled.append(parts[-1]))
        self._readable = read.FD

    def wait_readable(self) -> None:
        """Block until the socket signals its reader, without a turn of the event loop."""
        signal = select.poll()  # select() takes no descriptor above 1,023
        signal.register(self._readable, select.POLLIN)
        assert signal.poll(DEADLINE_S * 1e3)


@pytest.fixture
async def bench():
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as read, zmq.Socket(context, zmq.DEALER) as write:
        port = read.bind_to_random_port("tcp://127.0.0.1")
        write.linger = 0
        write.connect(f"tcp://127.0.0.1:{port}")
        bench = Bench(read, write)
        task = asyncio.create_task(bench.reader.run())
        write.send(b"hello")
        async with asyncio.timeout(DEADLINE_S):
            while not bench.handled:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        yield bench
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_has_come_is_handled_when_it_has_caught_up(bench):
    bench.write.send(b"unread")
    async with asyncio.timeout(DEADLINE_S):
        while len(bench.handled) < 2:
            bench.wait_readable()
            await bench.reader.catch_up(limit_s=600.0)
    assert bench.handled == [b"hello", b"unread"]


async def test_catching_up_takes_no_wakeup_from_the_reader(bench):
    bench.write.send(b"unread")
    bench.wait_readable()
    await bench.reader.catch_up(limit_s=0.0)
    async with asyncio.timeout(DEADLINE_S):
        while len(bench.handled) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_messages_are_handled_in_the_order_in_which_they_came(bench):
    sent = [b"%d" % number for number in range(300)]
    async with asyncio.timeout(DEADLINE_S):
        for message in sent:
            bench.write.send(message)
            await bench.reader.catch_up(limit_s=600.0)
        while len(bench.handled) <= len(sent):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert bench.handled == [b"hello", *sent]


async def test_under_endless_load_catching_up_ends(bench, monkeypatch):
    monkeypatch.setattr(FrameReader, "_has_unread", True)
    async with asyncio.timeout(DEADLINE_S):
        await bench.reader.catch_up(limit_s=0.01)
