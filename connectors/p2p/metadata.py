"""The messages between the p2p scheduler side and its worker side, as the engine ships them."""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.p2p.actions import ConsumerStep
from connectors.p2p.prefixes.messages import PrefixReport
from core.request import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class P2PConnectorMetadata(ConsumerStep, KVConnectorMetadata):
    """What one engine step asks of the consumer."""


@dataclass(slots=True)
class P2PConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """What the event loop has told the engine about prefixes since its last step, in order."""

    reports: list[PrefixReport] = field(default_factory=list)
