"""One limit for the memory of all clients' bodies together."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from core.config import load_config
from core.errors import ConfigError

LIMIT = 1000


def body_of(num_bytes: int) -> bytes:
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "user": ""}).encode()
    return body.replace(b'"user": ""', b'"user": "' + b"u" * (num_bytes - len(body)) + b'"')


class Upload:
    """A request whose body is sent in pieces."""

    def __init__(self, url: str, body: bytes) -> None:
        self._place = urlsplit(url)
        self._body = body

    async def send(self, num_bytes: int) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._place.hostname, self._place.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\nconnection: close\r\n\r\n"
        self._writer.write(head.encode() + self._body[:num_bytes])
        await self._writer.drain()
        self._num_sent = num_bytes

    async def send_rest(self) -> int:
        """Send what is left and return the status of the answer."""
        self._writer.write(self._body[self._num_sent :])
        answer = await asyncio.wait_for(self._reader.read(), 20)
        self._writer.close()
        return int(answer.split()[1])

    def leave(self) -> None:
        self._writer.close()


@pytest.fixture
async def limited(start_router):
    under_test = await start_router(max_upload_bytes=LIMIT)
    await under_test.pair()
    return under_test


async def post(under_test, num_bytes):
    async with under_test.client() as client:
        return await client.post("/v1/completions", content=body_of(num_bytes))


async def held(under_test, num_bytes):
    await under_test.until(lambda: under_test.metric("kvferry_upload_bytes") == num_bytes)


async def test_bodies_beyond_the_bound_are_told_to_come_back_and_those_within_it_served(limited):
    slow = Upload(limited.url, body_of(700))
    await slow.send(600)
    await held(limited, 600)
    refused = await post(limited, 500)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert str(LIMIT) in refused.json()["error"]["message"]
    assert (await post(limited, 400)).status_code == 200
    assert await slow.send_rest() == 200
    await held(limited, 0)
    assert (await post(limited, 500)).status_code == 200


@pytest.mark.slow
async def test_a_body_counts_as_long_as_its_answer_lasts(start_router):
    under_test = await start_router(max_upload_bytes=LIMIT, worker_wait_s=0.1)
    worker = await under_test.add("aggregated", script=under_test.script(is_silent=True))
    call = asyncio.create_task(post(under_test, 800))
    await worker.generated()
    assert under_test.metric("kvferry_upload_bytes") == 800
    assert (await post(under_test, 300)).status_code == 503
    await worker.kill()
    assert (await call).status_code == 503
    await held(under_test, 0)


@pytest.mark.slow
async def test_a_client_that_leaves_in_mid_upload_leaves_nothing(limited):
    slow = Upload(limited.url, body_of(700))
    await slow.send(600)
    await held(limited, 600)
    slow.leave()
    await held(limited, 0)


def test_a_bound_below_that_of_a_single_body_is_refused():
    with pytest.raises(ConfigError, match=r"router\.max_body_bytes.* router\.max_upload_bytes"):
        load_config(assignments=["router.max_body_bytes=2000", "router.max_upload_bytes=1000"])
