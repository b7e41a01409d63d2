"""Builds a worker from its parts: identity, engine, connectors, and the role's handler.

Owns the types between a role's ``worker.py`` and ``core.worker.process``, and the order in which engine and connectors are
built. Loading takes seconds, so ``load_in_thread`` keeps it off the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from core.connector import Connector, ConnectorContext, ConnectorFactory, WorkerContext, check_connector
from core.ec_connector import ECConnector, ECConnectorFactory, ECContext, check_ec_connector
from core.engine.build import BuiltEngine, apply_cpu_threads, build_engine
from core.engine.core import Engine
from core.engine.media.image_decode_thread import ImageDecodeThread
from core.wire.kv import KVLayoutInfo
from core.worker.role import EngineFacts, RoleHandler

LOAD_THREAD_NAME = "kvferry-load"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEncoder:
    """The engine of a worker that embeds images and nothing else."""

    engine: Engine
    model_fingerprint: bytes
    max_num_images: int  # the limit, waiting ones included
    image_decode_thread: ImageDecodeThread  # not started
    known_step: None = None  # its first step is judged like any first step
    grammars: None = None  # it puts out no text
    contents: None = None  # it has no prefix cache

    @property
    def num_blocks(self) -> int:
        """It has no KV pool."""
        return 0


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of a worker once the model is loaded."""

    built: BuiltEngine | BuiltEncoder
    connector: Connector | None
    handler: RoleHandler
    ec_connector: ECConnector | None = None


def assemble(
    context: WorkerContext,
    make_handler: Callable[[EngineFacts], RoleHandler],
    make_connector: ConnectorFactory | None,
    make_ec_connector: ECConnectorFactory | None,
) -> Assembled:
    """Load the model and put engine, connectors and handler together, limited to the worker's share of CPU threads.

    Raises:
        ConfigError: a setting does not fit, or a connector's factory makes no connector.
    """
    apply_cpu_threads(context.config.worker)
    worker = vars(context)

    def make_checked(make: ConnectorFactory, layout: KVLayoutInfo, model: bytes) -> Connector:
        made = make(ConnectorContext(**worker, layout=layout, model_fingerprint=model))
        return check_connector(made, "connector.name", context.config.connector.name)

    def make_checked_ec(make: ECConnectorFactory, model: bytes) -> ECConnector:
        return check_ec_connector(make(ECContext(**worker, model_fingerprint=model)), context.config.ec_connector.name)

    built = build_engine(
        context.config,
        context.clock,
        make_connector and partial(make_checked, make_connector),
        make_ec_connector and partial(make_checked_ec, make_ec_connector),
        incarnation=context.incarnation,
        has_readers=context.has_readers,
    )
    facts = EngineFacts(max_model_len=built.max_model_len, eos_token_ids=built.eos_token_ids)
    return Assembled(built, built.connector, make_handler(facts), built.ec_connector)


def load_in_thread(function: Callable[[], Assembled]) -> Future[Assembled]:
    """Run a function on a thread that cannot keep the process alive."""
    result: Future[Assembled] = Future()
    result.set_running_or_notify_cancel()  # the waiting side may give up while the load continues

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=LOAD_THREAD_NAME, daemon=True).start()
    return result
