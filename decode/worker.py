"""The decode worker process, and the aggregated one: the engine, the connectors of the settings, and ``DecodeHandler``."""

from __future__ import annotations

from typing import Literal

from connectors.ec.registry import build_ec_connector
from connectors.registry import connector_builder
from core.config import KVFerryConfig
from core.worker.builder import Assembled, WorkerContext, assemble
from core.worker.process import Announce, run_worker
from decode.role import DecodeHandler


def run(config: KVFerryConfig, role: Literal["decode", "aggregated"], announce: Announce) -> int:
    """Run a decode or an aggregated worker process until it leaves; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    has_connector = role == "decode" or set(config.connector.names) != {"p2p"}  # p2p alone needs a prefill worker to read from
    build_connector = connector_builder(config.connector.name) if has_connector else None

    def put_together(context: WorkerContext) -> Assembled:
        return assemble(context, DecodeHandler, build_connector, build_ec_connector)

    return run_worker(config, role, put_together, announce)
