"""Clients that do nothing, or too little, against a router that listens; and the clocks of one connection, by hand."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from uvicorn.server import ServerState

from router.http.connections import ClientLimits, GuardedConnection, HttpConfig

DEADLINE_S = 20.0
SHORT_S = 0.2
ASK = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: router\r\n\r\n"


async def open_to(under_test, **settings):
    return await asyncio.open_connection("127.0.0.1", under_test.router.port, **settings)


async def read_to_end(reader):
    """Return what comes until the server has closed the connection."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def read_answer(reader):
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        return head, await reader.readexactly(length)


async def drip(writer, text):
    """Send a byte at a time until the server has had enough."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while True:
                writer.write(text)
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            return


@pytest.fixture
async def impatient(start_router):
    return await start_router(receive_timeout_s=SHORT_S)


@pytest.mark.slow
async def test_connection_without_a_request_is_closed(impatient):
    reader, writer = await open_to(impatient)
    assert await read_to_end(reader) == b""
    assert impatient.metric("kvferry_http_connections_cut_total", reason="receive") == 1
    writer.close()


@pytest.mark.slow
async def test_request_after_one_that_wants_another_protocol_is_answered(impatient):
    reader, writer = await open_to(impatient)
    first = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    writer.write(first + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(2):
        head, body = await read_answer(reader)
        assert head.startswith(b"HTTP/1.1 200")
    assert b'"list"' in body
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [b"GET /health HTTP/1.1\r\nx: ", b"\r\n"], ids=["a header that never ends", "nothing but newlines"]
)
async def test_dripping_head_is_cut_off(impatient, start):
    _, writer = await open_to(impatient)
    writer.write(start)
    await drip(writer, start[-1:])
    assert impatient.metric("kvferry_http_connections_cut_total", reason="receive") == 1


@pytest.mark.slow
async def test_slow_head_after_an_answer_is_cut_off(impatient):
    reader, writer = await open_to(impatient)
    writer.write(HEALTH)
    await read_answer(reader)
    await drip(writer, b"\n")
    assert impatient.metric("kvferry_http_connections_cut_total", reason="receive") == 1


@pytest.mark.slow
async def test_body_that_does_not_arrive_is_told_408(impatient):
    await impatient.pair()
    reader, writer = await open_to(impatient)
    writer.write(ASK % 1000 + b'{"prompt": ')
    head, _, body = (await read_to_end(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert impatient.router.gateway.num_requests == 0
    writer.close()


@pytest.mark.slow
async def test_slow_body_after_its_answer_is_cut_off(impatient):
    reader, writer = await open_to(impatient)
    writer.write(b"GET /health HTTP/1.1\r\nhost: router\r\ncontent-length: 1000000\r\n\r\n")
    head, _ = await read_answer(reader)
    assert head.startswith(b"HTTP/1.1 200")
    await drip(writer, b"x")
    assert impatient.metric("kvferry_http_connections_cut_total", reason="receive") == 1


@pytest.mark.slow
async def test_answer_may_take_longer_than_the_request(impatient):
    _, decode = await impatient.pair(pause_after=1)
    reader, writer = await open_to(impatient)
    body = b'{"prompt": "p", "max_tokens": 20}'
    writer.write(ASK % len(body) + body)
    await decode.generated()
    stalled, other = await open_to(impatient)
    await read_to_end(stalled)  # a receive timeout has passed
    decode.script.resume.set()
    head, _ = await read_answer(reader)
    assert head.startswith(b"HTTP/1.1 200")
    other.close()
    writer.close()


@pytest.mark.slow
async def test_unread_stream_ends_with_its_request(start_router):
    under_test = await start_router(send_timeout_s=SHORT_S)
    facts = {"max_model_len": 5000}
    prefill, decode = await under_test.add("prefill", **facts), await under_test.add("decode", **facts)
    for worker in (prefill, decode):
        worker.script.text = "x" * 4000
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", under_test.router.port))
    body = b'{"prompt": "p", "max_tokens": 4000, "stream": true, "logprobs": 20}'
    client.sendall(ASK % len(body) + body)
    generate = await decode.generated()
    decode.script.pause_after = 3999  # the end never comes: only the client's fate can end the request
    await decode.aborts(generate.request_id)
    await under_test.until(lambda: under_test.router.gateway.num_requests == 0)
    client.close()


@pytest.mark.slow
async def test_connection_above_the_limit_is_closed_and_the_others_served(start_router):
    under_test = await start_router(max_connections=2)
    served = [await open_to(under_test) for _ in range(2)]
    for _, writer in served:
        writer.write(ASK % 2)  # the body is missing: both are busy
    await under_test.until(lambda: under_test.num_busy == 2)
    reader, writer = await open_to(under_test)
    writer.write(HEALTH)
    assert await read_to_end(reader) == b""
    assert under_test.metric("kvferry_http_connections_cut_total", reason="limit") == 1
    for reader, writer in served:
        writer.write(b"{}")
        assert (await read_answer(reader))[0].startswith(b"HTTP/1.1 400")
        writer.close()


async def test_full_port_gives_up_the_longest_idle_connection(start_router):
    under_test = await start_router(max_connections=2)
    opened = [await open_to(under_test) for _ in range(2)]
    for reader, writer in opened:  # the first has waited longer afterwards
        writer.write(HEALTH)
        await read_answer(reader)
    reader, writer = await open_to(under_test)
    writer.write(HEALTH)
    assert (await read_answer(reader))[0].startswith(b"HTTP/1.1 200")
    assert await read_to_end(opened[0][0]) == b""
    assert under_test.metric("kvferry_http_connections_cut_total", reason="idle") == 1
    opened[1][1].write(HEALTH)
    assert (await read_answer(opened[1][0]))[0].startswith(b"HTTP/1.1 200")
    for _, other in [*opened, (reader, writer)]:
        other.close()


async def test_connections_of_one_address_are_bounded(start_router):
    under_test = await start_router(max_connections_per_address=2)
    opened = [await open_to(under_test) for _ in range(2)]
    refused, _ = await open_to(under_test)
    assert await read_to_end(refused) == b""
    assert under_test.metric("kvferry_http_connections_cut_total", reason="address") == 1
    elsewhere = await open_to(under_test, local_addr=("127.0.0.2", 0))
    for reader, writer in [*opened, elsewhere]:
        writer.write(HEALTH)
        assert (await read_answer(reader))[0].startswith(b"HTTP/1.1 200")
        writer.close()


async def test_load_balancer_has_no_bound_per_address(start_router):
    under_test = await start_router(max_connections_per_address=1, proxy_addresses=("127.0.0.0/8",))
    for reader, writer in [await open_to(under_test) for _ in range(3)]:
        writer.write(HEALTH)
        assert (await read_answer(reader))[0].startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.slow
async def test_idle_connection_is_closed_after_its_time(start_router):
    under_test = await start_router(idle_timeout_s=0.1)  # uvicorn counts whole seconds
    reader, writer = await open_to(under_test)
    writer.write(HEALTH)
    await read_answer(reader)
    assert await read_to_end(reader) == b""
    writer.close()


# ---- the clocks of one connection --------------------------------------------------------------------------------------


@dataclass
class Timer:
    seconds: float
    callback: object
    arguments: tuple
    is_cancelled: bool = False

    def cancel(self):
        self.is_cancelled = True


@dataclass
class Loop:
    """An event loop whose time is the test's."""

    timers: list[Timer] = field(default_factory=list)

    def call_later(self, seconds, callback, *arguments):
        self.timers.append(Timer(seconds, callback, arguments))
        return self.timers[-1]

    def create_task(self, work):
        work.close()
        return Future()

    def live(self):
        return [timer for timer in self.timers if not timer.is_cancelled]

    def fire(self):
        (timer,) = self.live()
        self.timers.clear()
        timer.callback(*timer.arguments)


@dataclass
class Transport:
    written: bytes = b""
    is_closed: bool = False
    is_aborted: bool = False
    is_paused: bool = False

    def get_extra_info(self, _name):
        return None

    def is_closing(self):
        return self.is_closed or self.is_aborted

    def write(self, text):
        self.written += text

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_aborted = True

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


@pytest.fixture
def connection():
    async def app(scope, receive, send):
        pass

    limits = ClientLimits(max_connections=10, receive_timeout_s=7.0, send_timeout_s=9.0)
    made = GuardedConnection(HttpConfig(app, limits, lambda reason: None), ServerState(), {}, Loop())
    made.connection_made(Transport())
    return made


def test_clock_of_a_request_stops_with_its_last_byte(connection):
    assert [timer.seconds for timer in connection.loop.live()] == [7.0]
    connection.data_received(ASK % 3)
    assert [timer.seconds for timer in connection.loop.live()] == [7.0]
    connection.data_received(b"abc")
    assert connection.loop.live() == []


def test_writing_that_pauses_has_a_clock_and_progress_stops_it(connection):
    connection.data_received(HEALTH)
    connection.pause_writing()
    assert [timer.seconds for timer in connection.loop.live()] == [9.0]
    connection.resume_writing()
    assert connection.loop.live() == []
    connection.pause_writing()
    connection.loop.fire()
    assert connection.transport.is_aborted


def test_request_that_waits_for_an_earlier_one_is_given_time(connection):
    connection.data_received(HEALTH + ASK % 3)
    assert connection.transport.is_paused
    connection.loop.fire()
    assert not connection.transport.is_closing()
    assert [timer.seconds for timer in connection.loop.live()] == [7.0]


def test_lost_connection_leaves_no_clock(connection):
    connection.data_received(ASK % 3)
    connection.pause_writing()
    connection.connection_lost(None)
    assert connection.loop.live() == []
