"""Heads of requests that are too large, in every way that a client can make them so, against a router that listens."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.http.connections import MAX_HEADERS, MAX_PIPELINED

DEADLINE_S = 20.0
MAX_BYTES = 4096
GET = b"GET /health HTTP/1.1\r\nhost: router\r\n"
CHUNKED = b"GET /health HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def strict(start_router):
    return await start_router(max_head_bytes=MAX_BYTES)


async def exchange(under_test, *pieces):
    """Send what the router takes, and return all that it answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
    async with asyncio.timeout(DEADLINE_S):
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


def fields(number: int, size: int = 1) -> bytes:
    return b"".join(b"x-%d: %s\r\n" % (index, b"v" * size) for index in range(number))


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        GET + fields(40, 1000),
        GET + b"x: " + b"v" * 40_000,
        GET + b"x" * 40_000,
        b"GET /" + b"p" * 40_000,
        GET + fields(MAX_HEADERS) + b"\r\n",
        b"\r\n" * 20_000,
    ],
    ids=["many fields", "an endless value", "an endless name", "an endless path", "too many small fields", "newlines"],
)
async def test_head_beyond_the_bound_is_a_431(strict, head):
    answer, _, body = (await exchange(strict, head)).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "head_too_large"
    assert strict.metric("kvferry_http_connections_cut_total", reason="head") == 1


@pytest.mark.slow
async def test_head_in_many_pieces_is_bounded_as_a_whole(strict):
    answer = await exchange(strict, GET, *[b"x: " + b"v" * 500 + b"\r\n"] * 20)
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.slow
@pytest.mark.parametrize("trailer", [fields(40, 1000), b"x: " + b"v" * 40_000], ids=["many", "endless"])
async def test_trailers_of_a_body_are_bounded_as_the_head_is(strict, trailer):
    await exchange(strict, CHUNKED + b"1\r\na\r\n0\r\n", trailer)
    assert strict.metric("kvferry_http_connections_cut_total", reason="head") == 1


@pytest.mark.slow
async def test_requests_that_are_sent_ahead_are_bounded(strict):
    await strict.pair(pause_after=1)
    body = b'{"prompt": "p", "max_tokens": 9}'
    ask = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = await exchange(strict, ask + body + (GET + b"\r\n") * (MAX_PIPELINED + 1))
    assert answer == b""
    assert strict.metric("kvferry_http_connections_cut_total", reason="pipeline") == 1
    await strict.until(lambda: strict.router.gateway.num_requests == 0)


async def test_large_body_is_not_taken_for_a_head(strict):
    await strict.pair()
    body = json.dumps({"prompt": "p", "max_tokens": 2, "user": "u" * 400_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert (await exchange(strict, head + body)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
async def test_head_within_the_bounds_is_served(strict):
    answer = await exchange(strict, GET + b"connection: close\r\n" + fields(MAX_HEADERS - 2) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
async def test_what_is_no_http_is_a_400_in_the_api_s_shape(strict):
    answer, _, body = (await exchange(strict, b"\x16\x03\x01 hello\r\n\r\n")).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_request"
