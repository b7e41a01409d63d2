"""Builds a worker from its parts: identity, engine, connectors, and the role's handler.

Owns the types between a role's ``worker.py`` and ``core.worker.process``, and the order in which engine and connectors are
built. Loading takes seconds, so ``load_in_thread`` keeps it off the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from core.clock import Clock
from core.config import KVFerryConfig
from core.engine.build import BuiltEngine, ConnectorSides, ECConnectorSides, apply_cpu_threads, build_engine
from core.engine.core import Engine
from core.engine.media.image_decode_thread import ImageDecodeThread
from core.ids import IdSource
from core.tracing import Tracer
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.media import ECSource
from core.wire.messages import Role
from core.worker.role import EngineFacts, RoleHandler

LOAD_THREAD_NAME = "kvferry-load"


class ConnectorBundle(ConnectorSides, Protocol):
    """What the shell uses of a connector (``connectors.registry.Connector`` has it)."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here; known after ``start``."""

    @property
    def host_id(self) -> str:
        """Equal on two workers between which the transports of one host work."""

    @property
    def has_digests(self) -> bool:
        """True if what is read here can be verified byte by byte."""

    async def start(self) -> None:
        """Bind sockets and start tasks."""

    async def stop(self) -> None:
        """End tasks and threads, close sockets."""

    def expect(self, handoff: KVHandoff) -> None:
        """Prepare for a request that may load this handoff, or may never come."""

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End handoffs that will not be read."""

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Keep handoffs for another while."""

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""

    def num_saving_blocks(self) -> int:
        """Return how many blocks are held until they are copied elsewhere."""

    def longest_lease_s(self) -> float:
        """Return how long the last of them is held, unless its reader asks for more time."""


class ECConnectorBundle(ECConnectorSides, Protocol):
    """What the shell uses of an EC connector (``connectors.ec.registry.ECConnector`` has it)."""

    @property
    def name(self) -> str:
        """By which workers that understand each other know it."""

    @property
    def host_id(self) -> str:
        """Equal on two workers between which the transports of one host work."""

    async def start(self) -> None:
        """Bind sockets and start threads."""

    async def stop(self) -> None:
        """End threads, close sockets."""

    def release(self, sources: Iterable[ECSource]) -> None:
        """End the leases of these sources, which will not be read."""

    def num_leased_chunks(self) -> int:
        """Return how much is held for readers."""

    def longest_lease_s(self) -> float:
        """Return how long the last of it is held, unless its reader asks for more time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Who a worker is and what it takes from outside: everything a connector's builder may want."""

    config: KVFerryConfig
    role: Role
    engine_id: str
    incarnation: int
    clock: Clock
    ids: IdSource
    metrics: CollectorRegistry
    tracer: Tracer | None = None  # None = requests are not traced


ConnectorBuilder = Callable[[WorkerContext, KVLayoutInfo, bytes], ConnectorBundle]
ECConnectorBuilder = Callable[[WorkerContext, bytes], ECConnectorBundle | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEncoder:
    """The engine of a worker that embeds images and nothing else."""

    engine: Engine
    model_fingerprint: bytes
    max_num_images: int  # that it holds at most, waiting ones included
    image_decode_thread: ImageDecodeThread  # not started

    @property
    def num_blocks(self) -> int:
        """It has no KV pool."""
        return 0


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of a worker once the model is loaded."""

    built: BuiltEngine | BuiltEncoder
    connector: ConnectorBundle | None
    handler: RoleHandler
    ec_connector: ECConnectorBundle | None = None


def assemble(
    context: WorkerContext,
    make_handler: Callable[[EngineFacts], RoleHandler],
    build_connector: ConnectorBuilder | None,
    build_ec_connector: ECConnectorBuilder,
) -> Assembled:
    """Load the model and put engine, connectors and handler together, limited to the worker's share of CPU threads."""
    apply_cpu_threads(context.config.worker)
    connector: ConnectorBundle | None = None
    ec_connector: ECConnectorBundle | None = None

    def make_connector(layout: KVLayoutInfo, fingerprint: bytes) -> ConnectorBundle:
        nonlocal connector
        assert build_connector is not None
        connector = build_connector(context, layout, fingerprint)
        return connector

    def make_ec_connector(fingerprint: bytes) -> ECConnectorBundle | None:
        nonlocal ec_connector
        ec_connector = build_ec_connector(context, fingerprint)
        return ec_connector

    built = build_engine(
        context.config,
        context.clock,
        make_connector if build_connector is not None else None,
        make_ec_connector,
        incarnation=context.incarnation,
        has_readers=context.role == "prefill",
    )
    facts = EngineFacts(max_model_len=built.max_model_len, eos_token_ids=built.eos_token_ids)
    return Assembled(built, connector, make_handler(facts), ec_connector)


def load_in_thread(function: Callable[[], Assembled]) -> Future[Assembled]:
    """Run a function on a thread that cannot keep the process alive."""
    result: Future[Assembled] = Future()
    result.set_running_or_notify_cancel()  # the waiting side may give up, the load goes on

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=LOAD_THREAD_NAME, daemon=True).start()
    return result
