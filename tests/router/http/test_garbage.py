"""A served request is freed with its last reference: a ring would wait for a full collection, which stops all streams."""

import asyncio
import gc
import json
import socket

import httpx
import pytest

import router.main
from core.gc_freeze import ShortCollections, freeze_loaded_objects
from tests.support.polling import until

CHAT = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 50}
REQUESTS = {
    "completion": ("/v1/completions", {"prompt": "p", "max_tokens": 50}),
    "stream": ("/v1/completions", {"prompt": "p", "max_tokens": 50, "stream": True}),
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "response": ("/v1/responses", {"input": "p", "stream": True}),
    "message": ("/v1/messages", {**CHAT, "stream": True}),
    "refused": ("/v1/completions", {"prompt": "p", "max_tokens": "many"}),
    "unknown path": ("/v1/nothing", {}),
}
OURS = {"asyncio", "core", "litestar", "router", "uvicorn"}


@pytest.fixture
def kept_garbage():
    """What only a collection would free, from here on."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    freeze_loaded_objects()


def ask(url, path, body):
    with httpx.Client() as client:
        return [client.post(url + path, json=body).status_code for _ in range(3)]


def leave(address, path, body):
    """Send a request, and go before its answer."""
    content = json.dumps(body).encode()
    with socket.create_connection(address) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)


async def is_quiet(router):
    """Wait until no connection of a client is left."""
    state = router._server.server_state
    await until(lambda: not state.connections and not state.tasks)


def ours(garbage):
    gc.collect()
    kinds = {type(left) for left in garbage}
    return {kind.__qualname__ for kind in kinds if kind.__module__.partition(".")[0] in OURS}


@pytest.mark.parametrize("name", REQUESTS)
async def test_answered_requests_leave_nothing_for_the_collector(start_router, name, kept_garbage):
    under_test = await start_router()
    await under_test.pair()
    await asyncio.to_thread(ask, under_test.url, *REQUESTS[name])
    await is_quiet(under_test.router)
    assert ours(kept_garbage) == set()


async def test_clients_that_leave_leave_nothing_for_the_collector(start_router, kept_garbage):
    under_test = await start_router()  # without workers, which would answer at once
    for _ in range(3):
        await asyncio.to_thread(leave, ("127.0.0.1", under_test.router.port), *REQUESTS["stream"])
    await until(lambda: under_test.metric("kvferry_http_requests_total", path="/v1/completions", status="503") == 3)
    await is_quiet(under_test.router)
    assert ours(kept_garbage) == set()


async def test_the_router_looks_for_garbage_by_the_requests_that_are_open(start_router, monkeypatch):
    under_test = await start_router()
    looks = asyncio.Queue()
    monkeypatch.setattr(router.main, "_LOOK_EVERY_S", 0)
    monkeypatch.setattr(ShortCollections, "look", lambda self, num_open: looks.put_nowait(num_open))
    looking = asyncio.create_task(router.main._look_for_garbage(under_test.router, ShortCollections()))
    assert await looks.get() == 0
    under_test.router.in_flight.num_open = 3
    async with asyncio.timeout(20):
        while await looks.get() != 3:
            pass
    under_test.router.in_flight.num_open = 0
    looking.cancel()
