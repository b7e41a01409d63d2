"""Connectors by name: what a worker asks for, and where third parties plug in.

A connector is a bundle of a scheduler side, a worker side and whatever runs in the worker's event loop. A factory makes it,
a callable ``(ConnectorContext) -> Connector``. ``connector.name`` names the factory by its entry point in the group
``kvferry.connectors``, or as ``module:factory`` where the code is importable but not installed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Protocol

from prometheus_client import CollectorRegistry

from core.clock import Clock
from core.config import ConnectorSection, KVFerryConfig, KVStoreSection
from core.connector import KVConnectorScheduler, KVConnectorWorker
from core.errors import ConfigError
from core.ids import IdSource
from core.wire.curve import ClusterKeys
from core.wire.key_rotation import keys_of
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import Role

ENTRY_POINT_GROUP = "kvferry.connectors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """Everything a connector may know about the worker it lives in."""

    role: Role
    engine_id: str
    incarnation: int
    model_fingerprint: bytes
    layout: KVLayoutInfo
    config: ConnectorSection
    control_address: str  # where to bind the control socket (producers)
    data_port: int = 0  # of a data socket beside it; 0 = any
    keys: ClusterKeys | None = None  # for the sockets between workers; None = they are open
    advertise_host: str
    clock: Clock
    ids: IdSource
    metrics: CollectorRegistry
    kvstore: KVStoreSection = field(default_factory=KVStoreSection)


class Connector(ABC):
    """Both sides of a connector and its life in the worker's event loop.

    ``scheduler`` and ``worker`` are handed to the engine and called on its thread only; ``start``, ``stop`` and the handoff
    calls run in the event loop.
    """

    scheduler: KVConnectorScheduler
    worker: KVConnectorWorker

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; empty if the connector has none."""

    @property
    def host_id(self) -> str:
        """Equal on two workers between which the transports of one host work; empty if that plays no part."""
        return ""

    @property
    def has_digests(self) -> bool:
        """True if what is read here can be verified byte by byte."""
        return False

    async def start(self) -> None:
        """Bind sockets and start tasks. The KV pool is registered by now.

        Raises:
            ConnectorUnavailable: a library or device is missing.
        """

    async def stop(self) -> None:
        """End tasks and threads, close sockets."""

    def expect(self, handoff: KVHandoff) -> None:
        """Prepare for a request that may load this handoff: it is on its way to the engine, which may refuse it.

        What can be asked of the owner need not wait for the engine's turn. Nothing may be left of it if no request comes.
        """

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these handoffs, because nobody will read them. Idempotent."""

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Keep these handoffs for another while."""

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return 0

    def num_saving_blocks(self) -> int:
        """Return how many blocks are held until they are copied elsewhere; not longer than a moment."""
        return 0

    def longest_lease_s(self) -> float:
        """Return how long the last of these blocks is held, unless its reader asks for more time."""
        return 0.0


ConnectorFactory = Callable[[ConnectorContext], Connector]


class ConnectorHost(Protocol):
    """What a connector's builder reads of the worker it builds for (``core.worker.builder.WorkerContext`` has it)."""

    @property
    def config(self) -> KVFerryConfig:
        """All settings."""
        ...

    @property
    def role(self) -> Role:
        """What the worker does."""
        ...

    @property
    def engine_id(self) -> str:
        """Stable name of the instance."""
        ...

    @property
    def incarnation(self) -> int:
        """This start of it."""
        ...

    @property
    def clock(self) -> Clock:
        """The worker's clock."""
        ...

    @property
    def ids(self) -> IdSource:
        """The worker's randomness."""
        ...

    @property
    def metrics(self) -> CollectorRegistry:
        """What ``/metrics`` shows."""
        ...


def connector_builder(name: str) -> Callable[[ConnectorHost, KVLayoutInfo, bytes], Connector]:
    """Return a function that builds the named connector for a worker, once layout and model fingerprint are known.

    Raises:
        ConfigError: no such connector.
    """
    factory = connector_factory(name)

    def build(host: ConnectorHost, layout: KVLayoutInfo, model_fingerprint: bytes) -> Connector:
        return factory(
            ConnectorContext(
                role=host.role,
                engine_id=host.engine_id,
                incarnation=host.incarnation,
                model_fingerprint=model_fingerprint,
                layout=layout,
                config=host.config.connector,
                control_address=host.config.worker.control_address,
                data_port=host.config.worker.data_port,
                keys=keys_of(host.config.security),
                advertise_host=host.config.worker.advertise_host,
                clock=host.clock,
                ids=host.ids,
                metrics=host.metrics,
                kvstore=host.config.kvstore,
            )
        )

    return build


def connector_factory(name: str) -> ConnectorFactory:
    """Return the factory registered under ``name``, or the one that ``name`` spells as ``module:factory``.

    Raises:
        ConfigError: no such connector; lists the ones there are, or says what is wrong with the module.
    """
    if ":" in name:
        return _imported_factory(name)
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none installed"
        raise ConfigError(
            f"connector.name = {name!r}: no such connector; known: {known}, or any module:factory", param="connector.name"
        )
    factory: ConnectorFactory = found[name].load()
    return factory


def _imported_factory(name: str) -> ConnectorFactory:
    module_name, _, attribute = name.partition(":")
    try:
        factory: ConnectorFactory = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"connector.name = {name!r}: {error}", param="connector.name") from error
    if not callable(factory):
        raise ConfigError(f"connector.name = {name!r}: {attribute} is not callable", param="connector.name")
    return factory
