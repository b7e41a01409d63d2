"""The decode worker process, and the aggregated one: the engine, the connectors of the settings, and ``DecodeHandler``."""

from __future__ import annotations

from typing import Literal

from connectors.registry import connector_factory, ec_connector_factory
from core.config import KVFerryConfig
from core.worker.builder import assemble
from core.worker.engine_worker import run_worker
from core.worker.parts import Announce
from decode.role import DecodeHandler


def run(config: KVFerryConfig, role: Literal["decode", "aggregated"], announce: Announce) -> int:
    """Run a decode or an aggregated worker process until it leaves; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    # Without prefixes, p2p alone needs a prefill worker to read from.
    has_connector = role == "decode" or set(config.connector.names) != {"p2p"} or config.connector.peer_prefixes
    make_connector = connector_factory(config.connector.name) if has_connector else None
    factories = make_connector, ec_connector_factory(config.ec_connector.name)
    return run_worker(config, role, lambda context: assemble(context, DecodeHandler, *factories), announce)
