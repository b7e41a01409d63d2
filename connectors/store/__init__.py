"""A store of KV blocks as a tier behind a worker's pool; workers that share one find each other's prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connectors.registry import Connector, ConnectorContext


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connector of a worker (entry point ``kvferry.connectors`` → ``store``)."""
    from connectors.store.shared import store_connector

    return store_connector(context)
