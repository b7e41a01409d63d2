"""The doctor asks the servers that a process talks to, and finds those that would not take it."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest
import zmq

from core.config import load_config
from core.wire.curve import derive_keys, secure_server
from kvferry import doctor_checks, doctor_peers
from kvferry.doctor import findings_of
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts

KEY, OTHER_KEY = "k" * 40, "o" * 40


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def http_server():
    """The port of a server, and its answers by path, None for a 404."""
    answers: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port, answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def drip_port():
    """The port of a server whose answers come byte by byte, each within any time limit, and are JSON at their end."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            answer = b'{"wire_version": 2, "data": [{"id": "served"}]}'
            for byte in b" " * 400 + answer:
                if is_over.wait(0.01):
                    return
                self.wfile.write(bytes([byte]))

        def log_message(self, *_) -> None:
            pass

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        is_over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def router_with_key():
    """The port of a socket that binds with ``KEY``."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        secure_server(bound, derive_keys(KEY))
        yield bound.bind_to_random_port("tcp://127.0.0.1")


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([f"security.cluster_key={KEY}"], "ok"),
        ([f"security.cluster_key={OTHER_KEY}", f"security.other_cluster_keys={KEY}"], "ok"),
        ([f"security.cluster_key={OTHER_KEY}"], "warning"),
        ([f"security.cluster_key={OTHER_KEY}", "worker.engine_id=p0"], "failure"),
        (["security.cluster_key="], "warning"),
    ],
)
def test_a_peer_that_holds_another_cluster_key_is_told_from_one_that_fits(settings, verdict, router_with_key):
    address = f"tcp://127.0.0.1:{router_with_key}"
    found = verdicts(doctor_peers.check_peers, f"worker.router_addresses={address}", *settings)["peers"]
    assert (found.verdict, f"worker.router_addresses {address}" in found.text) == (verdict, True)
    if verdict != "ok":
        assert "does not take" in found.text
        assert "$KVFERRY_CLUSTER_KEY" in found.fix


def test_a_peer_that_is_silent_or_not_there_is_no_router(listener, closed_port, monkeypatch):
    monkeypatch.setattr(doctor_peers, "CONNECT_TIMEOUT_S", 0.2)
    for port, said in ((listener, "it is no router or store"), (closed_port, "refused")):
        found = verdicts(doctor_peers.check_peers, f"worker.router_addresses=tcp://127.0.0.1:{port}")["peers"]
        assert (found.verdict, said in found.text) == ("warning", True)


def test_a_model_that_the_router_does_not_serve_is_found(http_server):
    port, answers = http_server
    check = partial(doctor_peers.check_served_model, url=f"http://127.0.0.1:{port}")
    assert verdicts(check)["model of the router"].fix.startswith("look whether it is a router")
    answers["/v1/models"] = {"data": [{"id": "served"}]}
    for settings, verdict in (
        (["model.served_name=served"], "ok"),
        (["model.name=served"], "ok"),
        (["model.name=gemma3-270m"], "warning"),
        (["model.name=gemma3-270m", "worker.engine_id=p0"], "failure"),
    ):
        assert verdicts(check, *settings)["model of the router"].verdict == verdict
    found = {one.subject: one for one in findings_of(load_config(), f"http://127.0.0.1:{port}")}
    assert found["model of the router"].text.endswith(" serves served")


@pytest.mark.slow
def test_server_that_answers_byte_by_byte_is_left_after_a_time(drip_port, monkeypatch):
    monkeypatch.setattr(doctor_peers, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(doctor_peers, "ANSWER_TIMEOUT_S", 1.0, raising=False)
    found = verdicts(partial(doctor_peers.check_served_model, url=f"http://127.0.0.1:{drip_port}"), "model.name=served")
    assert "named no model: TimeoutError()" in found["model of the router"].text
    assert not doctor_peers.is_router_at_port(load_config(assignments=[f"router.port={drip_port}"]).router)


def test_answer_without_end_is_not_kept(http_server, monkeypatch):
    port, answers = http_server
    monkeypatch.setattr(doctor_peers, "_MAX_ANSWER_BYTES", 1 << 10, raising=False)
    answers["/v1/models"] = {"data": [{"id": "served"}], "more": "x" * (1 << 10)}
    found = verdicts(partial(doctor_peers.check_served_model, url=f"http://127.0.0.1:{port}"), "model.name=served")
    assert "the answer is too long" in found["model of the router"].text


def test_port_of_serve_that_no_router_of_ours_holds_is_a_failure(http_server):
    port, answers = http_server
    setting = f"router.port={port}"

    def verdict(*settings):
        found = doctor_checks.check_ports(load_config(assignments=[setting, *settings]))
        return next(one.verdict for one in found if one.text.startswith(f"router.port 127.0.0.1:{port} cannot be bound"))

    assert (verdict(), verdict(OF_ANY_PROCESS)) == ("failure", "warning")
    answers["/version"] = {"version": "0.1.0", "wire_version": 2}
    assert verdict() == "warning"


def test_redis_that_does_not_answer_is_found(closed_port):
    assert list(doctor_peers.check_redis_server(load_config())) == []
    pytest.importorskip("redis")
    found = verdicts(doctor_peers.check_redis_server, f"kvstore.redis_url=redis://127.0.0.1:{closed_port}/0")["Redis"]
    assert (found.verdict, found.text.partition(":")[0]) == ("warning", "kvstore.redis_url")
    assert "Connection refused" in found.text


@pytest.mark.parametrize("option", ["foo=1", "ssl_cert_reqs=none", "db=abc", "retry=x", "socket_connect_timeout=-3"])
def test_redis_option_that_the_library_does_not_take_is_found(option, closed_port):
    pytest.importorskip("redis")
    found = verdicts(doctor_peers.check_redis_server, f"kvstore.redis_url=redis://127.0.0.1:{closed_port}/0?{option}")["Redis"]
    assert (found.verdict, found.fix) == ("warning", "correct kvstore.redis_url")
    assert found.text.startswith("kvstore.redis_url: an option in it ")


@pytest.mark.slow
def test_redis_is_asked_with_the_password_of_the_store(redis_process):
    url = f"kvstore.redis_url={redis_process.url}"
    assert verdicts(doctor_peers.check_redis_server, url)["Redis"].verdict == "ok"
    redis_process.kill()
    redis_process.password = "right"
    redis_process.start()
    for password, verdict in (("right", "ok"), ("wrong", "warning")):
        assert verdicts(doctor_peers.check_redis_server, url, f"kvstore.redis_password={password}")["Redis"].verdict == verdict


def test_lmcache_server_is_asked_for_its_version(http_server, listener, closed_port):
    port, answers = http_server
    assert list(doctor_peers.check_lmcache_server(load_config())) == []
    config = load_config(
        assignments=[
            "connector.name=lmcache",
            f"connector.lmcache.http_address=http://127.0.0.1:{port}",
            f"connector.lmcache.server_address=tcp://127.0.0.1:{closed_port}",
        ]
    )
    found = list(doctor_peers.check_lmcache_server(config))
    assert [one.verdict for one in found] == ["warning", "warning"]
    assert [one.text.partition(" ")[0] for one in found] == [
        "connector.lmcache.http_address",
        "connector.lmcache.server_address",
    ]
    answers.update({"/lmc_version": "0.5.6", "/config": {"mp": {"chunk_size": 256, "separate_object_groups": True}}})
    first, _ = doctor_peers.check_lmcache_server(config)
    assert (first.verdict, first.text.endswith("version 0.5.6")) == ("ok", True)


def test_what_lmcache_copies_through_is_held_against_shared_memory(monkeypatch):
    class State:
        f_bavail, f_frsize = 64 << 8, 4096  # 64 MiB

    monkeypatch.setattr(os, "statvfs", lambda _path: State)
    settings = ["connector.name=lmcache", "connector.lmcache.staging_bytes=48MiB"]
    for more, verdict in (([], "warning"), (["local.aggregated=true"], "ok"), (["connector.name=p2p"], "ok")):
        *_, found = doctor_checks.check_memory(load_config(assignments=[*settings, *more]))
        assert (found.text.startswith("/dev/shm has 64 MiB free"), found.verdict) == (True, verdict)
        assert ("connector.lmcache.staging_bytes" in found.text) == ("connector.name=p2p" not in more)
