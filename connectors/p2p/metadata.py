"""The message of the p2p scheduler side to its worker side, as the engine ships it."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.p2p.actions import ConsumerStep
from core.request import KVConnectorMetadata


@dataclass(slots=True)
class P2PConnectorMetadata(ConsumerStep, KVConnectorMetadata):
    """What one engine step asks of the consumer."""
