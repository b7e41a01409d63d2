"""The commands of operators: make a cluster key, drain a worker and wait for its end, switch its role, probe a cluster.

Owns their output and their time limits. They are clients of a worker's operations port, and of the router's HTTP API. The HTTP
client is imported when one of them runs, because every process of a cluster imports the command line.
"""

from __future__ import annotations

import ipaddress
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from core.config_types import default_api_key
from core.errors import ConfigError, KVFerryError
from core.ids import RandomIds
from core.wire.curve import new_cluster_key
from kvferry.http_get import get
from kvferry.server_address import bearer, check_address, first_key

if TYPE_CHECKING:
    import httpx

    from kvferry.demo_vllm import EngineReading

POLL_INTERVAL_S = 0.2
_MAX_PAUSE_S = 15.0  # between requests that a cluster serves, but not as expected
_SAY_INTERVAL_S = 5.0  # between two lines of a probe that waits for the same condition
_REQUEST_TIMEOUT_S = 60.0  # for one answer, if ``--timeout`` leaves so much
_MIN_REQUEST_TIMEOUT_S = 1.0  # also for a request that begins just before the end
_MAX_REASON_CHARACTERS = 200  # of an answer that is not the router's
_COUNT_TIMEOUT_S = 5.0  # until a server's metrics show a request that has ended
_LOCAL_HOST = "localhost"
_OTHER_HOST = "its log names its address (event=ops_port_open): give that by --ops-host and --ops-port"
_NAME = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*(?![0-9]+$)[A-Za-z0-9_-]{1,63}")  # of a host
_NO_REPORT = "no prefill worker took part, or the workers are vLLM engines, whose metrics say it: name them with --engine"
_ROLE_FIELDS = {"engine_id", "incarnation", "role", "num_switches", "requests_of_former_role", "leased_blocks"}
_PROMPT = "A ferry is a boat that carries people and cars. It leaves the harbour in the morning, and in the evening it"

WorkerPort = Annotated[
    int, typer.Option("--ops-port", help="The worker's operations port on this host.", min=1, max=65535)
]  # a greater number would be taken modulo 65536, which is the port of another worker
WorkerHost = Annotated[
    str,
    typer.Option("--ops-host", help="Its worker.ops_host, if that is another address of this host, such as 127.0.0.2 or ::1."),
]


class DrainFailed(KVFerryError):
    """There is no worker to drain, or it has not left."""


class RoleSwitchFailed(KVFerryError):
    """A worker has not changed its role."""


class ProbeFailed(KVFerryError):
    """The cluster answered, but not as it should."""


class NoHandoff(ProbeFailed):
    """A request was served, but without the handoff that was expected."""


def keygen() -> None:
    """Print a new cluster key: give it to every process as $KVFERRY_CLUSTER_KEY."""
    print(new_cluster_key(RandomIds()))


def drain(
    ops_port: WorkerPort,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for its end.", min=0.0)] = 90.0,
    ops_host: WorkerHost = _LOCAL_HOST,
) -> None:
    """Ask a worker of this host, or pod, to leave in good order, and wait until it has."""
    drain_worker(ops_address(ops_host, ops_port), timeout)
    print("the worker has left")


def role(
    ops_port: WorkerPort,
    to: Annotated[
        Literal["prefill", "decode", "aggregated"] | None,
        typer.Argument(help="The role to take; without it, the present one is shown."),
    ] = None,
    ops_host: WorkerHost = _LOCAL_HOST,
) -> None:
    """Show the role of a worker of this host, or pod, or let it take another one while it serves."""
    print(worker_role(ops_address(ops_host, ops_port), to))


def probe(
    url: Annotated[str, typer.Argument(help="The router, http://host:port.")],
    expect_handoff: Annotated[
        bool,
        typer.Option("--expect-handoff", help="Fail unless a prefill worker computed the prompt and its KV was verified."),
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for a good answer.", min=0.0)] = 60.0,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", metavar="URL", help="A vLLM server of the cluster, once or more: its metrics must count the handoff."
        ),
    ] = None,
    any_certificate: Annotated[
        bool, typer.Option("--any-certificate", help="Accept an https certificate of another host, or a self-signed one.")
    ] = False,
) -> None:
    """Send one request through a router and say how it was served; $KVFERRY_API_KEY is its API key."""
    import httpx

    check_address(url, "URL")
    for each in engine or ():
        check_address(each, "--engine")
    headers = bearer(first_key(default_api_key()))
    with httpx.Client(base_url=url, headers=headers, verify=not any_certificate) as client:
        print(probe_cluster(client, timeout, expect_handoff, engines=engine or ()))


def ops_address(host: str, port: int) -> str:
    """Return the address of a worker's operations port; an IPv6 host may stand in brackets.

    Raises:
        ConfigError: it is no host.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_ipv6 = bare != host or ":" in bare
    if not (_is_ip(bare, 6) if is_ipv6 else _is_ip(bare, 4) or _is_name(bare)):
        raise ConfigError(f"--ops-host = {host!r}: expected a name or an address, no scheme and no port", param="ops-host")
    return f"http://[{bare}]:{port}" if is_ipv6 else f"http://{bare}:{port}"


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    """Return whether it is the name of a host; the client decodes one that begins with ``xn--``, and there are wrong ones."""
    import httpx

    try:
        return bool(_NAME.fullmatch(host) and httpx.URL(f"http://{host}").host)
    except (httpx.InvalidURL, UnicodeError):
        return False


def worker_role(address: str, to: str | None = None) -> str:
    """Return one line about a worker's role. With ``to`` it takes that role before, unless it restarts or switches meanwhile.

    Raises:
        RoleSwitchFailed: no worker answers there, or it keeps its role; says why.
    """
    import httpx

    with httpx.Client(base_url=address, timeout=5.0, trust_env=False) as client:  # a worker is behind no proxy
        try:
            found = _answer_of(client.get("/role"))
            if to is not None:
                known = {name: found[name] for name in ("incarnation", "num_switches")}
                found = _answer_of(client.post("/role", params={"to": to, **known}))
        except httpx.TransportError as error:
            raise RoleSwitchFailed(f"no worker answers at {address}: {error}; {_OTHER_HOST}") from None
    left = f"{found['requests_of_former_role']} requests of its former role and {found['leased_blocks']} leased blocks left"
    return f"{found['engine_id']}: {found['role']}, {found['num_switches']} switches since its start, {left}"


def _answer_of(response: httpx.Response) -> Mapping[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    found: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
    if response.is_error:
        reason = found.get("error") or found.get("status") or f"HTTP {response.status_code}: {response.text.strip()}"
        raise RoleSwitchFailed(str(reason))
    if not found.keys() >= _ROLE_FIELDS:
        raise RoleSwitchFailed(f"{response.url} is not answered as by a worker: another server may have the port")
    return found


def drain_worker(address: str, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Start the drain, once, and return when the worker has gone: it had answered, and its port is closed now.

    Raises:
        DrainFailed: no worker answers there, it refuses, or it is still there after the time.
    """
    import httpx

    deadline = time.monotonic() + timeout_s
    has_agreed = was_reached = False
    with httpx.Client(base_url=address, timeout=5.0, trust_env=False) as client:  # a worker is behind no proxy
        while True:
            answer = _ask_to_leave(client, has_agreed, was_reached)
            if answer is None:
                return
            has_agreed, was_reached = answer, True
            if time.monotonic() >= deadline:
                state = "is still there" if has_agreed else "has not answered"
                raise DrainFailed(f"the worker at {address} {state} after {timeout_s:g} s")
            sleep(POLL_INTERVAL_S)


def _ask_to_leave(client: httpx.Client, has_agreed: bool, was_reached: bool) -> bool | None:
    """Ask a worker to leave, or whether it is still there; return whether it has agreed, None once it has gone.

    ``was_reached``: it has been asked before, and may have stood still: whether it left by the order cannot be seen from here.
    """
    import httpx

    try:
        response = client.request(*(("GET", "/health") if has_agreed else ("POST", "/drain")))
    except httpx.ConnectError as error:
        if has_agreed:
            return None
        if was_reached:
            message = f"the worker at {client.base_url} has gone without an answer: its log says whether it drained or died"
            raise DrainFailed(message) from None
        raise DrainFailed(f"no worker listens at {client.base_url}: {error}; {_OTHER_HOST}") from None
    except httpx.TransportError:
        return has_agreed  # it is busy, or closes; the next check shows which
    if not has_agreed and response.is_error:
        raise DrainFailed(f"{client.base_url} does not drain: POST /drain is answered with HTTP {response.status_code}")
    return True


def read_server(url: str, timeout_s: float) -> EngineReading:
    """Return what the metrics of a vLLM server say.

    Raises:
        OSError: it does not answer, or not with metrics.
    """
    from kvferry.demo_vllm import read_engine

    status, text = get(f"{url.rstrip('/')}/metrics", timeout_s)
    if status != HTTPStatus.OK:
        raise ConnectionError(f"{url}/metrics is answered with HTTP {status}")
    try:
        return read_engine(text)
    except ValueError as error:
        raise ConnectionError(
            f"{url}/metrics is answered with no metrics ({error}): another server may have the port"
        ) from None


def probe_cluster(
    client: httpx.Client,
    timeout_s: float,
    expect_handoff: bool,
    sleep: Callable[[float], None] = time.sleep,
    *,
    engines: Sequence[str] = (),
    read: Callable[[str, float], EngineReading] = read_server,
) -> str:
    """Return one line about the handling of a request; prints progress while it waits for a cluster that is not ready.

    With ``engines``, addresses of vLLM servers, their metrics say how it was handled: answers of these say nothing of handoffs.
    A cluster that serves requests without the expected handoff is asked less and less often: each one costs it a prompt.
    ``timeout_s`` bounds the silence of a server as well; a request begun before its end gets at least a second.

    Raises:
        ProbeFailed: no valid answer within the time, or the request was not served as expected.
    """
    import httpx

    deadline = time.monotonic() + timeout_s
    said, said_at, pause_s = "", 0.0, POLL_INTERVAL_S
    while True:
        try:
            if engines:
                return _probe_engines(client, engines, expect_handoff, read, sleep, deadline=deadline)
            return _describe(_complete(client, deadline), expect_handoff)
        except (httpx.HTTPError, OSError, ProbeFailed) as error:
            reason = " ".join(str(error).split()) or repr(error)
            pause_s = min(max(1.0, 2 * pause_s), _MAX_PAUSE_S) if isinstance(error, NoHandoff) else POLL_INTERVAL_S
        now = time.monotonic()
        if now >= deadline:
            raise ProbeFailed(f"{client.base_url}: {reason}")
        if reason != said or now >= said_at + _SAY_INTERVAL_S:
            print(f"{client.base_url}: {reason}; trying for {deadline - now:.0f} s more", file=sys.stderr, flush=True)
            said, said_at = reason, now
        sleep(min(pause_s, deadline - now))


def _request_timeout_s(deadline: float) -> float:
    """Return the time for a request that begins now."""
    return min(_REQUEST_TIMEOUT_S, max(_MIN_REQUEST_TIMEOUT_S, deadline - time.monotonic()))


def _complete(client: httpx.Client, deadline: float) -> Mapping[str, Any]:
    """Return the answer to a request for the first model.

    Raises:
        ProbeFailed: the server refuses, or answers not as a router does; says why.
        httpx.HTTPError: it cannot be reached, or does not answer in time.
    """
    try:
        models = _accepted(client.get("/v1/models", timeout=_request_timeout_s(deadline))).json()
        # A salt of its own, so that no prefix cache replaces the handoff.
        body = {
            "model": models["data"][0]["id"],
            "prompt": _PROMPT,
            "max_tokens": 4,
            "temperature": 0,
            "cache_salt": new_cluster_key(RandomIds())[:16],
        }
        response = client.post("/v1/completions", json=body, timeout=_request_timeout_s(deadline))
        answer: Mapping[str, Any] = _accepted(response).json()
        _ = answer["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError) as error:
        raise ProbeFailed(f"it does not answer as a router does ({error!r}): another server may have the port") from None
    return answer


def _accepted(response: httpx.Response) -> httpx.Response:
    """Return an answer that is no error; otherwise raise a ProbeFailed with the reason that its body names."""
    if response.is_success:
        return response
    try:
        reason = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = " ".join(response.text.split())[:_MAX_REASON_CHARACTERS]
    status = f"HTTP {response.status_code} {response.reason_phrase}".strip()
    raise ProbeFailed(f"{status}: {reason}" if reason else status)


def _probe_engines(
    client: httpx.Client,
    engines: Sequence[str],
    expect_handoff: bool,
    read: Callable[[str, float], EngineReading],
    sleep: Callable[[float], None],
    *,
    deadline: float,
) -> str:
    """Compare what vLLM servers have counted before and after a request. Other requests of that time count too."""
    before = [read(url, _request_timeout_s(deadline)) for url in engines]
    answer = _complete(client, deadline)
    counted_by = time.monotonic() + _COUNT_TIMEOUT_S
    while True:
        pairs = list(zip(before, (read(url, _request_timeout_s(deadline)) for url in engines), strict=True))
        num_loads = sum(now.num_loads - then.num_loads for then, now in pairs)
        problems = sorted({reason for then, now in pairs for reason in now.problems if now.problems != then.problems})
        if num_loads or problems or not expect_handoff or time.monotonic() >= counted_by:
            break
        sleep(POLL_INTERVAL_S)
    num_tokens = answer["usage"]["completion_tokens"]
    if num_loads and not problems:
        num_blocks = sum(now.num_verified_blocks - then.num_verified_blocks for then, now in pairs)
        return f"served: {num_tokens} tokens, {num_blocks} KV blocks transferred and verified by vLLM engines"
    if expect_handoff:
        why = ", ".join(problems) or "no engine has counted a load"
        raise NoHandoff(f"the request was served without a verified handoff: {why}")
    return f"served: {num_tokens} tokens, without a handoff"


def _describe(answer: Mapping[str, Any], expect_handoff: bool) -> str:
    usage = answer["usage"]
    transfer = usage.get("kv_transfer")
    if transfer is None or transfer["fallback_reason"] or not transfer["verified_blocks"]:
        if expect_handoff:
            reason = transfer["fallback_reason"] if transfer else _NO_REPORT
            raise NoHandoff(f"the request was served without a verified handoff: {reason or 'nothing was transferred'}")
        return f"served: {usage['completion_tokens']} tokens, without a handoff"
    return (
        f"served: {usage['completion_tokens']} tokens, {transfer['verified_blocks']} KV blocks transferred and verified "
        f"by {transfer['transport']}"
    )
