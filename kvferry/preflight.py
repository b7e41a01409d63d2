"""Checks of a local cluster's settings before any of its processes starts.

Owns the checks that need more than the settings themselves: ports, folders, memory, libraries, the model's shape. Each raises a
ConfigError that names setting, value and fix; a starting process finds the same errors, but seconds later and in one of many
log lines. Imports neither torch nor the libraries that it looks for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from core.config import KVFerryConfig
from core.config_router import RouterSection
from core.config_workers import KVStoreSection
from core.engine.kv_sizing import block_bytes_of, size_kv_cache
from core.errors import ConfigError
from core.model.arch import ModelArch, parse_arch
from core.model.dtype_name import check_quantization, resolve_dtype_name
from core.model.hub import peek_config, resolve_model
from core.model.vision_arch import parse_vision_arch
from core.wire.key_rotation import keys_of
from core.wire.messages import Role
from core.wire.sockets import split_tcp
from kvferry.cluster_plan import without_local_store
from kvferry.connector_preflight import (
    check_connectors,
    check_factories,
    check_nixl,
    check_p2p,
    check_prefix_caching,
    check_tier_caching,
)
from kvferry.listening import BindFailure, why_not_free
from kvferry.machine import format_bytes, memory_limit_bytes, share_an_address, why_no_cuda, why_not_writable
from kvferry.progress import shown_progress
from kvferry.reserved_memory import (
    Reservation,
    Workers,
    computes_on_gpu,
    num_kvstores,
    reservations,
    reservations_of,
    uses_kvstore,
)
from kvferry.roles import check_exposure
from kvferry.router_plan import RouterPlan
from kvferry.tier_preflight import check_own_store, check_tiers
from router.http.client_table import networks_of
from router.http.tls import server_context
from router.images.hosts import HostRules
from router.tools import formats

Address = tuple[str, tuple[str, int]]  # setting, host and port
WhyUnusable = Callable[[Path], str | None]

_FLOAT32_BYTES, _HALF_BYTES = 4, 2
_KV_EVENT_SETTINGS = ("worker.kv_events_address", "worker.kv_events_replay_address")
_HOST_SETTINGS = {  # of the sockets whose host has a setting of its own
    "router.port": "router.host",
    "router.ops_port": "router.ops_host",
    "worker.ops_port": "worker.ops_host",
    "worker.data_port": "worker.control_address",
    "kvstore.ops_port": "kvstore.ops_host",
}


def check_cluster(config: KVFerryConfig, workers: Workers, environment: Mapping[str, str] = os.environ) -> None:
    """Check everything that a start needs; the model is fetched and converted if it is missing.

    ``environment`` is that of the workers.

    Raises:
        ConfigError: a check failed; names the setting, its value and the fix.
    """
    check_router(config)
    check_connectors(config, workers, are_all=True)
    check_p2p(workers)
    check_prefix_caching(workers)
    check_tier_caching(workers)
    check_factories(config, environment)
    check_nixl(workers, environment)
    check_ports(config, workers)
    check_folders(config, workers)
    if config.local.kvstore:
        check_own_store(config)
    check_device(config)
    check_attention(config)
    check_memory(config, workers)
    name, cache_dir = config.model.name, Path(config.model.cache_dir)
    known = peek_config(name, cache_dir)
    if known is not None:
        check_model(parse_arch(known), workers)
        check_encode_workers(config, known)
    with shown_progress() as progress:
        files = resolve_model(name, cache_dir, progress)
    if known is None:
        check_model(parse_arch(files.config), workers)
        check_encode_workers(config, files.config)
    check_weights(files.weight_files)


def check_process(role: Role | Literal["router", "kvstore", "agent"], config: KVFerryConfig) -> None:
    """Check what a single process needs to start, without fetching the model.

    Raises:
        ConfigError: a check failed; names the setting, its value and the fix.
    """
    if role == "router":
        check_router(config)
        _check_all_bindable(list(_router_addresses(config)))
        return  # it needs the tokenizer alone: its workers may be engines that know other models
    if role == "kvstore":
        _check_all_bindable(list(_store_addresses(config)))
        check_own_store(config)
        check_own_memory(role, config)
        return
    if role == "agent":
        _check_all_bindable([_ops_address(config)])
        return
    worker: Workers = {role: (role, config)}
    check_connectors(config, worker, are_all=False)
    check_p2p(worker)
    check_tier_caching(worker)
    check_device(config)
    if role != "encode":
        check_attention(config)
    addresses = [_ops_address(config), *(_kv_event_addresses(config) if role != "encode" else ())]
    if _serves_readers(role, config):
        addresses += [*_data_address(config), _control_address(config)]
    _check_all_bindable(addresses)
    check_own_memory(role, config)
    known = peek_config(config.model.name, Path(config.model.cache_dir))
    if known is not None:
        check_model(parse_arch(known), {role: (role, without_local_store(config))})


def check_router(config: KVFerryConfig) -> None:
    """Check what a router reads before it binds anything: keys of cluster and clients, and certificate.

    Raises:
        ConfigError: a check failed; names the setting, its value and the fix.
    """
    keys_of(config.security)
    check_exposure("router", config)
    check_api_key(config)
    check_router_lists(config.router)
    server_context(config.router.tls_cert, config.router.tls_key)


def check_router_lists(router: RouterSection) -> None:
    """Check names and addresses whose spelling only the router knows: of proxies, hosts of images, and tool calls.

    Raises:
        ConfigError: one is none.
    """
    networks_of(router.proxy_addresses)
    HostRules(router.images.allowed_hosts, "router.images.allowed_hosts")
    formats.check_name(router.tool_format)


def check_api_key(config: KVFerryConfig) -> None:
    """Check that a router's API has a key where it needs one, and that what is given holds one.

    Raises:
        ConfigError: that is not so.
    """
    keys = config.router.api_key
    if config.router.requires_api_key and not keys:
        raise ConfigError(
            "router.requires_api_key = true, but there is no key: set $KVFERRY_API_KEY or router.api_key; in Kubernetes see "
            "whether the value in the secret is empty",
            param="router.api_key",
        )
    if keys and not keys.replace(",", "").strip():
        raise ConfigError(
            "router.api_key has no key in it, only blanks or commas: every request would be refused; give one, or leave it out",
            param="router.api_key",
        )


def check_ports(config: KVFerryConfig, workers: Workers) -> None:
    """Try to bind every address with a port number; an address that several workers would bind is refused."""
    check_shared_ports(config, workers)
    _check_all_bindable(addresses_of_serve(config))


def check_shared_ports(config: KVFerryConfig, workers: Workers) -> None:
    """Refuse an address that several workers would bind."""
    for setting, address in _worker_addresses(config):
        is_of_events = setting in _KV_EVENT_SETTINGS
        num_workers = sum(
            role != "encode" if is_of_events else _serves_readers(role, worker) for role, worker in workers.values()
        )
        if num_workers > 1:
            raise ConfigError(
                f"{setting} = {address[1]}: {num_workers} workers of this machine cannot share one port; leave it out",
                param=setting,
            )


def _serves_readers(role: Role | Literal["router"], config: KVFerryConfig) -> bool:
    """Return True if a worker binds sockets for readers of its blocks or embeddings."""
    if role in ("router", "encode", "prefill"):
        return role != "router"
    return config.worker.can_switch_role or config.connector.peer_prefixes


def _check_all_bindable(addresses: Sequence[Address]) -> None:
    check_distinct(addresses)
    for setting, (host, port) in addresses:
        refusal = why_not_free(setting, host, port)
        if refusal is not None:
            param, fix = fix_of(setting, refusal)
            raise ConfigError(f"{setting} = {port}: cannot listen on {host}:{port}: {refusal.reason}; {fix}", param=param)


def fix_of(setting: str, refusal: BindFailure) -> tuple[str, str]:
    """Return the setting to change where an address cannot be listened at, and what to do."""
    if refusal.is_of_host:
        host_setting = _HOST_SETTINGS.get(setting, setting)
        return host_setting, f"set {host_setting} to an address of this machine"
    return setting, "stop what listens there, or choose another port; 0 is any free one"


def check_distinct(addresses: Iterable[Address]) -> None:
    """Refuse one port for two sockets of this machine. Port 0, any free one, may be asked for more than once.

    Raises:
        ConfigError: there is one; names both settings.
    """
    seen: list[Address] = []
    for setting, (host, port) in addresses:
        for other, (other_host, other_port) in seen:
            if port and port == other_port and share_an_address(host, other_host):
                of_each = ", and so does each of router.processes" if setting.startswith("router.") else ""
                raise ConfigError(
                    f"{other} and {setting} would both listen on port {port}: every socket needs a port of its own{of_each}",
                    param=setting,
                )
        seen.append((setting, (host, port)))


def all_addresses(config: KVFerryConfig) -> list[Address]:
    """Return the addresses that router, worker and store bind where each is a process of its own."""
    return list(dict.fromkeys(address for addresses in addresses_by_process(config).values() for address in addresses))


def addresses_by_process(config: KVFerryConfig) -> dict[str, tuple[Address, ...]]:
    """Return the addresses that a router, a worker and a store bind; each may be on a machine of its own.

    A worker that others read from binds those of every worker first; most decode workers are none.
    """
    of_every_worker = (_ops_address(config), *_kv_event_addresses(config))
    return {
        "router": tuple(_router_addresses(config)),
        "worker": of_every_worker,
        "worker that others read from": (*of_every_worker, *_data_address(config), _control_address(config)),
        "store": tuple(_store_addresses(config)),
    }


def addresses_of_serve(config: KVFerryConfig) -> tuple[Address, ...]:
    """Return the addresses that processes of a local cluster bind, all on this machine; each worker has an operations port."""
    return (*_service_addresses(config), _ops_address(config), *_worker_addresses(config))


def _router_addresses(config: KVFerryConfig) -> Iterator[Address]:
    """Return the addresses that a router binds; port 0 can always be bound if the host can."""
    router, plan = config.router, RouterPlan(config.router)
    yield "router.port", (router.host, router.port)
    for section in map(plan.section, plan.names):
        if section.ops_port is not None:
            yield "router.ops_port", (section.ops_host, section.ops_port)
        yield "router.worker_address", split_tcp(section.worker_address)


def _service_addresses(config: KVFerryConfig) -> Iterator[Address]:
    """Return the addresses that router and store of a local cluster bind; an address left at its default gets any port."""
    for setting, address in _router_addresses(config):
        if setting != "router.worker_address" or config.router.worker_address != RouterSection().worker_address:
            yield setting, address
    for setting, address in _store_addresses(config) if config.local.kvstore else ():
        if setting != "kvstore.bind_address" or config.kvstore.bind_address != KVStoreSection().bind_address:
            yield setting, address


def _store_addresses(config: KVFerryConfig) -> Iterator[Address]:
    yield "kvstore.bind_address", split_tcp(config.kvstore.bind_address)
    yield "kvstore.ops_port", (config.kvstore.ops_host, config.kvstore.ops_port)


def _control_address(config: KVFerryConfig) -> Address:
    return "worker.control_address", split_tcp(config.worker.control_address)


def _ops_address(config: KVFerryConfig) -> Address:
    return "worker.ops_port", (config.worker.ops_host, config.worker.ops_port)


def _worker_addresses(config: KVFerryConfig) -> Iterator[Address]:
    """Return the addresses with a port number that each worker binds if others read from it."""
    yield from _data_address(config)
    yield from _kv_event_addresses(config)


def _data_address(config: KVFerryConfig) -> Iterator[Address]:
    host, _ = split_tcp(config.worker.control_address)
    if config.worker.data_port:
        yield "worker.data_port", (host, config.worker.data_port)


def _kv_event_addresses(config: KVFerryConfig) -> Iterator[Address]:
    for setting in _KV_EVENT_SETTINGS if config.cache.kv_events else ():
        address = getattr(config.worker, setting.removeprefix("worker."))
        if address and split_tcp(address)[1]:
            yield setting, split_tcp(address)


def check_folders(config: KVFerryConfig, workers: Workers, why_unusable: WhyUnusable = why_not_writable) -> None:
    """Check the folder of the disk tier by ``why_unusable``; stores inside several workers cannot share it.

    Raises:
        ConfigError: they would share it, or it cannot be used.
    """
    folder = config.kvstore.disk_path
    if not folder or not uses_kvstore(config):
        return
    num_stores = num_kvstores(config, workers)
    if num_stores > 1:
        raise ConfigError(
            f"kvstore.disk_path = {folder!r}: {num_stores} workers have a store each and cannot share a folder; "
            "set local.kvstore = true for one store of all",
            param="kvstore.disk_path",
        )
    reason = why_unusable(Path(folder))
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


def check_attention(config: KVFerryConfig) -> None:
    """Check for what the named attention backend needs; the others are for any machine.

    Raises:
        ConfigError: its kernels could not be compiled here.
    """
    if config.model.attention != "triton":
        return
    reason = "" if computes_on_gpu(config) else "its kernels are for a GPU, and workers compute on the CPU here"
    if not reason and importlib.util.find_spec("triton") is None:
        reason = "this installation has no triton"
    if reason:
        raise ConfigError(f"model.attention = triton: {reason}; use auto", param="model.attention")


def check_memory(config: KVFerryConfig, workers: Workers) -> None:
    """Compare the memory that all processes reserve with this machine's, and the huge pages that they cannot do without.

    Raises:
        ConfigError: they reserve more; names the setting of the largest part, or the one of the huge pages.
    """
    reserved = reservations(config, workers)
    for each in reserved:
        if each.huge_pages == "always" and each.lacks:
            setting = f"{each.section}.huge_pages"
            raise ConfigError(
                f"{setting} = always: {each.lacks}; reserve them (vm.nr_hugepages, in Kubernetes also the limit hugepages-2Mi) "
                "or set it to auto",
                param=setting,
            )
    _check_fits(reserved, "all processes together reserve")


def check_own_memory(role: Role | Literal["kvstore"], config: KVFerryConfig) -> None:
    """Compare the memory that a single process reserves with this machine's, or container's: the kernel would kill it.

    Raises:
        ConfigError: it reserves more; names the setting of the largest part.
    """
    _check_fits(reservations_of(role, config), "this process reserves")


def _check_fits(reserved: Iterable[Reservation], who_reserves: str) -> None:
    limit, parts = memory_limit_bytes(), [each for each in reserved if not each.is_huge]
    total = sum(each.num_bytes for each in parts)
    if parts and total >= limit:
        setting = f"{max(parts, key=lambda each: each.num_bytes).section}.memory_bytes"
        named = ", ".join(f"{each.name}: {format_bytes(each.num_bytes)}" for each in parts)
        raise ConfigError(
            f"{setting}: {who_reserves} {format_bytes(total)} ({named}), and there are {format_bytes(limit)} of memory; "
            "lower them",
            param=setting,
        )


def check_model(arch: ModelArch, workers: Workers) -> None:
    """Compare the settings of every worker with the model: context length, blocks, quantization, pool, and tiers.

    Pools of ``cache.num_blocks`` have a size that only the model tells, so that ``check_memory`` counts none of them.
    """
    pool_bytes = 0
    for role, config in workers.values():
        if role == "encode":
            continue
        is_gpu = computes_on_gpu(config)
        check_quantization(config.model, "cuda" if is_gpu else "cpu")
        dtype = resolve_dtype_name(config.model.dtype, arch.dtype, "cuda" if is_gpu else "cpu")
        dtype_bytes = _FLOAT32_BYTES if dtype == "float32" else _HALF_BYTES
        if is_gpu and not config.cache.num_blocks:
            _check_length(config, arch)  # the pool gets the rest of the GPU's memory
        else:
            pool = size_kv_cache(config, arch, dtype_bytes).config
            if config.cache.num_blocks and not is_gpu:
                pool_bytes += pool.num_blocks * pool.block_bytes
                _check_pools(config, pool_bytes, pool.block_bytes)
        check_tiers(config, block_bytes_of(arch, config.cache, dtype_bytes))


def _check_pools(config: KVFerryConfig, pool_bytes: int, block_bytes: int) -> None:
    limit = memory_limit_bytes()
    if pool_bytes >= limit:
        raise ConfigError(
            f"cache.num_blocks = {config.cache.num_blocks}: blocks of {format_bytes(block_bytes)}, in all processes together "
            f"{format_bytes(pool_bytes)}, and there are {format_bytes(limit)} of memory; lower it, or set cache.memory_bytes",
            param="cache.num_blocks",
        )


def check_encode_workers(config: KVFerryConfig, model_config: Mapping[str, Any]) -> None:
    """Refuse encode workers of a local cluster whose model reads no images.

    Raises:
        ConfigError: that is so.
    """
    if config.local.num_encode and parse_vision_arch(model_config) is None:
        raise ConfigError(
            f"local.num_encode = {config.local.num_encode}: model {config.model.name} reads text only; "
            "leave encode workers out",
            param="local.num_encode",
        )


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
