"""Several connectors at once, in order: ``connector.name = multi`` with ``connector.connectors = [p2p, offload, store]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connectors.registry import Connector, ConnectorContext


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connectors of a worker (entry point ``kvferry.connectors`` → ``multi``).

    Raises:
        ConfigError: there is no such connector, or they do not go together.
    """
    from connectors.multi.connector import MultiConnector

    return MultiConnector.build(context)
