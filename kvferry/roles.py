"""Entry points of the processes of a cluster: the steps between the command line and a role's own ``run``.

Owns the order: log first, then the tie to the parent, then the role. A role is imported only in its own process.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Literal

import msgspec

from core.config import KVFerryConfig
from core.descriptors import WORKER_CONNECTIONS, raise_descriptor_limit
from core.environment import set_default_environment
from core.errors import ConfigError, KVFerryError
from core.gc_freeze import without_collections
from core.log import configure_logging
from core.wire.key_rotation import keys_of
from core.wire.sockets import is_loopback, split_tcp
from kvferry.child import SupervisorPipe, die_with_parent
from kvferry.server_address import check_address

ProcessRole = Literal["router", "encode", "prefill", "decode", "aggregated", "kvstore"]
AgentRole = Literal["prefill", "decode", "aggregated"]


def run_role(role: ProcessRole, config: KVFerryConfig, ready_fd: int | None, parent_pid: int | None) -> int:
    """Run one process of a cluster until a signal or an operator ends it; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    pipe = SupervisorPipe(ready_fd)
    try:
        check_exposure(role, config)
        if parent_pid is not None:
            die_with_parent(parent_pid)
        else:
            _check(role, config)
        return _run(role, config, pipe)
    except KVFerryError as error:
        pipe.fail(error.message)
        raise
    except Exception as bug:
        pipe.fail(f"{type(bug).__name__}: {bug}")
        raise


def run_agent(role: AgentRole, config: KVFerryConfig, ready_fd: int | None, parent_pid: int | None) -> int:
    """Run the agent of a vLLM server until a signal or an operator ends it; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    pipe = SupervisorPipe(ready_fd)
    try:
        if parent_pid is not None:
            die_with_parent(parent_pid)
        else:
            _check("agent", config)
        check_address(config.agent.engine, "agent.engine")
        config = _named(role, config)
        configure_logging(config.log.level, config.worker.engine_id, is_json=config.log.format == "json")
        with without_collections():
            from agent.worker import run

        return run(config, role, pipe.announce)
    except KVFerryError as error:
        pipe.fail(error.message)
        raise
    except Exception as bug:
        pipe.fail(f"{type(bug).__name__}: {bug}")
        raise


def _check(role: ProcessRole | Literal["agent"], config: KVFerryConfig) -> None:
    """Check the settings before the role's libraries are imported; a supervisor has already done so for its children."""
    from kvferry.preflight import check_process

    check_process(role, config)


def _run(role: ProcessRole, config: KVFerryConfig, pipe: SupervisorPipe) -> int:
    is_json = config.log.format == "json"
    if role == "router" and config.router.processes > 1:
        from kvferry.router_group import run_group

        configure_logging(config.log.level, "routers", is_json=is_json)
        return run_group(config, pipe.announce)
    if role == "router":
        with without_collections():
            from router.main import run as run_router

        configure_logging(config.log.level, "router", is_json=is_json)
        return run_router(config, pipe.announce)
    raise_descriptor_limit(WORKER_CONNECTIONS)
    if role == "kvstore":
        from kvferry.store_role import run_store

        configure_logging(config.log.level, "kvstore", is_json=is_json)
        return run_store(config.kvstore, pipe.announce, keys_of(config.security))
    config = _named(role, config)
    configure_torch(config.worker.kernel_cache_entries)
    configure_logging(config.log.level, config.worker.engine_id, is_json=is_json)
    if role == "encode":
        with without_collections():
            from encode.worker import run as run_encode

        return run_encode(config, pipe.announce)
    if config.worker.can_switch_role:
        with without_collections():
            from kvferry.switchable_worker import run as run_switchable

        return run_switchable(config, role, pipe.announce)
    if role == "prefill":
        with without_collections():
            from prefill.worker import run as run_prefill

        return run_prefill(config, pipe.announce)
    with without_collections():
        from decode.worker import run as run_decode

    return run_decode(config, role, pipe.announce)


def configure_torch(num_cached_kernels: int) -> None:
    """Set the variables that torch and oneDNN read when they are loaded. Those that the user has set stay.

    The kernels that each caches per shape on a CPU are bounded; by default they are 1,024, which is up to a gigabyte. Large
    tensors ask for pages of 2 MiB, which the kernel gives where it has them: a decode step reads all weights.
    """
    assert "torch" not in sys.modules, "torch is loaded already: this would have no effect"
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        set_default_environment(variable, str(num_cached_kernels))
    set_default_environment("THP_MEM_ALLOC_ENABLE", "1")


def check_exposure(role: ProcessRole, config: KVFerryConfig) -> None:
    """Refuse to open a socket of the cluster to other machines without protection.

    Raises:
        ConfigError: it is bound beyond loopback without a cluster key, or does not support one, and ``security.insecure`` is
        off.
    """
    if config.security.insecure:
        return
    worker = config.worker
    keyed: dict[str, tuple[str, str]] = {
        "router": ("router.worker_address", config.router.worker_address),
        "encode": ("worker.control_address", worker.control_address),
        "prefill": ("worker.control_address", worker.control_address),
        "kvstore": ("kvstore.bind_address", config.kvstore.bind_address),
    }
    if role in ("decode", "aggregated") and (config.worker.can_switch_role or config.connector.peer_prefixes):
        keyed[role] = keyed["prefill"]
    if role in keyed and not config.security.cluster_key:
        _refuse_exposed(*keyed[role], "set a cluster key (`kvferry keygen`, $KVFERRY_CLUSTER_KEY)")
    if role == "decode" and not config.security.cluster_key and _reads_by_ucx(config):
        fix = "and so could UCX (transport nixl) of this worker: set a cluster key, or take nixl out of connector.transports"
        for address in worker.router_addresses:
            _refuse_exposed("worker.router_addresses", address, fix)
    if role in ("prefill", "decode", "aggregated") and config.cache.kv_events:
        fix = "it has no authentication: keep it on this machine"
        _refuse_exposed("worker.kv_events_address", worker.kv_events_address, fix)
        if worker.kv_events_replay_address:
            _refuse_exposed("worker.kv_events_replay_address", worker.kv_events_replay_address, fix)


def _reads_by_ucx(config: KVFerryConfig) -> bool:
    """Return True if a decode worker has UCX agents, which listen as well."""
    return "p2p" in config.connector.names and "nixl" in config.connector.transports


def _refuse_exposed(setting: str, address: str, fix: str) -> None:
    if not is_loopback(split_tcp(address)[0]):
        raise ConfigError(
            f"{setting} = {address} can be reached from other machines: {fix}, or say --insecure on a network that is closed",
            param=setting,
        )


def _named(role: str, config: KVFerryConfig) -> KVFerryConfig:
    """Return the configuration with a name for the instance."""
    if config.worker.engine_id:
        return config
    name = f"{role}-{socket.gethostname()}-{os.getpid()}"
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, engine_id=name))
