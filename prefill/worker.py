"""The prefill worker process: the engine, the connectors of the settings, and ``PrefillHandler``."""

from __future__ import annotations

from connectors.registry import connector_factory, ec_connector_factory
from core.config import KVFerryConfig
from core.worker.builder import assemble
from core.worker.engine_worker import run_worker
from core.worker.parts import Announce
from prefill.role import PrefillHandler


def run(config: KVFerryConfig, announce: Announce) -> int:
    """Run a prefill worker process until it leaves; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    factories = connector_factory(config.connector.name), ec_connector_factory(config.ec_connector.name)
    return run_worker(config, "prefill", lambda context: assemble(context, PrefillHandler, *factories), announce)
