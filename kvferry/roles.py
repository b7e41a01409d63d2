"""Entry points of the processes of a cluster: what happens between the command line and a role's own ``run``.

Owns the order: log first, then the tie to the parent, then the role. A role is imported only in its own process.
"""

from __future__ import annotations

import os
import socket
from typing import Literal

import msgspec

from core.config import KVFerryConfig
from core.log import configure_logging
from kvferry.child import announcer, die_with_parent

ProcessRole = Literal["router", "prefill", "decode", "aggregated", "kvstore"]


def run_role(role: ProcessRole, config: KVFerryConfig, ready_fd: int | None, parent_pid: int | None) -> int:
    """Run one process of a cluster until it is told to leave; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    announce = announcer(ready_fd)
    if role == "router":
        from router.main import run as run_router

        configure_logging(config.log.level, "router")
        return run_router(config, announce)
    if role == "kvstore":
        from kvferry.store_role import run_store

        configure_logging(config.log.level, "kvstore")
        return run_store(config.kvstore, announce)
    config = _named(role, config)
    configure_logging(config.log.level, config.worker.engine_id)
    if role == "prefill":
        from prefill.worker import run as run_prefill

        return run_prefill(config, announce)
    from decode.worker import run as run_decode

    return run_decode(config, role, announce)


def _named(role: str, config: KVFerryConfig) -> KVFerryConfig:
    """Return the configuration with a name for the instance."""
    if config.worker.engine_id:
        return config
    name = f"{role}-{socket.gethostname()}-{os.getpid()}"
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, engine_id=name))
