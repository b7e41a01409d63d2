from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket

import httpx
import pytest

from core.config_router import RouterSection
from core.errors import ConfigError
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.sockets import split_tcp
from router.http.server import Router, _listen
from router.main import _serve
from router.openai.served_model import ServedModel

MESSAGES = "/v1/messages"
BODY = {"prompt": "p", "max_tokens": 50}


async def test_ports_are_told_after_the_start(start_router):
    under_test = await start_router()
    router = under_test.router
    assert router.port > 0
    host, worker_port = split_tcp(router.worker_address)
    assert router.http_address == f"http://127.0.0.1:{router.port}"
    assert host == "127.0.0.1"
    assert worker_port > 0


@pytest.mark.slow
async def test_clients_and_workers_are_served_over_ipv6(needs_ipv6, start_router):
    under_test = await start_router(host="::1", worker_address="tcp://[::1]:0")
    await under_test.pair()
    async with under_test.client() as client:
        response = await client.post("/v1/completions", json=BODY)
    assert under_test.url.startswith("http://[::1]:")
    assert response.json()["choices"][0]["text"] == "hello world"


@pytest.mark.slow
@pytest.mark.parametrize(("address", "num_warnings"), [("tcp://127.0.0.1:0", 0), ("tcp://0.0.0.0:0", 1)])
async def test_workers_port_that_other_machines_reach_is_warned_about(start_router, caplog, address, num_warnings):
    await start_router(worker_address=address)
    assert sum("setting=router.worker_address" in record.message for record in caplog.records) == num_warnings


def test_answers_do_not_wait_for_the_acknowledgement_of_the_ones_before():
    with _listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
async def test_a_taken_http_port_is_a_configuration_error(start_router):
    under_test = await start_router()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{under_test.router.port}"):
        await start_router(port=under_test.router.port)


@pytest.mark.slow
async def test_routers_that_share_a_port_serve_it_together(start_router):
    first = await start_router(shares_port=True)
    second = await start_router(shares_port=True, port=first.router.port)
    both = (first, second)
    async with asyncio.timeout(20):
        while min(each.metric("kvferry_http_requests_total", path="/health", status="200") for each in both) < 1:
            async with first.client() as client:  # the kernel chooses for each connection
                await client.get("/health")
    await second.router.stop()
    for _ in range(10):
        async with first.client() as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.slow
async def test_a_router_that_drains_leaves_a_shared_port_to_the_others(start_router):
    first = await start_router(shares_port=True)
    await first.pair()
    second = await start_router(shares_port=True, port=first.router.port)
    _, decode = await second.pair(pause_after=1)
    transport = httpx.ASGITransport(second.router.app)  # whatever the kernel chooses
    waiting = asyncio.create_task(
        httpx.AsyncClient(transport=transport, base_url=second.url).post("/v1/completions", json=BODY)
    )
    await decode.generated()
    draining = asyncio.create_task(second.router.stop(grace_s=10))
    await second.until(lambda: second.router.endpoints.is_closing)
    await asyncio.sleep(0)
    for _ in range(10):
        async with first.client() as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    decode.script.resume.set()
    assert (await waiting).status_code == 200
    await draining


@pytest.mark.slow
async def test_a_failed_start_frees_the_http_port(start_router):
    under_test = await start_router()
    taken = under_test.router.worker_address
    with pytest.raises(ConfigError):
        await start_router(worker_address=taken)


@pytest.mark.slow
async def test_stopping_waits_for_requests_in_flight_and_refuses_new_ones(start_router):
    under_test = await start_router()
    _, decode = await under_test.pair(pause_after=1)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await decode.generated()
        stopping = asyncio.create_task(under_test.router.stop(grace_s=10))
        await under_test.until(lambda: under_test.router.endpoints.is_closing)
        async with under_test.client() as late:
            refused = await late.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close"), "its next try is for another"
            assert (await late.get("/ready")).status_code == 503
        assert under_test.metric("kvferry_ready") == 0
        decode.script.resume.set()
        answer = await call
        assert (answer.json()["choices"][0]["text"], answer.headers["connection"]) == ("hello world", "close")
        await stopping


async def test_a_draining_router_reads_the_rest_of_a_body_that_it_has_refused(start_router):
    """The end of a connection in the midst of a body would reset it, and the client could lose the answer."""
    under_test = await start_router(max_body_bytes=1000)
    _, decode = await under_test.pair(pause_after=1)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await decode.generated()
        stopping = asyncio.create_task(under_test.router.stop(grace_s=10))
        await under_test.until(lambda: under_test.router.endpoints.is_closing)
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.router.port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n"
        writer.write(head.encode() + 3000 * b"x")
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in answer.split(b"\r\n")[0]
        assert b"connection: close" not in answer
        writer.write(6000 * b"x" + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b" 200 OK")
        writer.close()
        decode.script.resume.set()
        await call
        await stopping


async def test_stopping_waits_for_requests_that_no_worker_has_yet(start_router, monkeypatch):
    under_test = await start_router()
    await under_test.pair()
    reader, is_reading, may_go_on = under_test.router.endpoints._reader, asyncio.Event(), asyncio.Event()
    read_completion = reader.read_completion

    async def slow(*args):
        is_reading.set()
        await may_go_on.wait()
        return await read_completion(*args)

    monkeypatch.setattr(reader, "read_completion", slow)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await is_reading.wait()
        stopping = asyncio.create_task(under_test.router.stop(grace_s=10))
        await under_test.until(lambda: under_test.router.endpoints.is_closing)
        assert under_test.router.gateway.is_alive
        may_go_on.set()
        assert (await call).json()["choices"][0]["text"] == "hello world"
        await stopping


async def test_stopping_waits_for_both_legs_of_a_body_for_engines_and_refuses_new_ones(start_router):
    under_test = await start_router()
    message = {"model": "tiny", "max_tokens": 5}
    parts = under_test.script(calls={MESSAGES: lambda body: (200, None)})
    prefill = await under_test.add("prefill", takes_calls=True, script=parts)
    whole = under_test.script(calls={MESSAGES: lambda body: (200, {"content": []})})
    await under_test.add("decode", takes_calls=True, script=whole)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post(MESSAGES, json=message))
        first_leg = await prefill.wait_for(lambda message: isinstance(message, EngineCall))
        stopping = asyncio.create_task(under_test.router.stop(grace_s=10))
        await under_test.until(lambda: under_test.router.endpoints.is_closing)
        async with under_test.client() as late:
            assert (await late.post(MESSAGES, json=message)).status_code == 503
        await prefill.send(EngineReply(request_id=first_leg.request_id, position=0, status=200, body=b"{}", is_last=True))
        assert ((await call).status_code, (await call).json()) == (200, {"content": []})
        await stopping


@pytest.mark.slow
async def test_stopping_sends_away_what_outlasts_the_grace(start_router):
    under_test = await start_router()
    prefill, _ = await under_test.pair(is_silent=True)
    async with under_test.client() as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        request_id = (await prefill.generated()).request_id
        await under_test.router.stop(grace_s=0.05)
        response = await call
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert "the router shuts down" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 0
    await prefill.aborts(request_id)


async def test_stopping_ends_a_stream_with_an_error(start_router):
    under_test = await start_router()
    _, decode = await under_test.pair(pause_after=3)
    async with (
        under_test.client() as client,
        client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        assert "choices" in await anext(lines)
        await under_test.router.stop()
        *_, last = [line async for line in lines if line]
    assert '"code":"no_worker"' in last
    assert "the router shuts down" in last
    await decode.aborts((await decode.generated()).request_id)


@pytest.mark.slow
async def test_stopping_twice_is_harmless_and_closes_the_port(start_router):
    under_test = await start_router()
    url = under_test.url
    await under_test.router.stop()
    await under_test.router.stop()
    async with httpx.AsyncClient(verify=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")


async def test_server_that_cannot_listen_ends_the_start(tiny_tokenizer, monkeypatch):
    async def no_descriptor(*_args, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    section = RouterSection(port=0, worker_address="tcp://127.0.0.1:0")
    router = Router(section, ServedModel(name="tiny", tokenizer=tiny_tokenizer))
    monkeypatch.setattr(asyncio.get_running_loop(), "create_server", no_descriptor)
    async with asyncio.timeout(10):
        with pytest.raises(OSError, match="Too many open files"):
            await router.start()
    assert router._socket.fileno() == -1
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_s_loop_in_order(tiny_tokenizer, number):
    section = RouterSection(port=0, worker_address="tcp://127.0.0.1:0")
    router = Router(section, ServedModel(name="tiny", tokenizer=tiny_tokenizer))
    told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(_serve(router, told.set_result))
    addresses = await told
    assert addresses == {"http_address": router.http_address, "worker_address": router.worker_address}
    os.kill(os.getpid(), number)
    async with asyncio.timeout(10):
        assert await serving == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_all_broken", [False, True])
async def test_a_bug_in_the_timer_ends_the_process_and_answers_everyone(start_router, monkeypatch, caplog, is_all_broken):
    under_test = await start_router(has_http=False)
    router = under_test.router
    told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    await router.gateway.stop()
    serving = asyncio.create_task(_serve(router, told.set_result))
    await told
    prefill, _ = await under_test.pair(is_silent=True)

    def broken(*args):
        raise ValueError("a bug")

    async with httpx.AsyncClient(base_url=router.http_address, verify=False) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await prefill.generated()
        for name in ("on_timer", "fail") if is_all_broken else ("on_timer",):
            monkeypatch.setattr(router.gateway.core, name, broken)
        async with asyncio.timeout(5):
            assert await serving == 1
        assert (await call).status_code == 503
    assert "router_task_died" in caplog.text


async def test_a_signal_gives_requests_the_configured_time_and_no_more(start_router):
    under_test = await start_router(has_http=False, drain_timeout_s=0.05)
    router = under_test.router
    told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    await router.gateway.stop()
    serving = asyncio.create_task(_serve(router, told.set_result))
    await told
    prefill, _ = await under_test.pair(is_silent=True)
    async with httpx.AsyncClient(base_url=router.http_address, verify=False) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await prefill.generated()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await serving
        assert (await call).status_code == 503


async def test_a_second_signal_does_not_wait_for_requests(tiny_tokenizer, start_router):
    under_test = await start_router(has_http=False)
    router = under_test.router
    told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    await router.gateway.stop()
    serving = asyncio.create_task(_serve(router, told.set_result))
    await told
    prefill, _ = await under_test.pair(is_silent=True)
    async with httpx.AsyncClient(base_url=router.http_address, verify=False) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await prefill.generated()
        os.kill(os.getpid(), signal.SIGTERM)
        await under_test.until(lambda: router.endpoints.is_closing)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await serving
        assert (await call).status_code == 503
