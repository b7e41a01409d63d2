"""Handoff of KV blocks from a prefill to a decode worker: the decode worker reads (pulls) them from the prefill worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connectors.registry import Connector, ConnectorContext


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connector of a worker (entry point ``kvferry.connectors`` → ``p2p``)."""
    from connectors.p2p.connector import P2PConnector

    return P2PConnector(context)
