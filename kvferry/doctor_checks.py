"""Checks of a machine before kvferry runs on it: each finding says what to do.

Owns the checks. They change nothing: a bound port and a connection to a peer are closed at once. Knows nothing of how findings
are shown (``kvferry.doctor``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
import zmq
from huggingface_hub.constants import HF_HUB_CACHE

from connectors.p2p.transport.nixl import installed_module
from core.config import KVFerryConfig
from core.config_workers import WorkerSection
from core.environment import ucx_net_devices
from core.errors import KVFerryError
from core.ids import RandomIds
from core.memory_file import huge_page_stock
from core.model.hub import ALIASES
from core.multilinear import compiled_library
from core.wire.key_rotation import keys_of
from core.wire.sockets import is_loopback, split_tcp
from kvferry.cluster_plan import CHOSEN_SETTINGS, worker_roles
from kvferry.connector_preflight import has_otlp_exporter
from kvferry.machine import format_bytes, memory_limit_bytes, why_not_bindable
from kvferry.models import is_cached
from kvferry.reserved_memory import computes_on_gpu

Verdict = Literal["ok", "warning", "failure"]

CONNECT_TIMEOUT_S = 3.0
MAX_CLOCK_DIFFERENCE_S = 5.0
MIN_FREE_DISK_BYTES = 2 << 30
KERNEL_BYTES = 1 << 20  # the most that one of the kernels takes that ``worker.kernel_cache_entries`` counts


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``fix`` says what to do if it is not in order."""

    subject: str
    verdict: Verdict
    text: str
    fix: str = ""


def check_versions(config: KVFerryConfig) -> Iterator[Finding]:
    """Check the versions of the interpreter and the main libraries."""
    found = []
    for name in ("kvferry", "torch", "pyzmq", "msgspec", (installed_module() or "nixl_cu12").replace("_", "-")):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {', '.join(found)}, libzmq {zmq.zmq_version()}")
    if config.security.cluster_key and not zmq.has("curve"):
        yield Finding("versions", "failure", "this ZeroMQ has no CURVE", "install pyzmq from its wheel")


def check_digests(_: KVFerryConfig) -> Iterator[Finding]:
    """Check whether compiled code computes the digests of blocks."""
    is_compiled = compiled_library() is not None
    text = "computed by compiled code" if is_compiled else "computed with numpy, which is slower"
    yield Finding("digests", "ok" if is_compiled else "warning", text, "install gcc, then kvferry again")


def check_model(config: KVFerryConfig) -> Iterator[Finding]:
    """Check for the model's files, without fetching any, and for room to store them."""
    name, cache = config.model.name, config.model.cache_dir
    if name in ALIASES:
        is_there, fix = is_cached(name, cache), f"kvferry models {name}"
    elif os.path.exists(name):
        is_there, fix = True, ""
    else:
        is_there, fix = Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir(), f"kvferry models {name}"
    yield Finding("model", "ok" if is_there else "warning", f"{name} is {'here' if is_there else 'not fetched yet'}", fix)
    folder = next(path for path in (Path(cache), *Path(cache).parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if not is_there and free < MIN_FREE_DISK_BYTES:
        yield Finding("model", "failure", f"{free >> 20} MiB free in {folder}", "make room, or set model.cache_dir")
    if not os.access(folder, os.W_OK) and not is_there:
        yield Finding("model", "failure", f"{folder} cannot be written", "set $KVFERRY_CACHE to a folder that can")


def check_memory(config: KVFerryConfig) -> Iterator[Finding]:
    """Compare KV pools and kernel caches with the memory limit of this machine or container, and check shared memory."""
    limit = memory_limit_bytes()
    num_pools = _num_pools(config)
    pool = config.cache.memory_bytes * num_pools
    if config.cache.huge_pages != "never" and not huge_page_stock().lacks(pool):
        pool = 0  # huge pages are separate from other memory and its limit
    whose = "a worker" if num_pools == 1 else f"{num_pools} workers of this machine"
    kernels = 0 if computes_on_gpu(config) else KERNEL_BYTES * config.worker.kernel_cache_entries * _num_workers(config)
    parts = f"{format_bytes(pool)}; kernels: up to {format_bytes(kernels)}" if kernels else format_bytes(pool)
    text, used = f"KV pools of {whose}: {parts}; {format_bytes(limit)} of memory", pool + kernels
    if used >= limit:
        yield Finding("memory", "failure", text, "lower cache.memory_bytes, or raise the memory limit")
    else:
        yield Finding("memory", "warning" if used > limit // 2 else "ok", text, "leave room for the model beside the pool")
    try:
        state = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding(
            "memory", "failure", f"/dev/shm: {error.strerror}", "mount a tmpfs there: UCX and other libraries need it"
        )
        return
    free = state.f_bavail * state.f_frsize
    is_small = free < 32 << 20
    fix = "raise shm.size of the chart, or --shm-size of the container"
    yield Finding(
        "memory", "warning" if is_small else "ok", f"/dev/shm has {free >> 20} MiB free; the KV pool is not in it", fix
    )


def _num_pools(config: KVFerryConfig) -> int:
    """Return the number of pools here: for the given number of workers, else for those that ``serve`` starts."""
    if config.worker.workers_on_host > 1 or not is_for_serve(config):
        return config.worker.workers_on_host
    return sum(role != "encode" for role in worker_roles(config).values())


def _num_workers(config: KVFerryConfig) -> int:
    """Return the number of workers here, encode workers included, as ``_num_pools`` does."""
    if config.worker.workers_on_host > 1 or not is_for_serve(config):
        return config.worker.workers_on_host
    return len(worker_roles(config))


def is_for_serve(config: KVFerryConfig) -> bool:
    """Return True if these settings are for ``kvferry serve``: none of them is for a single process."""
    defaults = WorkerSection()
    return all(getattr(config.worker, name) == getattr(defaults, name) for name in CHOSEN_SETTINGS)


def check_huge_pages(config: KVFerryConfig) -> Iterator[Finding]:
    """Compare the huge pages that the pools need with the available ones."""
    wishes = (
        ("cache", config.cache.huge_pages, config.cache.memory_bytes * _num_pools(config)),
        ("kvstore", config.kvstore.huge_pages, config.kvstore.memory_bytes),
        ("connector.offload", config.connector.offload.huge_pages, config.connector.offload.memory_bytes),
    )
    for section, wish, num_bytes in wishes:
        if wish == "never":
            continue
        missing = huge_page_stock().lacks(num_bytes)
        verdict: Verdict = "ok" if not missing else "failure" if wish == "always" else "warning"
        text = f"{section}.huge_pages = {wish}: {missing or 'there are enough'}"
        yield Finding("huge pages", verdict, text, "sysctl vm.nr_hugepages, in Kubernetes also the limit hugepages-2Mi")


def check_transports(config: KVFerryConfig) -> Iterator[Finding]:
    """Check the requirements of each configured transport: kernel features and libraries."""
    for name in config.connector.transports:
        if name == "shm":
            yield from _check_shm()
        elif name == "nixl":
            yield from _check_nixl()
        else:
            yield Finding(f"transport {name}", "ok", "needs nothing but the network")


def _check_shm() -> Iterator[Finding]:
    from connectors.p2p.transport.shm import ShmTransport

    reason = ShmTransport(RandomIds()).unavailable_reason()
    text = reason or "works between processes of this host and user (in Kubernetes: of one pod)"
    yield Finding("transport shm", "failure" if reason else "ok", text, "use nixl or tcp")


def _check_nixl() -> Iterator[Finding]:
    if installed_module() is None:
        yield Finding("transport nixl", "failure", "the library is not installed", "pip install 'kvferry[nixl]'")
        return
    yield Finding("transport nixl", "ok", "the library is installed")
    reason = why_memory_of_others_cannot_be_read()
    fix = "allow ptrace between processes of one user (kernel.yama.ptrace_scope=0), or UCX goes by a slower way on one host"
    yield Finding("transport nixl", "warning" if reason else "ok", reason or "cross-memory attach is permitted", fix)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = soft != resource.RLIM_INFINITY
    text = f"at most {soft >> 10} KiB may be locked" if is_limited else "memory may be locked without limit"
    fix = "RDMA locks the KV pool: raise memlock of the container runtime; IPC_LOCK does nothing for a process that is not root"
    has_nic = Path("/sys/class/infiniband").is_dir()
    yield Finding("transport nixl", "failure" if is_limited and has_nic else "ok", text, fix)


def why_memory_of_others_cannot_be_read() -> str | None:
    """Try to read memory of a process that is not our child, as UCX's cross-memory attach does; None if it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this C library has no process_vm_readv"
    word = ctypes.create_string_buffer(b"kvferry!", 8)
    pid = os.fork()
    if pid == 0:  # the child reads its parent, which is not its descendant
        copy = ctypes.create_string_buffer(8)
        local = (ctypes.c_void_p * 2)(ctypes.addressof(copy), 8)
        remote = (ctypes.c_void_p * 2)(ctypes.addressof(word), 8)
        num_bytes = libc.process_vm_readv(os.getppid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        os._exit(0 if num_bytes == 8 and copy.raw == word.raw else ctypes.get_errno() or errno.EIO)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if status == 0 else f"memory of other processes cannot be read: {os.strerror(status)}"


def check_ports(config: KVFerryConfig) -> Iterator[Finding]:
    """Try to bind every address that has a port number."""
    control_host, control_port = split_tcp(config.worker.control_address)
    wanted = [
        ("router.port", config.router.host, config.router.port),
        ("router.ops_port", config.router.ops_host, config.router.ops_port or 0),
        ("router.worker_address", *split_tcp(config.router.worker_address)),
        ("worker.control_address", control_host, control_port),
        ("worker.data_port", control_host, config.worker.data_port),
        ("worker.ops_port", config.worker.ops_host, config.worker.ops_port),
    ]
    for setting, host, port in wanted:
        if not port:
            continue
        reason = why_not_bindable(host, port)
        fix = "stop what listens there, unless it is the kvferry that you mean, or choose another port"
        yield Finding(
            "ports",
            "warning" if reason else "ok",
            f"{setting} {host}:{port} {f'cannot be bound: {reason}' if reason else 'is free'}",
            fix,
        )


def check_peers(config: KVFerryConfig) -> Iterator[Finding]:
    """Try to connect to the routers, which ``kvferry serve`` starts itself, and to the store if one is configured."""
    routers = () if is_for_serve(config) else config.worker.router_addresses
    wanted = [("worker.router_addresses", address) for address in routers]
    if config.kvstore.address:
        wanted.append(("kvstore.address", config.kvstore.address))
    for setting, address in wanted:
        yield _try_to_connect("peers", f"{setting} {address}", *split_tcp(address))


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
        fix = "start it; if it runs: look at its address, DNS and network policies"
        return Finding(subject, "warning", f"{name}: {error.strerror or error}", fix)
    return Finding(subject, "ok", f"{name} can be connected to")


def check_security(config: KVFerryConfig) -> Iterator[Finding]:
    """Check for sockets that other machines can reach, and for the key that protects them."""
    try:
        keys = keys_of(config.security)
    except KVFerryError as error:
        yield Finding("security", "failure", error.message, "kvferry keygen")
        return
    addresses = {"router.worker_address": config.router.worker_address, "worker.control_address": config.worker.control_address}
    exposed = [setting for setting, address in addresses.items() if not is_loopback(split_tcp(address)[0])]
    yield from _check_ucx(config)
    if keys is not None:
        yield Finding("security", "ok", "a cluster key is set")
    elif exposed:
        verdict: Verdict = "warning" if config.security.insecure else "failure"
        text = f"{', '.join(exposed)} can be reached by others, and there is no cluster key"
        yield Finding("security", verdict, text, "export KVFERRY_CLUSTER_KEY=$(kvferry keygen) for every process")
    else:
        yield Finding("security", "ok", "the cluster's sockets are for this machine only")


def _check_ucx(config: KVFerryConfig) -> Iterator[Finding]:
    """Report where UCX listens, since no key protects it."""
    if "nixl" not in (*config.connector.transports, *config.ec_connector.transports):
        return
    worker, devices = config.worker, ucx_net_devices()
    addresses = {"worker.control_address": (worker.control_address,), "worker.router_addresses": worker.router_addresses}
    wide = [name for name, found in addresses.items() if not all(is_loopback(split_tcp(address)[0]) for address in found)]
    if devices == "lo":
        yield Finding("security of nixl", "ok", "UCX (transport nixl) listens on loopback only: UCX_NET_DEVICES = lo")
    elif devices:
        text = f"UCX (transport nixl) listens on UCX_NET_DEVICES = {devices}; no key protects it"
        yield Finding("security of nixl", "warning", text, "keep them on a closed network (docs/security.md)")
    elif wide:
        text = f"UCX (transport nixl) listens on every interface, as {' and '.join(wide)} are not loopback; no key protects it"
        fix = "keep it on a closed network: UCX_NET_DEVICES, network policies (docs/security.md)"
        yield Finding("security of nixl", "warning", text, fix)
    else:
        yield Finding("security of nixl", "ok", "UCX (transport nixl) listens on loopback only")


def check_clock(url: str) -> Iterator[Finding]:
    """Compare this machine's clock with a router's: leases are durations and unaffected, logs and traces are not."""
    try:
        response = httpx.get(f"{url}/health", timeout=CONNECT_TIMEOUT_S)
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError) as error:
        yield Finding("clock", "warning", f"{url} told no time: {error!r}", "look whether the router runs")
        return
    difference = abs(time.time() - theirs)
    is_off = difference > MAX_CLOCK_DIFFERENCE_S
    yield Finding("clock", "warning" if is_off else "ok", f"{difference:.0f} s from the router's", "run NTP on both machines")


CHECKS = (
    check_versions,
    check_digests,
    check_model,
    check_memory,
    check_huge_pages,
    check_transports,
    check_ports,
    check_peers,
    check_tracing,
    check_security,
)
