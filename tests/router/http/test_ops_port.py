"""Probes and metrics on their own port: what each port serves, and that clients cannot block the probes."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from core.errors import ConfigError


async def ask(base, path):
    async with httpx.AsyncClient(base_url=base, verify=False) as client:
        return await client.get(path)


@pytest.mark.slow
async def test_metrics_and_status_are_on_the_ops_port_only(start_router):
    under_test = await start_router(ops_port=0)
    for path in ("/metrics", "/status", "/status.json", "/status/history.json", "/status/requests.json"):
        assert (await ask(under_test.router.ops_address, path)).status_code == 200
        assert (await ask(under_test.url, path)).status_code == 404
    assert "kvferry_http_requests_total" in (await ask(under_test.router.ops_address, "/metrics")).text


@pytest.mark.slow
async def test_a_request_is_looked_up_by_its_id_on_the_ops_port(start_router):
    under_test = await start_router(ops_port=0)
    await under_test.pair()
    name = "<mine&yours>+%/?#"
    async with under_test.client() as client:
        body, headers = {"prompt": "p", "max_tokens": 3}, {"x-request-id": name}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    async with httpx.AsyncClient(base_url=under_test.router.ops_address) as client:
        found = (await client.get("/status/requests.json", params={"id": name})).json()["found"]
        assert [timeline["state"] for timeline in found] == ["finished"]
        assert (await client.get("/status/requests.json", params={"id": "another"})).json()["found"] == []
        assert (await client.head("/status/requests.json")).status_code == 200
        refused = await client.post("/status/requests.json")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.slow
async def test_probes_are_on_both_ports_and_agree(start_router):
    under_test = await start_router(ops_port=0)
    for path in ("/health", "/ping", "/ready", "/readyz", "/version"):
        answers = [await ask(base, path) for base in (under_test.router.ops_address, under_test.url)]
        assert answers[0].status_code == answers[1].status_code
        assert answers[0].json() == answers[1].json()


@pytest.mark.slow
async def test_ops_port_needs_no_key_and_knows_nothing_of_the_api(start_router):
    under_test = await start_router(ops_port=0, api_key="secret")
    assert (await ask(under_test.router.ops_address, "/ready")).json()["status"] == "not ready"
    assert (await ask(under_test.router.ops_address, "/v1/models")).status_code == 404


async def test_status_page_keeps_its_content_security_policy(start_router):
    under_test = await start_router(ops_port=0)
    answer = await ask(under_test.router.ops_address, "/status")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.slow
async def test_probes_answer_while_clients_fill_the_api_s_port(start_router):
    under_test = await start_router(ops_port=0, max_connections=2)
    opened = [await asyncio.open_connection("127.0.0.1", under_test.router.port) for _ in range(2)]
    for _, writer in opened:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-length: 9\r\n\r\n")
    await under_test.until(lambda: under_test.num_busy == 2)
    with pytest.raises(httpx.TransportError):
        await ask(under_test.url, "/health")
    assert (await ask(under_test.router.ops_address, "/health")).status_code == 200
    assert 'reason="limit"' in (await ask(under_test.router.ops_address, "/metrics")).text
    for _, writer in opened:
        writer.close()


async def test_taken_ops_port_is_a_configuration_error(start_router):
    under_test = await start_router(ops_port=0)
    port = int(under_test.router.ops_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)) as raised:
        await start_router(ops_port=port)
    assert raised.value.param == "router.ops_port"
