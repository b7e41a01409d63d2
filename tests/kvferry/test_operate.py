"""The operators' commands: keys, draining a worker, probing a cluster."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from typer.testing import CliRunner

from core.errors import ConfigError
from core.worker.ops_http import OpsResponse, OpsServer
from kvferry import cli
from kvferry.demo_vllm import EngineReading
from kvferry.operate import (
    DrainFailed,
    ProbeFailed,
    RoleSwitchFailed,
    drain_worker,
    ops_address,
    probe_cluster,
    worker_role,
)
from router.http.api_keys import bearer_key

TRANSFER = {"transport": "tcp", "verified_blocks": 1, "fallback_reason": ""}


def no_sleep(_):
    pass


def worker_that_leaves(monkeypatch, answers):
    """Have drain_worker talk to a worker that answers so, one after the other; returns the requests it got."""
    asked = []

    def answer(request):
        asked.append((request.method, request.url.path))
        outcome = answers.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return httpx.Response(outcome)

    make = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: make(transport=httpx.MockTransport(answer), **options))
    return asked


def test_keygen_prints_a_key_that_kvferry_takes():
    first, second = (CliRunner().invoke(cli.app, ["keygen"]).stdout.strip() for _ in range(2))
    assert len(first) == 64
    assert first != second


def test_drain_asks_once_and_waits_for_the_end(monkeypatch):
    asked = worker_that_leaves(monkeypatch, [202, 200, 503, httpx.ReadTimeout("busy"), httpx.ConnectError("refused")])
    drain_worker("http://localhost:1", 60.0, no_sleep)
    assert asked == [("POST", "/drain"), *[("GET", "/health")] * 4]


def test_drain_asks_again_where_the_first_question_was_not_answered(monkeypatch):
    asked = worker_that_leaves(monkeypatch, [httpx.ReadTimeout("busy"), 202, httpx.ConnectError("refused")])
    drain_worker("http://localhost:1", 60.0, no_sleep)
    assert asked == [("POST", "/drain"), ("POST", "/drain"), ("GET", "/health")]


@pytest.mark.parametrize("command", ["drain", "role"])
@pytest.mark.parametrize("port", ["0", "74936"])
def test_no_other_worker_is_asked_for_a_port_number_that_is_none(monkeypatch, command, port):
    asked = worker_that_leaves(monkeypatch, [])
    result = CliRunner().invoke(cli.app, [command, "--ops-port", port])
    assert (result.exit_code, asked) == (2, [])


@pytest.mark.parametrize("command", ["drain", "role"])
@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("", "http://localhost:1"),
        ("127.0.0.2", "http://127.0.0.2:1"),
        ("::1", "http://[::1]:1"),
        ("[::1]", "http://[::1]:1"),
        ("worker-0.example", "http://worker-0.example:1"),
        ("worker1", "http://worker1:1"),
    ],
)
def test_the_host_of_a_worker_is_asked_and_an_error_names_it(monkeypatch, command, host, named):
    asked = []

    def answer(request):
        asked.append(str(request.url))
        raise httpx.ConnectError("refused")

    make = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: make(transport=httpx.MockTransport(answer), **options))
    result = CliRunner().invoke(cli.app, [command, "--ops-port", "1", *(["--ops-host", host] if host else [])])
    assert asked == [f"{named}/{command}"]
    assert isinstance(result.exception, DrainFailed | RoleSwitchFailed)
    assert f" at {named}: refused; its log names its address" in str(result.exception)
    assert "--ops-host" in str(result.exception)


@pytest.mark.parametrize("command", ["drain", "role"])
@pytest.mark.parametrize(
    "host",
    ["", "http://127.0.0.2", "127.0.0.2:9400", "a b", "a/b", "u@h", "::1]", "[::1", "[h]", "1:z", "a..b", "ä", "999.1.1.1"],
)
def test_what_is_no_host_is_refused_before_anything_is_asked(monkeypatch, command, host):
    asked = worker_that_leaves(monkeypatch, [])
    result = CliRunner().invoke(cli.app, [command, "--ops-port", "1", "--ops-host", host])
    assert isinstance(result.exception, ConfigError)
    assert "--ops-host" in str(result.exception)
    assert asked == []


@pytest.mark.parametrize("command", ["drain", "role"])
@pytest.mark.parametrize("host", ["xn--0", "XN--a.example", "xn--zz--"])
def test_a_name_that_no_client_can_decode_is_refused_before_anything_is_asked(monkeypatch, command, host):
    test_what_is_no_host_is_refused_before_anything_is_asked(monkeypatch, command, host)


def test_the_encoded_name_of_a_host_is_one():
    assert ops_address("xn--fiqs8s.example", 9400) == "http://xn--fiqs8s.example:9400"


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
async def test_a_worker_at_another_loopback_address_takes_orders(host):
    server = OpsServer({("POST", "/drain"): lambda: OpsResponse(202, b"")})
    try:
        address = await server.start(host, 0)
    except ConfigError:
        pytest.skip(f"{host} is no address of this machine")
    port = int(address.rpartition(":")[2])
    assert ops_address(host, port) == address
    async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
        assert (await client.post("/drain")).status_code == 202
    await server.stop()


# ---- role --------------------------------------------------------------------------------------------------------------

REPORT = {
    "engine_id": "w0",
    "incarnation": "7f",
    "role": "decode",
    "num_switches": 2,
    "requests_of_former_role": 3,
    "leased_blocks": 4,
}


def worker_with_a_role(monkeypatch, outcome):
    """Have worker_role talk to a worker that shows its role, and answers so to the command; returns the queries it got."""
    asked = []

    def answer(request):
        asked.append(dict(request.url.params))
        return httpx.Response(200, json=REPORT) if request.method == "GET" else outcome

    make = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: make(transport=httpx.MockTransport(answer), **options))
    return asked


def test_role_names_the_life_and_the_role_that_the_worker_has_shown(monkeypatch):
    after = httpx.Response(200, json=REPORT | {"role": "prefill", "num_switches": 3})
    asked = worker_with_a_role(monkeypatch, after)
    line = worker_role("http://localhost:1", "prefill")
    assert asked == [{}, {"to": "prefill", "incarnation": "7f", "num_switches": "2"}]
    assert line == "w0: prefill, 3 switches since its start, 3 requests of its former role and 4 leased blocks left"


def test_no_proxy_is_asked_for_a_worker(monkeypatch):
    class Worker(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(REPORT).encode())

        def log_message(self, *_):
            pass

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Worker) as worker:
        thread = threading.Thread(target=worker.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert worker_role(f"http://127.0.0.1:{worker.server_port}").startswith("w0: decode")
        finally:
            worker.shutdown()
            thread.join()


def test_role_alone_only_looks(monkeypatch):
    asked = worker_with_a_role(monkeypatch, httpx.Response(500))
    assert worker_role("http://localhost:1").startswith("w0: decode, 2 switches")
    assert asked == [{}]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (httpx.Response(409, json={"error": "w0 has switched to prefill since"}), "has switched to prefill since"),
        (httpx.Response(503, json={"status": "loading"}), "loading"),
        (httpx.Response(403, text="only from the worker's own host or pod"), "HTTP 403: only from"),
    ],
)
def test_role_says_why_a_worker_keeps_its_role(monkeypatch, outcome, reason):
    worker_with_a_role(monkeypatch, outcome)
    with pytest.raises(RoleSwitchFailed, match=reason):
        worker_role("http://localhost:1", "prefill")


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(200, html="<p>Welcome</p>"), httpx.Response(200, json=[]), httpx.Response(200, json={"role": "x"})],
)
def test_role_says_so_if_another_server_answers(monkeypatch, answer):
    worker_with_a_role(monkeypatch, answer)
    with pytest.raises(RoleSwitchFailed, match=r"http://localhost:1/role\?\S+ is not answered as by a worker"):
        worker_role("http://localhost:1", "prefill")


# ---- drain -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([httpx.ConnectError("refused")], "no worker listens at http://localhost:1: refused"),
        (
            [httpx.ReadTimeout("busy"), httpx.ConnectError("refused")],
            "the worker at http://localhost:1 has gone without an answer: its log says whether it drained or died",
        ),
        ([404], "does not drain: POST /drain is answered with HTTP 404"),
        ([405], "does not drain"),
    ],
)
def test_worker_that_never_agreed_has_not_left(monkeypatch, answers, reason):
    worker_that_leaves(monkeypatch, answers)
    with pytest.raises(DrainFailed, match=reason):
        drain_worker("http://localhost:1", 60.0, no_sleep)


def test_drain_gives_up_in_time(monkeypatch):
    asked = worker_that_leaves(monkeypatch, [202, 200])
    with pytest.raises(DrainFailed, match="is still there after 0 s"):
        drain_worker("http://localhost:1", 0.0, no_sleep)
    assert asked == [("POST", "/drain")]


def cluster(*answers):
    """A client of a router that answers completions so, one after the other."""
    left = list(answers)

    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        status, transfer = left.pop(0)
        usage = {"completion_tokens": 4} | ({"kv_transfer": transfer} if transfer else {})
        return httpx.Response(status, json={"usage": usage})

    return httpx.Client(base_url="http://router", transport=httpx.MockTransport(answer))


def test_probe_reports_a_verified_handoff():
    line = probe_cluster(cluster((200, TRANSFER)), 0.0, True, no_sleep)
    assert line == "served: 4 tokens, 1 KV blocks transferred and verified by tcp"


def test_probe_waits_for_a_cluster_that_is_not_ready_and_reports_it_once(capsys):
    answers = [(503, None)] * 3 + [(200, TRANSFER)]
    assert "verified" in probe_cluster(cluster(*answers), 60.0, True, no_sleep)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("http://router: HTTP 503 Service Unavailable: ")
    assert line.endswith("; trying for 60 s more")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, {"json": {"error": {"message": "no worker can take it"}}}, "HTTP 503 Service Unavailable: no worker can take it"),
        (401, {"json": {"error": {"message": "wrong API key"}}}, "HTTP 401 Unauthorized: wrong API key"),
        (404, {"text": "<p>Not\nhere</p>"}, "HTTP 404 Not Found: <p>Not here</p>"),
        (307, {}, "HTTP 307 Temporary Redirect"),
    ],
)
def test_probe_says_why_a_server_refuses(path, status, body, reason):
    def answer(request):
        if request.url.path == path:
            return httpx.Response(status, **body)
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    client = httpx.Client(base_url="http://router", transport=httpx.MockTransport(answer))
    with pytest.raises(ProbeFailed) as failure:
        probe_cluster(client, 0.0, False, no_sleep)
    assert failure.value.message == f"http://router: {reason}"


@pytest.mark.parametrize(("timeout_s", "least", "most"), [(0.0, 1.0, 1.0), (5.0, 1.0, 5.0), (900.0, 60.0, 60.0)])
def test_probe_waits_for_no_answer_beyond_its_time(timeout_s, least, most):
    found = []

    def answer(request):
        found.extend(request.extensions["timeout"].values())
        return httpx.Response(200, json={"data": [{"id": "m"}], "usage": {"completion_tokens": 4}})

    def read(_url, timeout_s):
        found.append(timeout_s)
        return readings(0)("", timeout_s)

    client = httpx.Client(base_url="http://router", transport=httpx.MockTransport(answer))
    probe_cluster(client, timeout_s, False, no_sleep, engines=["http://d"], read=read)
    assert len(found) == 10
    assert (least <= min(found), max(found) <= most) == (True, True)


@pytest.mark.slow
def test_probe_of_a_dead_port_reports_it_and_fails():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = CliRunner().invoke(cli.app, ["probe", address, "--timeout", "0.3"])
    assert "Connection refused; trying for 0 s more" in result.stderr
    assert isinstance(result.exception, ProbeFailed)


@pytest.mark.parametrize("answer", [{"text": "<p>Welcome</p>"}, {"json": {"data": []}}, {"json": ["x"]}])
def test_probe_keeps_trying_while_another_server_answers(answer, capsys):
    answers = [httpx.Response(200, **answer) for _ in range(3)]
    answers += [
        httpx.Response(200, json={"data": [{"id": "m"}]}),
        httpx.Response(200, json={"usage": {"completion_tokens": 4}}),
    ]
    client = httpx.Client(base_url="http://router", transport=httpx.MockTransport(lambda _request: answers.pop(0)))
    assert probe_cluster(client, 60.0, False, no_sleep) == "served: 4 tokens, without a handoff"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("http://router: it does not answer as a router does")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:abc",
        "127.0.0.1:8000",
        "http://[::1",
        " http://127.0.0.1:1",
        "http://xn--a",
        "http://:8000",
        "http://h:99999",
        "http://h:-1",
        "http://h:0",
    ],
)
@pytest.mark.parametrize(("flag", "arguments"), [("URL", []), ("--engine", ["http://127.0.0.1:1", "--engine"])])
def test_probe_refuses_what_is_no_address(url, flag, arguments):
    result = CliRunner().invoke(cli.app, ["probe", *arguments, url])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(f"{flag} = {url!r}: ")


@pytest.mark.parametrize("keys", ["clé", "clé,other", " , clé ,other"])
def test_probe_sends_the_first_key_as_the_router_reads_it(monkeypatch, keys):
    asked = []

    def answer(request):
        asked.append(bearer_key(dict(request.headers.raw)[b"Authorization"]))
        return httpx.Response(200, json={"data": [{"id": "m"}], "usage": {"completion_tokens": 4}})

    make = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: make(transport=httpx.MockTransport(answer), **options))
    monkeypatch.setenv("KVFERRY_API_KEY", keys)
    assert CliRunner().invoke(cli.app, ["probe", "http://router"]).exit_code == 0
    assert asked == ["clé".encode()] * 2


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        (None, "no prefill worker took part"),
        (TRANSFER | {"fallback_reason": "peer_lost"}, "peer_lost"),
        (TRANSFER | {"verified_blocks": 0}, "nothing was transferred"),
    ],
)
def test_probe_fails_where_a_handoff_was_expected_and_none_took_place(transfer, reason):
    with pytest.raises(ProbeFailed, match=reason):
        probe_cluster(cluster((200, transfer)), 0.0, True, no_sleep)


def test_probe_asks_a_cluster_that_serves_without_handoffs_less_and_less_often():
    pauses = []
    answers = [(503, None), *[(200, None)] * 6, (503, None), (200, TRANSFER)]
    assert "verified" in probe_cluster(cluster(*answers), 60.0, True, pauses.append)
    assert pauses == [0.2, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 0.2]


def test_probe_without_expectations_takes_any_answer():
    assert probe_cluster(cluster((200, None)), 0.0, False, no_sleep) == "served: 4 tokens, without a handoff"


def readings(*loads, problems=()):
    """Return what reads a vLLM server: before a request, and again and again after it."""
    left = list(loads)

    def read(_url, _timeout_s):
        num_loads = left.pop(0) if len(left) > 1 else left[0]
        return EngineReading(
            num_loads=num_loads,
            num_verified_blocks=3 * num_loads,
            num_bytes=0,
            transfer_s=0.0,
            verify_s=0.0,
            problems={reason: 1 for reason in problems if num_loads == left[-1]},
            num_held_blocks=0,
            is_used=False,
        )

    return read


def test_probe_of_vllm_engines_waits_until_one_has_counted_the_handoff():
    read = readings(7, 7, 7, 8)
    line = probe_cluster(cluster((200, None)), 0.0, True, no_sleep, engines=["http://d"], read=read)
    assert line == "served: 4 tokens, 3 KV blocks transferred and verified by vLLM engines"


def test_probe_of_vllm_engines_fails_with_the_reason_of_a_failed_load():
    read = readings(7, 8, problems=["stale_block"])
    with pytest.raises(ProbeFailed, match="without a verified handoff: stale_block"):
        probe_cluster(cluster((200, None)), 0.0, True, no_sleep, engines=["http://d"], read=read)


def test_probe_of_vllm_engines_fails_where_none_counts_a_load(monkeypatch):
    monkeypatch.setattr("kvferry.operate._COUNT_TIMEOUT_S", 0.0)
    with pytest.raises(ProbeFailed, match="no engine has counted a load"):
        probe_cluster(cluster((200, None)), 0.0, True, no_sleep, engines=["http://d"], read=readings(7))


def test_probe_of_a_dead_engine_names_it():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ProbeFailed, match=f"{address}/metrics: ConnectionRefused"):
        probe_cluster(cluster((200, None)), 0.0, False, no_sleep, engines=[address])


def test_probe_of_an_engine_says_so_if_another_server_answers(monkeypatch):
    monkeypatch.setattr("kvferry.operate.get", lambda _url, _timeout_s: (200, "<html>\n<p>Welcome!</p>\n</html>"))
    with pytest.raises(ProbeFailed, match="http://d/metrics is answered with no metrics"):
        probe_cluster(cluster((200, None)), 0.0, False, no_sleep, engines=["http://d"])
