"""Entry points of the processes of a cluster: what happens between the command line and a role's own ``run``.

Owns the order: log first, then the tie to the parent, then the role. A role is imported only in its own process.
"""

from __future__ import annotations

import os
import socket
from typing import Literal

import msgspec

from core.config import KVFerryConfig
from core.errors import ConfigError
from core.log import configure_logging
from core.wire.curve import derive_keys
from core.wire.sockets import is_loopback, split_tcp
from kvferry.child import announcer, die_with_parent

ProcessRole = Literal["router", "encode", "prefill", "decode", "aggregated", "kvstore"]


def run_role(role: ProcessRole, config: KVFerryConfig, ready_fd: int | None, parent_pid: int | None) -> int:
    """Run one process of a cluster until it is told to leave; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    check_exposure(role, config)
    if parent_pid is not None:
        die_with_parent(parent_pid)
    announce, is_json = announcer(ready_fd), config.log.format == "json"
    if role == "router":
        from router.main import run as run_router

        configure_logging(config.log.level, "router", is_json=is_json)
        return run_router(config, announce)
    if role == "kvstore":
        from kvferry.store_role import run_store

        configure_logging(config.log.level, "kvstore", is_json=is_json)
        return run_store(config.kvstore, announce, derive_keys(config.security.cluster_key))
    config = _named(role, config)
    configure_logging(config.log.level, config.worker.engine_id, is_json=is_json)
    if role == "encode":
        from encode.worker import run as run_encode

        return run_encode(config, announce)
    if role == "prefill":
        from prefill.worker import run as run_prefill

        return run_prefill(config, announce)
    from decode.worker import run as run_decode

    return run_decode(config, role, announce)


def check_exposure(role: ProcessRole, config: KVFerryConfig) -> None:
    """Refuse to open a socket of the cluster to other machines while anybody could use it.

    Raises:
        ConfigError: it is bound beyond loopback without a cluster key, or has no use for one, and ``security.insecure`` is off.
    """
    if config.security.insecure:
        return
    worker = config.worker
    keyed = {
        "router": ("router.worker_address", config.router.worker_address),
        "encode": ("worker.control_address", worker.control_address),
        "prefill": ("worker.control_address", worker.control_address),
        "kvstore": ("kvstore.bind_address", config.kvstore.bind_address),
    }
    if role in keyed and not config.security.cluster_key:
        _refuse_exposed(*keyed[role], "set a cluster key (`kvferry keygen`, $KVFERRY_CLUSTER_KEY)")
    if role in ("prefill", "decode", "aggregated") and config.cache.kv_events:
        fix = "it has no authentication: keep it on this machine"
        _refuse_exposed("worker.kv_events_address", worker.kv_events_address, fix)


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
