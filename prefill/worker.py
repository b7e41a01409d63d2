"""The prefill worker process: the engine, the connectors of the settings, and ``PrefillHandler``."""

from __future__ import annotations

from connectors.ec.registry import build_ec_connector
from connectors.registry import connector_builder
from core.config import KVFerryConfig
from core.worker.builder import Assembled, WorkerContext, assemble
from core.worker.process import Announce, run_worker
from prefill.role import PrefillHandler


def run(config: KVFerryConfig, announce: Announce) -> int:
    """Run a prefill worker process until it leaves; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    build_connector = connector_builder(config.connector.name)

    def put_together(context: WorkerContext) -> Assembled:
        return assemble(context, PrefillHandler, build_connector, build_ec_connector)

    return run_worker(config, "prefill", put_together, announce)
