"""Checks of a machine before kvferry runs on it: each finding says what to do.

Owns the checks. They change nothing: a bound port and a connection to a peer are closed at once. Knows nothing of how findings
are shown (``kvferry.doctor``).
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zmq

from connectors.p2p.transport.nixl import installed_module
from core.compiled import missing_libraries
from core.config import KVFerryConfig
from core.environment import ucx_net_devices
from core.errors import ConfigError, KVFerryError
from core.model.arch import parse_arch
from core.model.hub import ALIASES, peek_config, read_model_folder
from core.wire.key_rotation import keys_of
from core.wire.sockets import is_loopback, split_tcp
from kvferry import preflight, vllm_preflight
from kvferry.cluster_plan import is_for_serve, workers_here
from kvferry.connector_preflight import (
    check_factories,
    check_names,
    check_p2p,
    check_prefix_caching,
    check_redis,
    check_tier_caching,
)
from kvferry.doctor_peers import check_lmcache_server, check_peers, check_redis_server, check_tracing, is_router_at_port
from kvferry.doctor_transports import check_transports
from kvferry.finding import Finding, Verdict
from kvferry.listening import why_not_free
from kvferry.machine import format_bytes, memory_limit_bytes, why_not_creatable
from kvferry.models import is_cached
from kvferry.reserved_memory import computes_on_gpu, reservations
from kvferry.tier_preflight import check_own_store
from router.http.tls import server_context

MIN_FREE_DISK_BYTES = 2 << 30
KERNEL_BYTES = 1 << 20  # the most that one of the kernels takes that ``worker.kernel_cache_entries`` counts


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


def check_compiled_code(_: KVFerryConfig) -> Iterator[Finding]:
    """Check whether all that is compiled at installation is there: attention, layers, digests, hashes, copies and masks."""
    missing = missing_libraries()
    text = "all of it is there"
    if missing:
        text = f"missing or older than their sources: {', '.join(missing)}; numpy and torch do that, several times slower"
    yield Finding("compiled code", "warning" if missing else "ok", text, "install gcc, then kvferry again")


def check_model(config: KVFerryConfig) -> Iterator[Finding]:
    """Check the model's files and the settings that depend on them, without fetching any, and for room to store them."""
    name, cache = config.model.name, config.model.cache_dir
    folder = Path(name).expanduser()
    try:
        known = peek_config(name, Path(cache))
    except ConfigError as error:
        yield Finding("model", "failure", error.message, "correct model.name; kvferry models lists the short names")
        return
    if known is None and folder.exists():
        text = f"model.name = {name} holds no config.json"
        yield Finding("model", "failure", text, "name a folder of the Hugging Face layout")
        return
    try:
        if known is not None and not _is_for_vllm(config):
            preflight.check_model(parse_arch(known), workers_here(config))
            if is_for_serve(config):
                preflight.check_encode_workers(config, known)
        if folder.is_dir() and name not in ALIASES:
            files = read_model_folder(name, folder, Path(cache), needs_weights=not _is_for_vllm(config))
            preflight.check_weights(files.weight_files)
    except ConfigError as error:
        yield _refused("model", error, config, "worker")
        return
    if is_cached(name, cache):
        yield Finding("model", "ok", f"{name} is here")
        return
    yield Finding("model", "warning", f"{name} is not fetched yet", f"kvferry models {name}")
    folder = next(path for path in (Path(cache), *Path(cache).parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_DISK_BYTES:
        yield Finding("model", "failure", f"{free >> 20} MiB free in {folder}", "make room, or set model.cache_dir")
    if not os.access(folder, os.W_OK):
        yield Finding("model", "failure", f"{folder} cannot be written", "set $KVFERRY_CACHE to a folder that can")


def check_engine(config: KVFerryConfig) -> Iterator[Finding]:
    """Check for what kvferry's own engine computes with, or the settings and the command of vLLM where ``serve`` starts it."""
    try:
        if _is_for_vllm(config):
            vllm_preflight.check_settings(config)
            vllm_preflight.find_command(config.local.vllm_command, os.environ)
            vllm_preflight.vllm_arguments(config.local.vllm_arguments)
        else:
            preflight.check_device(config)
            preflight.check_attention(config)
    except ConfigError as error:
        yield _refused("engine", error, config, "worker")
        return
    yield from _check_threads(config)
    text = f"vLLM, as {config.local.vllm_command}" if _is_for_vllm(config) else f"model.device = {config.model.device}"
    yield Finding("engine", "ok", text)


def _check_threads(config: KVFerryConfig) -> Iterator[Finding]:
    threads, cores = config.worker.cpu_threads, len(os.sched_getaffinity(0))
    if threads > cores:
        text = f"worker.cpu_threads = {threads}, and this machine or container has {cores} processors"
        yield Finding("threads", "warning", text, "leave it out: threads of one processor wait for each other")


def check_connector(config: KVFerryConfig) -> Iterator[Finding]:
    """Check that the configured connectors exist and can be imported, and for the library of the store's Redis tier."""
    if _is_for_vllm(config):
        return  # vLLM imports its connector in its own environment
    try:
        check_names(config)
        if is_for_serve(config):
            check_p2p(workers_here(config))  # a single worker may be one that needs no transport
            check_prefix_caching(workers_here(config))  # nor does it know what the others keep
        check_factories(config)
        check_redis(config)
    except ConfigError as error:
        yield _refused("connector", error, config, "worker")
        return
    try:
        check_tier_caching(workers_here(config))
    except ConfigError as error:
        yield _refused("connector", error, config, "worker with a KV pool")  # a single one may be an encode worker
        return
    yield Finding("connector", "ok", f"{', '.join(config.connector.names)}: installed")


def check_store(config: KVFerryConfig) -> Iterator[Finding]:
    """Check that a store that knows the size of its blocks holds one; unless ``serve`` starts it, it may run elsewhere."""
    try:
        check_own_store(config)
    except ConfigError as error:
        if config.local.kvstore:
            yield _refused("store", error, config, "store")
        else:
            yield Finding("store", "warning", error.message, "correct it if a store is to run here: none starts with it")


def check_disk(config: KVFerryConfig) -> Iterator[Finding]:
    """Check that the store's folder could be written, without making it, that no two stores share it, and for its room."""
    try:
        preflight.check_folders(config, workers_here(config), why_not_creatable)
    except ConfigError as error:
        yield _refused("disk", error, config, "store")


def check_router(config: KVFerryConfig) -> Iterator[Finding]:
    """Check names and addresses in the router's settings."""
    try:
        preflight.check_router_lists(config.router)
    except ConfigError as error:
        yield _refused("router", error, config, "router")


def check_certificate(config: KVFerryConfig) -> Iterator[Finding]:
    """Check that the router can load its certificate and key, if it has any."""
    try:
        is_set = server_context(config.router.tls_cert, config.router.tls_key) is not None
    except ConfigError as error:
        yield _refused("certificate", error, config, "router")
        return
    if is_set:
        yield Finding("certificate", "ok", f"router.tls_cert = {config.router.tls_cert}: can be loaded")


def _is_for_vllm(config: KVFerryConfig) -> bool:
    """Return True if ``serve`` would start vLLM engines with these settings."""
    return is_for_serve(config) and config.local.engine == "vllm"


def _refused(subject: str, error: ConfigError, config: KVFerryConfig, kind: str) -> Finding:
    """Return the finding for settings that processes of a kind refuse: a failure if such a process would run here."""
    if _runs_here(kind, config):
        return Finding(subject, "failure", error.message, f"correct it: no {kind} starts with it")
    return Finding(subject, "warning", error.message, f"correct it if a {kind} is to run here: none starts with it")


def _runs_here(kind: str, config: KVFerryConfig) -> bool:
    """Return True if a process of a kind is sure to run here: ``serve`` starts all kinds, and a worker is known by its name."""
    return is_for_serve(config) or (kind == "worker" and bool(config.worker.engine_id))


def check_memory(config: KVFerryConfig) -> Iterator[Finding]:
    """Compare pools, stores and kernel caches with the memory limit of this machine or container; check shared memory.

    What lies in huge pages is left out, also if a process that runs here with these settings may have taken the last of them.
    """
    limit, workers = memory_limit_bytes(), workers_here(config)
    counted = [each for each in reservations(config, workers) if not each.is_huge]
    counted = [each for each in counted if not (each.lacks and _held_address(config))]
    named = [f"{each.name}: {format_bytes(each.num_bytes)}" for each in counted]
    kernels = 0 if computes_on_gpu(config) else KERNEL_BYTES * config.worker.kernel_cache_entries * len(workers)
    if kernels:
        named.append(f"kernels: up to {format_bytes(kernels)}")
    text = f"{', '.join(named) or 'nothing beside the model'}; {format_bytes(limit)} of memory"
    used = sum(each.num_bytes for each in counted) + kernels
    fix = "lower what these settings reserve, or raise the memory limit"
    if used >= limit and _runs_here("worker", config):
        yield Finding("memory", "failure", text, fix)
    elif used >= limit:
        yield Finding("memory", "warning", text, f"if a process that reserves some of this is to run here: {fix}")
    else:
        yield Finding("memory", "warning" if used > limit // 2 else "ok", text, "leave room for the model beside them")
    yield _check_shared_memory(config)


def _check_shared_memory(config: KVFerryConfig) -> Finding:
    """Compare shared memory with what workers have LMCache copy through; those that run here have theirs already."""
    num_staged = sum(role != "encode" for role, _ in workers_here(config).values())
    staging = config.connector.lmcache.staging_bytes * num_staged if "lmcache" in config.connector.names else 0
    try:
        state = os.statvfs("/dev/shm")
    except OSError as error:
        fix = "mount a tmpfs there: UCX and other libraries need it"
        return Finding("memory", "failure", f"/dev/shm: {error.strerror}", fix)
    free = state.f_bavail * state.f_frsize
    is_small = free < max(32 << 20, staging)
    fix = "raise shm.size of the chart, or --shm-size of the container"
    text = f"/dev/shm has {free >> 20} MiB free; the KV pool is not in it"
    if staging:
        text += f", connector.lmcache.staging_bytes of {num_staged} workers are: {format_bytes(staging)}"
    return Finding("memory", "warning" if is_small else "ok", text, fix)


def check_huge_pages(config: KVFerryConfig) -> Iterator[Finding]:
    """Compare the huge pages that pools and stores in use need with the free ones, which each takes from the same stock.

    A process that runs here with these settings has its pages already: then a shortage is no failure.
    """
    for each in reservations(config, workers_here(config)):
        if each.huge_pages == "never":
            continue
        verdict: Verdict = "ok"
        text = f"{each.section}.huge_pages = {each.huge_pages}: {each.lacks or 'there are enough'}"
        if each.lacks:
            holder = _held_address(config)
            is_certain = each.huge_pages == "always" and not holder and _runs_here("worker", config)
            verdict = "failure" if is_certain else "warning"
            text += f"; the process at {holder} may have them" if holder else ""
        yield Finding("huge pages", verdict, text, "sysctl vm.nr_hugepages, in Kubernetes also the limit hugepages-2Mi")
    has_pool = bool(workers_here(config)) and not computes_on_gpu(config)
    if config.cache.num_blocks and config.cache.huge_pages == "always" and has_pool:
        text = (
            f"cache.huge_pages = always: cache.num_blocks = {config.cache.num_blocks} take a number that depends on the model"
        )
        yield Finding("huge pages", "warning", text, "set cache.memory_bytes, or compare what kvferry doctor memory shows")


def _held_address(config: KVFerryConfig) -> str:
    """Return the first address of these settings where something listens, with its setting; "" if there is none."""
    for setting, (host, port) in preflight.all_addresses(config):
        refusal = why_not_free(setting, host, port) if port else None
        if refusal is not None and refusal.is_in_use:
            return f"{setting} {host}:{port}"
    return ""


def check_ports(config: KVFerryConfig) -> Iterator[Finding]:
    """Try to bind every address of router, workers and store; any free port is only mentioned where the host fails."""
    if is_for_serve(config):
        try:
            preflight.check_shared_ports(config, workers_here(config))
        except ConfigError as error:
            yield Finding("ports", "failure", error.message, "leave it out: each worker then takes any free port")
    groups = (
        {"cluster": preflight.addresses_of_serve(config)} if is_for_serve(config) else preflight.addresses_by_process(config)
    )
    refused: dict[str, Finding] = {}
    for kind, addresses in groups.items():
        try:
            preflight.check_distinct(addresses)
        except ConfigError as error:  # the same one of every worker, and of those that others read from
            refused.setdefault(error.message, _refused("ports", error, config, kind))
    yield from refused.values()
    for setting, (host, port) in preflight.all_addresses(config):
        refusal = why_not_free(setting, host, port)
        if refusal is not None:
            fix = "stop what listens there, unless it is the kvferry that you mean, or choose another port"
            fix = preflight.fix_of(setting, refusal)[1] if refusal.is_of_host else fix
            is_ours = setting == "router.port" and refusal.is_in_use and is_for_serve(config)
            verdict: Verdict = "failure" if is_ours and not is_router_at_port(config.router) else "warning"
            yield Finding("ports", verdict, f"{setting} {host}:{port} cannot be bound: {refusal.reason}", fix)
        elif port:
            yield Finding("ports", "ok", f"{setting} {host}:{port} is free")


def check_security(config: KVFerryConfig) -> Iterator[Finding]:
    """Check for sockets that other machines can reach, and for the key that protects them."""
    try:
        keys = keys_of(config.security)
    except KVFerryError as error:
        yield Finding("security", "failure", error.message, "kvferry keygen")
        return
    exposed = _exposed(
        {
            "router.worker_address": config.router.worker_address,
            "worker.control_address": config.worker.control_address,
            "kvstore.bind_address": config.kvstore.bind_address,
        }
    )
    yield from _check_ucx(config)
    yield from _check_kv_events(config)
    yield from _check_api_key(config)
    if keys is not None:
        yield Finding("security", "ok", "a cluster key is set")
    elif exposed:
        verdict: Verdict = "warning" if config.security.insecure else "failure"
        text = f"{', '.join(exposed)} can be reached by others, and without a cluster key strangers are taken for members"
        yield Finding("security", verdict, text, "export KVFERRY_CLUSTER_KEY=$(kvferry keygen) for every process")
    else:
        yield Finding("security", "ok", "the cluster's sockets are for this machine only")


def _exposed(addresses: Mapping[str, str]) -> list[str]:
    """Return the settings of addresses that other machines can reach; an empty one is not bound."""
    return [setting for setting, address in addresses.items() if address and not is_loopback(split_tcp(address)[0])]


def _check_api_key(config: KVFerryConfig) -> Iterator[Finding]:
    try:
        preflight.check_api_key(config)
    except ConfigError as error:
        yield _refused("security of the API", error, config, "router")


def _check_kv_events(config: KVFerryConfig) -> Iterator[Finding]:
    """Report KV events that others can read, since no key protects them."""
    settings = ("kv_events_address", "kv_events_replay_address") if config.cache.kv_events else ()
    exposed = _exposed({f"worker.{name}": getattr(config.worker, name) for name in settings})
    if not exposed:
        return
    subject, text = "security of KV events", f"{', '.join(exposed)} can be reached by others; no key protects what is cached"
    if config.security.insecure:
        yield Finding(subject, "warning", text, "keep it on a closed network, or on this machine: tcp://127.0.0.1:PORT")
    else:
        yield _refused(subject, ConfigError(text), config, "worker")


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


CHECKS = (
    check_versions,
    check_compiled_code,
    check_model,
    check_engine,
    check_connector,
    check_memory,
    check_huge_pages,
    check_store,
    check_disk,
    check_transports,
    check_ports,
    check_router,
    check_certificate,
    check_peers,
    check_redis_server,
    check_lmcache_server,
    check_tracing,
    check_security,
)
