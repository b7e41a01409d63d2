"""A worker's own host memory as a tier behind its KV pool: more prefixes are hits than the pool holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connectors.registry import Connector, ConnectorContext


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connector of a worker (entry point ``kvferry.connectors`` → ``offload``)."""
    from connectors.offload.arena import offload_connector

    return offload_connector(context)
