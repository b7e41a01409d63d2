"""The operations port answers probes, refuses nonsense, and survives both."""

import asyncio

import httpx
import pytest

from core.errors import ConfigError
from core.worker.ops_http import MAX_HEAD_BYTES, OpsResponse, OpsServer


def broken():
    raise ValueError("probe is broken")


@pytest.fixture
async def address():
    drained = []
    server = OpsServer(
        {
            ("GET", "/health"): lambda: OpsResponse.of_json(200, {"status": "ok"}),
            ("GET", "/ready"): lambda: OpsResponse.of_json(503, {"status": "loading"}),
            ("GET", "/broken"): broken,
            ("POST", "/drain"): lambda: drained.append(1) or OpsResponse(202, str(len(drained)).encode()),
        },
        query_routes={("POST", "/role"): lambda query: OpsResponse.of_json(200, dict(query))},
    )
    yield await server.start("127.0.0.1", 0)
    await server.stop()


@pytest.fixture
async def client(address):
    async with httpx.AsyncClient(base_url=address) as client:
        yield client


async def test_answers_get_head_and_post(client):
    health = await client.get("/health?verbose=1")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    head = await client.head("/health")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(health.content)))
    assert (await client.get("/ready")).status_code == 503
    assert (await client.post("/drain", content=b"ignored")).text == "1"


async def test_a_command_reads_its_query(client):
    assert (await client.post("/role?to=decode&why=a%20b&empty=")).json() == {"to": "decode", "why": "a b", "empty": ""}
    assert (await client.post("/role")).json() == {}
    refused = await client.post("/role?to=decode", headers={"origin": "https://page.example"})
    assert refused.status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [("GET", "/nope", 404, None), ("GET", "/drain", 405, "POST"), ("DELETE", "/health", 405, "GET, HEAD")],
)
async def test_refuses_unknown_paths_and_methods(client, method, path, status, allowed):
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)


async def test_only_the_own_host_may_change_something_and_others_may_look():
    routes = {("GET", "/drain"): lambda: OpsResponse(200, b""), ("POST", "/drain"): lambda: OpsResponse(202, b"")}
    callers = []
    server = OpsServer(routes, is_trusted=lambda caller: callers.append(caller) or False)
    async with httpx.AsyncClient(base_url=await server.start("127.0.0.1", 0)) as client:
        assert (await client.get("/drain")).status_code == 200
        assert (await client.post("/drain")).status_code == 403
    await server.stop()
    assert callers == ["127.0.0.1"]


@pytest.mark.parametrize("name", ["Origin", "origin", "ORIGIN"])
async def test_web_page_cannot_drain_but_may_look(client, name):
    headers = {name: "null"}
    assert (await client.post("/drain", headers=headers)).status_code == 403
    assert (await client.get("/health", headers=headers)).status_code == 200
    assert (await client.post("/drain", headers={"X-Origin": "null"})).text == "1"


async def test_broken_handler_is_a_500_and_the_server_lives_on(client):
    assert (await client.get("/broken")).status_code == 500
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET / FTP/1.1\r\n\r\n", 400),
        (b"x" * (MAX_HEAD_BYTES + 9), 431),
    ],
)
async def test_malformed_request_is_refused(address, client, request_bytes, status):
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_bytes)
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d" % status)
    writer.close()
    assert (await client.get("/health")).status_code == 200


async def test_connections_beyond_the_bound_are_closed_and_the_rest_served(address, client, monkeypatch):
    monkeypatch.setattr("core.worker.ops_http.MAX_CONNECTIONS", 2)
    host, port = address.removeprefix("http://").split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    for _, opened in held:
        opened.write(b"GET /health HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(5):
        assert [(await opened.readline())[:12] for opened, _ in held] == [b"HTTP/1.1 200"] * 2
    writer.close()


async def test_client_that_leaves_without_a_request_is_harmless(address, client):
    host, port = address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    assert (await client.get("/health")).status_code == 200


async def test_port_in_use_is_a_configuration_error(address):
    port = int(address.rpartition(":")[2])
    said = rf"^kvstore\.ops_port = {port}: cannot listen on .* already in use; stop what listens there"
    with pytest.raises(ConfigError, match=said):
        await OpsServer({}, setting="kvstore.ops_port").start("127.0.0.1", port)
