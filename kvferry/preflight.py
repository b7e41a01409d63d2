"""Checks of a local cluster's settings before any of its processes starts.

Owns the checks that need more than the settings themselves: ports, folders, memory, libraries, the model's shape. Each raises a
ConfigError that names setting, value and fix; a starting process finds the same errors, but seconds later and in one of many
log lines. Imports neither torch nor the libraries that it looks for.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from connectors.p2p.transport.nixl import INSTALL_HINT, installed_module
from connectors.registry import CONNECTORS, EC_CONNECTORS, NO_EC_CONNECTOR, find_entry_point
from core.config import KVFerryConfig
from core.config_router import RouterSection
from core.config_workers import KVStoreSection
from core.engine.kv_sizing import size_kv_cache
from core.errors import ConfigError
from core.memory_file import huge_page_stock
from core.model.arch import ModelArch, parse_arch
from core.model.dtype_name import check_quantization, resolve_dtype_name
from core.model.hub import peek_config, resolve_model
from core.model.vision_arch import parse_vision_arch
from core.wire.key_rotation import keys_of
from core.wire.messages import Role
from core.wire.sockets import split_tcp
from kvferry.machine import format_bytes, memory_limit_bytes, why_no_cuda, why_not_bindable, why_not_writable
from kvferry.progress import shown_progress
from kvferry.roles import check_exposure
from kvferry.router_plan import RouterPlan

Workers = Mapping[str, tuple[Role, KVFerryConfig]]  # by name, with the settings of each

_FLOAT32_BYTES, _HALF_BYTES = 4, 2
_KV_EVENT_SETTINGS = ("worker.kv_events_address", "worker.kv_events_replay_address")
_ANY_FREE = "stop what listens there, or choose another port; 0 is any free one"


def check_cluster(config: KVFerryConfig, workers: Workers) -> None:
    """Check everything that a start needs; the model is fetched and converted if it is missing.

    Raises:
        ConfigError: a check failed; names the setting, its value and the fix.
    """
    keys_of(config.security)
    check_exposure("router", config)
    check_connectors(config)
    check_ports(config, workers)
    check_folders(config, workers)
    check_device(config)
    check_memory(config, workers)
    name, cache_dir = config.model.name, Path(config.model.cache_dir)
    known = peek_config(name, cache_dir)
    if known is not None:
        check_model(parse_arch(known), workers)
    with shown_progress() as progress:
        files = resolve_model(name, cache_dir, progress)
    if known is None:
        check_model(parse_arch(files.config), workers)
    check_weights(files.weight_files)
    if config.local.num_encode and parse_vision_arch(files.config) is None:
        raise ConfigError(
            f"local.num_encode = {config.local.num_encode}: model {name} reads text only; leave encode workers out",
            param="local.num_encode",
        )


def check_process(role: Role | Literal["router"], config: KVFerryConfig) -> None:
    """Check what a single process needs to start, without fetching the model.

    Raises:
        ConfigError: a check failed; names the setting, its value and the fix.
    """
    workers: Workers = {}
    addresses = [*_router_addresses(config)]
    if role != "router":
        workers = {role: (role, config)}
        check_connectors(config)
        check_device(config)
        addresses = [("worker.ops_port", (config.worker.ops_host, config.worker.ops_port)), *_worker_addresses(config)]
        if _serves_readers(role, config):
            addresses.append(("worker.control_address", split_tcp(config.worker.control_address)))
    for setting, (host, port) in addresses:
        _check_bindable(setting, host, port)
    if role == "router":
        return  # it needs the tokenizer alone: its workers may be engines that know other models
    known = peek_config(config.model.name, Path(config.model.cache_dir))
    if known is not None:
        check_model(parse_arch(known), workers)


def check_connectors(config: KVFerryConfig) -> None:
    """Check that the named connectors exist, and the libraries that they, the store's tiers and traces need."""
    path = "connector.name" if config.connector.names == (config.connector.name,) else "connector.connectors"
    for name in config.connector.names:
        if ":" not in name:
            find_entry_point(CONNECTORS, name, path)
    if config.ec_connector.name != NO_EC_CONNECTOR and ":" not in config.ec_connector.name:
        find_entry_point(EC_CONNECTORS, config.ec_connector.name, "ec_connector.name")
    transports = {"connector.transports": config.connector.transports} if "p2p" in config.connector.names else {}
    if config.ec_connector.name == "p2p":
        transports["ec_connector.transports"] = config.ec_connector.transports
    for path, names in transports.items():
        if set(names) == {"nixl"} and installed_module() is None:
            raise ConfigError(f"{path} = nixl: the library is not installed: {INSTALL_HINT}, or use shm, tcp", param=path)
    if config.kvstore.redis_url and _uses_kvstore(config) and importlib.util.find_spec("redis") is None:
        raise ConfigError(
            "kvstore.redis_url: the redis library is not installed: pip install 'kvferry[redis]', or leave it out",
            param="kvstore.redis_url",
        )
    check_tracing(config)


def check_tracing(config: KVFerryConfig) -> None:
    """Check for the library that sends traces, if they are wanted."""
    if config.tracing.endpoint and not has_otlp_exporter():
        raise ConfigError(
            "tracing.endpoint: OpenTelemetry is not installed: pip install 'kvferry[otel]', or leave it out",
            param="tracing.endpoint",
        )


def has_otlp_exporter() -> bool:
    """Return True if the library that sends traces is installed."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ImportError:
        return False


def check_ports(config: KVFerryConfig, workers: Workers) -> None:
    """Try to bind every address with a port number; an address that several workers would bind is refused."""
    for setting, address in _worker_addresses(config):
        num_workers = sum(_serves_readers(role, worker) for role, worker in workers.values())
        num_workers = len(workers) if setting in _KV_EVENT_SETTINGS else num_workers
        if num_workers > 1:
            raise ConfigError(
                f"{setting} = {address[1]}: {num_workers} workers of this machine cannot share one port; leave it out",
                param=setting,
            )
    for setting, (host, port) in (*_service_addresses(config), *_worker_addresses(config)):
        _check_bindable(setting, host, port)


def _serves_readers(role: Role | Literal["router"], config: KVFerryConfig) -> bool:
    """Return True if a worker binds sockets for readers of its blocks or embeddings."""
    if role in ("router", "encode", "prefill"):
        return role != "router"
    return config.worker.can_switch_role or config.connector.peer_prefixes


def _check_bindable(setting: str, host: str, port: int) -> None:
    reason = why_not_bindable(host, port)
    if reason is not None:
        raise ConfigError(f"{setting} = {port}: cannot listen on {host}:{port}: {reason}; {_ANY_FREE}", param=setting)


def _router_addresses(config: KVFerryConfig) -> Iterator[tuple[str, tuple[str, int]]]:
    """Return the addresses that a router binds; port 0 can always be bound if the host can."""
    router, plan = config.router, RouterPlan(config.router)
    yield "router.port", (router.host, router.port)
    for section in map(plan.section, plan.names):
        if section.ops_port is not None:
            yield "router.ops_port", (section.ops_host, section.ops_port)
        yield "router.worker_address", split_tcp(section.worker_address)


def _service_addresses(config: KVFerryConfig) -> Iterator[tuple[str, tuple[str, int]]]:
    """Return the addresses that router and store of a local cluster bind; an address left at its default gets any port."""
    store = config.kvstore
    for setting, address in _router_addresses(config):
        if setting != "router.worker_address" or config.router.worker_address != RouterSection().worker_address:
            yield setting, address
    if config.local.kvstore:
        if store.bind_address != KVStoreSection().bind_address:
            yield "kvstore.bind_address", split_tcp(store.bind_address)
        yield "kvstore.ops_port", (store.ops_host, store.ops_port)


def _worker_addresses(config: KVFerryConfig) -> Iterator[tuple[str, tuple[str, int]]]:
    """Return the addresses with a port number that each worker binds."""
    host, _ = split_tcp(config.worker.control_address)
    if config.worker.data_port:
        yield "worker.data_port", (host, config.worker.data_port)
    for setting in _KV_EVENT_SETTINGS if config.cache.kv_events else ():
        address = getattr(config.worker, setting.removeprefix("worker."))
        if address and split_tcp(address)[1]:
            yield setting, split_tcp(address)


def check_folders(config: KVFerryConfig, workers: Workers) -> None:
    """Try to write into the folder of the disk tier; stores inside several workers cannot share it."""
    folder = config.kvstore.disk_path
    if not folder or not _uses_kvstore(config):
        return
    num_stores = _num_stores(config, workers)
    if num_stores > 1:
        raise ConfigError(
            f"kvstore.disk_path = {folder!r}: {num_stores} workers have a store each and cannot share a folder; "
            "set local.kvstore = true for one store of all",
            param="kvstore.disk_path",
        )
    reason = why_not_writable(Path(folder))
    if reason is not None:
        raise ConfigError(f"kvstore.disk_path = {folder!r} cannot be written: {reason}", param="kvstore.disk_path")


def check_device(config: KVFerryConfig) -> None:
    """Check for a GPU if one is required."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "this installation has no torch and computes nothing: use the image for CPU or CUDA, or install torch"
        )
    reason = why_no_cuda() if config.model.device == "cuda" else None
    if reason is not None:
        raise ConfigError(f"model.device = 'cuda': {reason}; use cpu or auto", param="model.device")


def check_memory(config: KVFerryConfig, workers: Workers) -> None:
    """Compare the memory that all processes reserve with this machine's."""
    limit, parts = memory_limit_bytes(), reserved_bytes(config, workers)
    if sum(parts.values()) >= limit:
        named = ", ".join(f"{path}: {format_bytes(num_bytes)}" for path, num_bytes in parts.items())
        raise ConfigError(
            f"cache.memory_bytes: all processes together reserve {format_bytes(sum(parts.values()))} ({named}), and there are "
            f"{format_bytes(limit)} of memory; lower them",
            param="cache.memory_bytes",
        )


def reserved_bytes(config: KVFerryConfig, workers: Workers) -> dict[str, int]:
    """Return the memory that all processes reserve in addition to their models, by purpose; huge pages are left out."""
    with_pool = [section for role, section in workers.values() if role != "encode"]
    found: dict[str, int] = {}
    pools = [section.cache for section in with_pool if not section.cache.num_blocks]
    if pools and not computes_on_gpu(config) and not _has_huge_pages(pools[0].huge_pages, sum(p.memory_bytes for p in pools)):
        total_bytes = sum(pool.memory_bytes for pool in pools)
        is_same = len({pool.memory_bytes for pool in pools}) == 1
        name = "1 KV pool" if len(pools) == 1 else f"{len(pools)} KV pools"
        found[f"{name} of {format_bytes(pools[0].memory_bytes)}" if is_same else name] = total_bytes
    offload = config.connector.offload
    offload_bytes = offload.memory_bytes * len(with_pool)
    if "offload" in config.connector.names and not _has_huge_pages(offload.huge_pages, offload_bytes):
        found["connector.offload.memory_bytes"] = offload_bytes
    store_bytes = config.kvstore.memory_bytes * _num_stores(config, workers)
    if store_bytes and not _has_huge_pages(config.kvstore.huge_pages, store_bytes):
        found["kvstore.memory_bytes"] = store_bytes
    return found


def computes_on_gpu(config: KVFerryConfig) -> bool:
    """Return True if workers will use a GPU."""
    return config.model.device == "cuda" or (config.model.device == "auto" and why_no_cuda() is None)


def _has_huge_pages(wish: str, num_bytes: int) -> bool:
    return wish != "never" and not huge_page_stock().lacks(num_bytes)


def _uses_kvstore(config: KVFerryConfig) -> bool:
    return config.local.kvstore or "store" in config.connector.names


def _num_stores(config: KVFerryConfig, workers: Workers) -> int:
    """Return how many stores the processes of this cluster contain."""
    if config.local.kvstore:
        return 1
    if "store" not in config.connector.names or config.kvstore.address:
        return 0
    return sum(role != "encode" for role, _ in workers.values())


def check_model(arch: ModelArch, workers: Workers) -> None:
    """Compare the settings of every worker with the model: context length, blocks, quantization, and the size of the pool."""
    for role, config in workers.values():
        if role == "encode":
            continue
        is_gpu = computes_on_gpu(config)
        check_quantization(config.model, "cuda" if is_gpu else "cpu")
        if is_gpu and not config.cache.num_blocks:
            _check_length(config, arch)  # the pool gets the rest of the GPU's memory
            continue
        dtype = resolve_dtype_name(config.model.dtype, arch.dtype, "cuda" if is_gpu else "cpu")
        size_kv_cache(config, arch, _FLOAT32_BYTES if dtype == "float32" else _HALF_BYTES)


def _check_length(config: KVFerryConfig, arch: ModelArch) -> None:
    if config.model.max_model_len > arch.max_position_embeddings:
        raise ConfigError(
            f"model.max_model_len = {config.model.max_model_len}: the model allows {arch.max_position_embeddings}",
            param="model.max_model_len",
        )


def check_weights(files: Iterable[Path]) -> None:
    """Compare the size of every safetensors file with its header: an interrupted download is shorter."""
    for file in files:
        num_bytes = file.stat().st_size
        try:
            with file.open("rb") as stream:
                (head_bytes,) = struct.unpack("<Q", stream.read(8))
                head = json.loads(stream.read(min(head_bytes, num_bytes)))
            end = max((tensor["data_offsets"][1] for name, tensor in head.items() if name != "__metadata__"), default=0)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{file} cannot be read as a safetensors file; fetch it again", param="model.name") from None
        expected = 8 + head_bytes + end
        if num_bytes < expected:
            raise ConfigError(f"{file} is cut short: {num_bytes} of {expected} bytes; fetch it again", param="model.name")
