"""A worker process that can switch between prefill, decode and aggregated: the engine, and the handlers of all three roles.

It is the only kind of worker that needs two roles, so it is built above both of them. Its connector serves readers and reads,
whatever role it begins with.
"""

from __future__ import annotations

from connectors.registry import connector_factory, ec_connector_factory
from core.config import KVFerryConfig
from core.wire.messages import Role
from core.worker.builder import assemble
from core.worker.engine_worker import run_worker
from core.worker.parts import Announce
from core.worker.role import EngineFacts
from core.worker.switchable import SwitchableHandler
from decode.role import DecodeHandler
from prefill.role import PrefillHandler


def run(config: KVFerryConfig, role: Role, announce: Announce) -> int:
    """Run a worker process that begins with ``role`` until it leaves; returns its exit code.

    Raises:
        KVFerryError: it cannot start.
    """
    factories = connector_factory(config.connector.name), ec_connector_factory(config.ec_connector.name)
    return run_worker(config, role, lambda context: assemble(context, switchable_handler, *factories), announce)


def switchable_handler(facts: EngineFacts) -> SwitchableHandler:
    """Return the handler of a worker that serves the requests of every role but encode."""
    return SwitchableHandler(PrefillHandler(facts), DecodeHandler(facts))
