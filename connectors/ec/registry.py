"""EC connectors by name, and what a worker gets of one.

An EC connector is a bundle of a scheduler side, a worker side (``core.ec_connector``) and whatever runs in the worker's event
loop, as a KV connector is (``connectors.registry``). ``ec_connector.name`` says which; with "none" there is none, and every
worker computes the embeddings that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from connectors.registry import ConnectorHost
from core.clock import Clock
from core.config import ECConnectorSection, KVStoreSection
from core.ec_connector import ECConnectorScheduler, ECConnectorWorker
from core.ids import IdSource
from core.wire.curve import ClusterKeys
from core.wire.key_rotation import keys_of
from core.wire.media import ECSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ECContext:
    """Everything an EC connector may know about the worker it lives in. ``is_encoder``: it computes embeddings for others."""

    is_encoder: bool
    engine_id: str
    incarnation: int
    model_fingerprint: bytes
    config: ECConnectorSection
    control_address: str = "tcp://127.0.0.1:0"  # where an encode worker binds its control socket
    data_port: int = 0  # of a data socket beside it; 0 = any
    keys: ClusterKeys | None = None  # for the sockets between workers; None = they are open
    advertise_host: str = ""
    clock: Clock
    ids: IdSource
    metrics: CollectorRegistry
    kvstore: KVStoreSection = field(default_factory=KVStoreSection)


class ECConnector(ABC):
    """Both sides of an EC connector and its life in the worker's event loop.

    ``scheduler`` and ``worker`` are handed to the engine and called on its thread only; an encode worker uses ``worker`` alone.
    ``worker.register_caches`` comes before ``start``.
    """

    name: str
    scheduler: ECConnectorScheduler
    worker: ECConnectorWorker

    @property
    def host_id(self) -> str:
        """Equal on two workers between which the transports of one host work; empty if that plays no part."""
        return ""

    @abstractmethod
    async def start(self) -> None:
        """Bind sockets and start threads.

        Raises:
            ConfigError: an address or size cannot be used.
            ConnectorUnavailable: a library or device is missing.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End threads, close sockets. Idempotent."""

    def release(self, sources: Iterable[ECSource]) -> None:
        """End the leases of these sources, because nobody will read them. Idempotent. Any thread."""

    def num_leased_chunks(self) -> int:
        """Return how much is held for readers, in chunks of host memory."""
        return 0

    def longest_lease_s(self) -> float:
        """Return how long the last of it is held, unless its reader asks for more time."""
        return 0.0


def build_ec_connector(host: ConnectorHost, model_fingerprint: bytes) -> ECConnector | None:
    """Return the connector that ``ec_connector.name`` asks for, None if it asks for none."""
    config = host.config
    if config.ec_connector.name == "none":
        return None
    context = ECContext(
        is_encoder=host.role == "encode",
        engine_id=host.engine_id,
        incarnation=host.incarnation,
        model_fingerprint=model_fingerprint,
        config=config.ec_connector,
        control_address=config.worker.control_address,
        data_port=config.worker.data_port,
        keys=keys_of(config.security),
        advertise_host=config.worker.advertise_host,
        clock=host.clock,
        ids=host.ids,
        metrics=host.metrics,
        kvstore=config.kvstore,
    )
    return new_ec_connector(context)


def new_ec_connector(context: ECContext) -> ECConnector:
    """Return the connector that the context names, which is not "none". Libraries of one are loaded for that one."""
    if context.config.name == "shared":
        from connectors.ec.store_connector import StoreECConnector

        return StoreECConnector(context)
    from connectors.ec.p2p import P2PECConnector

    return P2PECConnector(context)
