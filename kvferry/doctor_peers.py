"""Checks of the servers that a process talks to: whether they can be reached, and take it for a member of their cluster.

Owns the time limits. Nothing is asked of a server that would change it; a router counts a handshake with a wrong key.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx
import zmq
from zmq.utils.monitor import recv_monitor_message

from connectors.lmcache.client import fetch_facts
from core.config import KVFerryConfig
from core.config_router import RouterSection
from core.errors import ConfigError, KVFerryError
from core.wire.connections import HANDSHAKE_FAILED_EVENTS
from core.wire.contexts import started_context
from core.wire.curve import ClusterKeys, secure_client
from core.wire.key_rotation import connect_with_each_key, keys_of
from core.wire.sockets import split_tcp
from kvferry.cluster_plan import is_for_serve
from kvferry.connector_preflight import has_otlp_exporter
from kvferry.finding import Finding, Verdict
from kvferry.http_get import get
from kvferry.server_address import bearer, first_key

CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 10.0  # for the whole of an answer
_MAX_ANSWER_BYTES = 1 << 20
MAX_CLOCK_DIFFERENCE_S = 5.0
_HAS_KEY = "give both the same key: security.cluster_key, $KVFERRY_CLUSTER_KEY"
# The probe's socket has no heartbeats: with them the second one can abort a process (``core.wire.connections``).
_REFUSALS = HANDSHAKE_FAILED_EVENTS | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_REACH = "start it; if it runs: look at its address, DNS and network policies"


def check_peers(config: KVFerryConfig) -> Iterator[Finding]:
    """Shake hands with the routers, which ``kvferry serve`` starts itself, and with the store if one is configured."""
    routers = () if is_for_serve(config) else config.worker.router_addresses
    wanted = [("worker.router_addresses", address) for address in routers]
    if config.kvstore.address:
        wanted.append(("kvstore.address", config.kvstore.address))
    for setting, address in wanted:
        found = _try_to_connect("peers", f"{setting} {address}", *split_tcp(address))
        yield _try_to_talk(found, address, config) if found.verdict == "ok" else found


def _try_to_talk(found: Finding, address: str, config: KVFerryConfig) -> Finding:
    """Shake hands as a member of the cluster where something listens."""
    name = found.text.removesuffix(" can be connected to")
    try:
        has_agreed = _shake_hands(address, keys_of(config.security))
    except KVFerryError:
        return found  # of the keys, which ``check_security`` tells
    key = "this cluster key" if config.security.cluster_key else "a process without a cluster key"
    if has_agreed:
        return Finding("peers", "ok", f"{name} can be connected to, and takes {key}")
    if has_agreed is None:
        return Finding("peers", "warning", f"{name} listens and says nothing: it is no router or store", _REACH)
    return Finding("peers", _of_worker(config), f"{name} does not take {key}", _HAS_KEY)


def _of_worker(config: KVFerryConfig) -> Verdict:
    """Return the verdict on what keeps a worker from its router: a failure if one runs here, which is known by its name."""
    return "failure" if config.worker.engine_id else "warning"


def _shake_hands(address: str, keys: ClusterKeys | None) -> bool | None:
    """Return True if a server takes one of the keys, False if it refuses them, None if it does not shake hands in time."""
    with started_context(zmq.Context) as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        secure_client(dealer, keys)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSALS)
        connect_with_each_key(dealer, address, keys)
        try:
            return _outcome(monitor, num_keys=1 + len(keys.others if keys else ()))
        finally:
            dealer.disable_monitor()
            monitor.close(linger=0)


def _outcome(monitor: zmq.Socket[bytes], num_keys: int) -> bool | None:
    """Wait for what becomes of the handshakes, one for each key."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    for _ in range(num_keys):
        if not monitor.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
            return None
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return True
    return False


def is_router_at_port(router: RouterSection) -> bool:
    """Return True if what listens at ``router.port`` answers as a router of kvferry."""
    host = router.host.strip("[]")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http{'s' if router.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{router.port}/version"
    try:
        return "wire_version" in json.loads(get(url, CONNECT_TIMEOUT_S)[1])
    except (OSError, ValueError, TypeError):  # the last two: no JSON, or not an object
        return False


def check_redis_server(config: KVFerryConfig) -> Iterator[Finding]:
    """Look a block up in Redis as the store does, if one is configured: it must be there and take the password."""
    kvstore = config.kvstore
    if not kvstore.redis_url:
        return
    from kvstore.tiers.redis_tier import RedisTier

    name = "kvstore.redis_url"
    try:
        tier = RedisTier(kvstore.redis_url, CONNECT_TIMEOUT_S, password=kvstore.redis_password)
        try:
            tier.locate([b"doctor"])
        finally:
            tier.close()
    except ConfigError as error:
        yield Finding("Redis", "warning", error.message, f"correct {name}")
        return
    except KVFerryError as error:
        text = error.message if name in error.message else f"{name}: {error.message}"
        yield Finding("Redis", "warning", text, f"{_REACH}; its password is kvstore.redis_password, $KVFERRY_REDIS_PASSWORD")
        return
    except Exception as error:  # of an option in the address that only connecting shows; not quoted, as it may be a password
        text = f"{name}: an option in it has a wrong value ({type(error).__name__})"
        yield Finding("Redis", "warning", text, f"correct {name}")
        return
    yield Finding("Redis", "ok", f"{name}: it answers")


def check_lmcache_server(config: KVFerryConfig) -> Iterator[Finding]:
    """Ask the LMCache server of this machine for its version, if workers use one, and try its other port."""
    if "lmcache" not in config.connector.names:
        return
    lmcache = config.connector.lmcache
    name = f"connector.lmcache.http_address {lmcache.http_address}"
    try:
        facts = fetch_facts(lmcache.http_address.rstrip("/"), CONNECT_TIMEOUT_S)
        yield Finding("LMCache", "ok", f"{name} answers: version {facts.version}")
    except KVFerryError as error:
        yield Finding("LMCache", "warning", f"{name}: {error.message}", _REACH)
    address = lmcache.server_address
    yield _try_to_connect("LMCache", f"connector.lmcache.server_address {address}", *split_tcp(address))


def check_tracing(config: KVFerryConfig) -> Iterator[Finding]:
    """Check for the collector of traces, and for the library that sends them."""
    endpoint = config.tracing.endpoint
    if not endpoint:
        return
    is_installed = has_otlp_exporter()
    text = f"OpenTelemetry is {'installed' if is_installed else 'not installed'}"
    yield Finding("traces", "ok" if is_installed else "failure", text, "pip install 'kvferry[otel]', or unset tracing.endpoint")
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    yield _try_to_connect("traces", f"tracing.endpoint {endpoint}", url.hostname or "", port)


def _try_to_connect(subject: str, name: str, host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return Finding(subject, "warning", f"{name}: {error.strerror or error}", _REACH)
    except ValueError as error:  # of the codec for names
        return Finding(subject, "warning", f"{name}: no possible name: {error}", "correct the host")
    return Finding(subject, "ok", f"{name} can be connected to")


def check_clock(url: str) -> Iterator[Finding]:
    """Compare this machine's clock with a router's: leases are durations and unaffected, logs and traces are not."""
    try:
        response, _ = asyncio.run(_ask(f"{url}/health"))
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (httpx.HTTPError, TimeoutError, KeyError, ValueError) as error:
        yield Finding("clock", "warning", f"{url} told no time: {error!r}", "look whether the router runs")
        return
    difference = abs(time.time() - theirs)
    is_off = difference > MAX_CLOCK_DIFFERENCE_S
    yield Finding("clock", "warning" if is_off else "ok", f"{difference:.0f} s from the router's", "run NTP on both machines")


async def _ask(url: str, headers: Mapping[bytes, bytes] | None = None) -> tuple[httpx.Response, bytes]:
    """Return a server's answer and its body, of a bounded time and size: the time limit of httpx is for each piece."""
    body = bytearray()
    async with (
        asyncio.timeout(ANSWER_TIMEOUT_S),
        httpx.AsyncClient(headers=headers, timeout=CONNECT_TIMEOUT_S) as client,
        client.stream("GET", url) as response,
    ):
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > _MAX_ANSWER_BYTES:
                raise ValueError("the answer is too long")
    return response, bytes(body)


def check_served_model(config: KVFerryConfig, url: str) -> Iterator[Finding]:
    """Compare the model's name with those that a router serves: it refuses workers of others."""
    ours = config.model.served_name or config.model.name
    try:
        response, body = asyncio.run(_ask(f"{url}/v1/models", bearer(first_key(config.router.api_key))))
        response.raise_for_status()
        theirs = [str(each["id"]) for each in json.loads(body)["data"]]
    except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
        fix = "look whether it is a router; where it asks for an API key, give router.api_key, $KVFERRY_API_KEY"
        yield Finding("model of the router", "warning", f"{url} named no model: {error!r}", fix)
        return
    named = f"{ours}, and {url} serves {', '.join(theirs)}"
    if ours in theirs:
        yield Finding("model of the router", "ok", f"model.name = {ours}, as {url} serves it")
        return
    fix = "correct model.name or model.served_name: the router refuses a worker of another model"
    yield Finding("model of the router", _of_worker(config), f"model.name = {named}", fix)
