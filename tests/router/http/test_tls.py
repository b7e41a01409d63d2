"""The clients' port with TLS, over real sockets: requests, streams, probes, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import ssl

import httpx
import pytest

from core.config import load_config
from core.config_router import RouterSection
from core.errors import ConfigError
from kvferry.http_get import get
from router.http.tls import RETRY_S, server_context
from tests.support.certificates import self_signed

BODY = {"prompt": "p", "max_tokens": 50}


@pytest.fixture
def files(tmp_path):
    return self_signed(tmp_path)


@pytest.fixture
async def secure(start_router, files):
    cert, key = files
    under_test = await start_router(tls_cert=str(cert), tls_key=str(key))
    await under_test.pair()
    return under_test


def client_of(under_test, files) -> httpx.AsyncClient:
    """Return a client that trusts the certificate and checks its host."""
    return httpx.AsyncClient(base_url=under_test.url, timeout=10.0, verify=ssl.create_default_context(cafile=str(files[0])))


async def test_requests_and_streams_are_served(secure, files):
    assert secure.url.startswith("https://127.0.0.1:")
    async with client_of(secure, files) as client:
        whole = await client.post("/v1/completions", json=BODY)
        assert whole.json()["choices"][0]["text"] == "hello world"
        streamed = await client.post("/v1/completions", json={**BODY, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "hello world"
    assert events[-1] == "[DONE]"


async def test_certificate_is_the_configured_one(secure):
    async with httpx.AsyncClient(base_url=secure.url) as stranger:
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            await stranger.get("/health")


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(secure, files):
    async with client_of(secure, files) as client:
        assert (await client.get("/health")).status_code == 200
        files[1].write_text("half a file")
        async with client_of(secure, files) as other:
            assert (await other.get("/health")).status_code == 200, "a wrong key does not replace the loaded one"
        self_signed(files[0].parent)
        async with client_of(secure, files) as other:
            assert (await other.get("/health")).status_code == 200
        assert (await client.get("/health")).status_code == 200, "a connection outlives its certificate"


async def test_a_certificate_whose_files_are_gone_stays_in_use(secure, files, caplog):
    client = client_of(secure, files)
    for file in files:
        file.unlink()
    async with client:
        assert (await client.get("/health")).status_code == 200
    async with httpx.AsyncClient(base_url=secure.url, verify=False) as other:
        assert (await other.get("/health")).status_code == 200
    assert [record.levelname for record in caplog.records if "certificate_refused" in record.message] == ["ERROR"]


@pytest.fixture
def handshake(files):
    """Do handshakes with the context of files that could not be read once; return the certificate of each."""
    now = [0.0]
    context = server_context(str(files[0]), str(files[1]), lambda: now[0])
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def shake(at: float) -> bytes:
        now[0] = at
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = client.wrap_bio(to_client, to_server)
        theirs = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(3):
            for end in (ours, theirs):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return ours.getpeercert(binary_form=True)

    return shake


def lacking(error: Exception, times: int):
    """Return a stand-in for ``load_cert_chain`` that fails so many times."""
    load, left = ssl.SSLContext.load_cert_chain, [error] * times

    def load_cert_chain(context, *args, **kwargs):
        if left:
            raise left.pop()
        load(context, *args, **kwargs)

    return load_cert_chain


def test_a_renewed_certificate_that_could_not_be_read_is_tried_again(files, handshake, monkeypatch, caplog):
    old = handshake(0.0)
    self_signed(files[0].parent)
    error = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lacking(error, times=2))
    assert [handshake(at) == old for at in (1.0, 1.5, 1.0 + RETRY_S, 1.5 + RETRY_S)] == [True] * 4
    assert handshake(1.0 + 2 * RETRY_S) != old
    assert caplog.text.count("certificate_refused") == 1


def test_a_certificate_that_is_wrong_is_not_tried_again_until_it_changes(files, handshake, monkeypatch):
    old = handshake(0.0)
    self_signed(files[0].parent)
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lacking(ssl.SSLError("mismatch"), times=1))
    assert handshake(1.0) == handshake(100.0) == old
    files[1].chmod(0o640)
    assert handshake(100.1) != old


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_are_answered_to_clients_and_to_the_supervisor(secure, files, path):
    async with client_of(secure, files) as client:
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).content == b""
    status, body = await asyncio.to_thread(get, f"{secure.url}{path}", 10.0)
    assert (status, json.loads(body)["status"]) == (200, "ok" if path == "/health" else "ready")


async def test_probes_port_stays_without_tls(start_router, files):
    cert, key = files
    under_test = await start_router(tls_cert=str(cert), tls_key=str(key), ops_port=0)
    async with httpx.AsyncClient(base_url=under_test.router.ops_address) as client:
        assert (await client.get("/health")).status_code == 200


async def test_requests_without_tls_get_nothing_and_harm_nothing(secure, files):
    async with httpx.AsyncClient(base_url=secure.url.replace("https", "http")) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    async with client_of(secure, files) as client:
        assert (await client.get("/health")).status_code == 200


async def test_old_protocol_versions_are_refused(secure):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")

    def connect() -> None:
        with socket.create_connection(("127.0.0.1", secure.router.port), timeout=10.0) as plain, context.wrap_socket(plain):
            pass

    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(connect)


async def test_head_that_is_too_large_is_refused_with_a_reason(secure, files):
    async with client_of(secure, files) as client:
        answer = await client.get("/health", headers={"x-large": "x" * (100 << 10)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "head_too_large")


@pytest.mark.parametrize("wrong", ["missing", "no certificate", "another key"])
def test_files_that_cannot_be_used_are_named(files, tmp_path, wrong):
    cert, key = files
    if wrong == "missing":
        cert = tmp_path / "absent.pem"
    elif wrong == "no certificate":
        cert.write_text("nonsense")
    else:
        (tmp_path / "other").mkdir()
        key = self_signed(tmp_path / "other")[1]
    with pytest.raises(ConfigError, match="cannot be loaded") as refused:
        server_context(str(cert), str(key))
    assert str(cert) in str(refused.value)


def test_no_certificate_means_no_tls():
    assert server_context(RouterSection().tls_cert, RouterSection().tls_key) is None


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_certificate_and_key_go_together(given, missing):
    with pytest.raises(ConfigError) as refused:
        load_config(assignments=[f"router.{given}=/somewhere.pem"])
    assert refused.value.param == f"router.{missing}"
