"""What answers at the server's addresses may be anything, or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import pytest_asyncio
import zmq

from connectors.lmcache.client import LMCacheClient, fetch_facts
from connectors.lmcache.messages import ServerFacts
from connectors.lmcache.wire import RequestType, wire_salt
from core.config_workers import LMCacheSection
from core.errors import ConnectorUnavailable, PeerUnreachable, TransferTimeout
from core.wire.sockets import AsyncContext

GOOD = {"/lmc_version": "0.5.6", "/config": {"mp": {"chunk_size": 256, "separate_object_groups": True}}}


@pytest.fixture
def admin_port():
    """Answer with what ``answers`` holds by then; bytes are sent as they are."""
    answers: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path)
            if answer is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_version_and_settings_are_read(admin_port):
    address, answers = admin_port
    answers.update(GOOD)
    assert fetch_facts(address, 5.0) == ServerFacts("0.5.6", 256, True)


def test_no_proxy_is_asked(admin_port, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    address, answers = admin_port
    answers.update(GOOD)
    assert fetch_facts(address, 5.0).version == "0.5.6"


@pytest.mark.parametrize(
    "changes",
    [
        {"/config": b"<html>"},
        {"/config": {}},
        {"/config": {"mp": {"chunk_size": "many", "separate_object_groups": True}}},
        {"/config": []},
        {"/lmc_version": b""},
    ],
)
def test_somebody_else_at_the_port_is_told_apart(admin_port, changes):
    address, answers = admin_port
    answers.update(GOOD | changes)
    with pytest.raises(ConnectorUnavailable, match="not as an LMCache server"):
        fetch_facts(address, 5.0)


def test_an_error_or_nobody_is_no_server(admin_port):
    address, _ = admin_port
    with pytest.raises(PeerUnreachable):
        fetch_facts(address, 5.0)
    with pytest.raises(PeerUnreachable):
        fetch_facts("http://127.0.0.1:9", 5.0)


@pytest_asyncio.fixture
async def peer():
    """Return a client's constructor and the server's socket at its other end."""
    context, peer_context = AsyncContext(), zmq.Context()
    socket = peer_context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    counts, deaths = Counter(), []
    client = LMCacheClient(context, f"tcp://127.0.0.1:{port}", counts, deaths.append)
    yield client, socket
    await client.close()
    await client.close()
    assert not deaths
    context.term()  # nothing is open any more, or it would not return
    peer_context.destroy(linger=0)


@pytest.mark.asyncio
async def test_a_request_gets_its_reply(peer):
    client, socket = peer
    first, second = (asyncio.create_task(client.calls.call(5.0, RequestType.PING, number)) for number in (3, 4))
    asked = [await asyncio.to_thread(socket.recv_multipart) for _ in range(2)]
    assert [frames[1:] for frames in asked] == [[b"\x01", b"\x16", b"\x03"], [b"\x02", b"\x16", b"\x04"]]
    for (identity, uid, operation, _), result in zip(reversed(asked), ([b"\xc3"], []), strict=True):
        socket.send_multipart([identity, uid, operation, *result])
    assert (await first, await second) == (None, True)


@pytest.mark.asyncio
async def test_a_reply_that_comes_too_late_is_counted_and_dropped(peer):
    client, socket = peer
    with pytest.raises(TransferTimeout):
        await client.calls.call(0.0, RequestType.PING, 3)
    identity, uid, operation, _ = await asyncio.to_thread(socket.recv_multipart)
    answered = asyncio.create_task(client.calls.call(5.0, RequestType.PING, 4))
    await asyncio.to_thread(socket.recv_multipart)
    for number in (uid, b"\x02"):
        socket.send_multipart([identity, number, operation])
    await answered
    assert client.calls.counts == {"unanswered_requests": 1, "late_replies": 1}


@pytest.mark.parametrize("how", ["closed", "garbage"])
@pytest.mark.asyncio
async def test_a_lost_connection_fails_what_is_open_and_says_so(peer, how):
    client, socket = peer
    is_lost = asyncio.Event()
    client.calls.on_lost = is_lost.set
    asked = asyncio.create_task(client.calls.call(5.0, RequestType.PING, 3))
    identity, *_ = await asyncio.to_thread(socket.recv_multipart)
    if how == "closed":
        socket.close(linger=0)
    else:
        socket.send_multipart([identity, b"\xc1garbage"])
    await asyncio.wait_for(is_lost.wait(), 5)
    with pytest.raises(PeerUnreachable, match="is lost"):
        await asked
    assert client.calls.is_lost


def test_a_salt_is_never_sent_as_it_is():
    assert wire_salt("") == ""
    found = {wire_salt(salt) for salt in ("a", "b", "tenant/1@x", "x" * 1000)}
    found |= {wire_salt(salt, [("mm", identifier, 4, 8)]) for salt in ("", "a") for identifier in (b"a" * 16, b"b" * 16)}
    assert len(found) == 8
    assert all(salt.isalnum() and len(salt) == 32 for salt in found)


@pytest.mark.asyncio
async def test_a_pool_that_cannot_be_copied_is_refused_at_the_start(make_engine):
    engine = make_engine(LMCacheSection(), b"model", 1)
    pool = engine.connector.worker.pool
    for changes, said in (({"buffer": None, "device": "cuda:0"}, "cuda:0"), ({"seals": None}, "seals")):
        engine.connector.worker.pool = dataclasses.replace(pool, **changes)
        with pytest.raises(ConnectorUnavailable, match=said):
            await engine.connector.start()
    await engine.connector.stop()


@pytest.mark.asyncio
async def test_without_a_server_a_worker_serves(make_engine):
    nobody = LMCacheSection(
        server_address="tcp://127.0.0.1:9", http_address="http://127.0.0.1:9", retry_interval_s=0.01, request_timeout_s=1.0
    )
    engine = make_engine(nobody, b"model", 1)
    await engine.connector.start()
    assert not engine.connector.is_connected
    assert await engine.run("a", list(range(300))) is None
    await engine.settled()
    engine.core.shutdown()
    await engine.connector.stop()
    await engine.connector.stop()
