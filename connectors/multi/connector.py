"""Several connectors behind the interface of one.

Owns the parts, and stops all of them if one cannot start. The registry builds each part as if it were the only one;
all parts share the settings ``connector.*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec

from connectors.multi.scheduler import MultiConnectorScheduler
from connectors.multi.worker import multi_connector_worker
from connectors.registry import connector_factory
from core.connector import Connector, ConnectorContext, ContentFollower, check_connector
from core.errors import ConfigError
from core.wire.contents import ContentPart
from core.wire.early import MeetProducer
from core.wire.kv import KVHandoff


class MultiConnector(Connector):
    """Holds the parts, in order."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = tuple(connectors)
        self.scheduler = MultiConnectorScheduler([connector.scheduler for connector in connectors])
        self.worker = multi_connector_worker([connector.worker for connector in connectors])

    @classmethod
    def build(cls, context: ConnectorContext) -> MultiConnector:
        """Build every connector that the configuration names.

        Raises:
            ConfigError: there is no such connector, a factory makes none, or two of them make handoffs.
        """
        names = context.config.connector.connectors
        connectors = [
            check_connector(connector_factory(name)(_own_context(context, name)), "connector.connectors", name)
            for name in names
        ]
        makers = [name for name, connector in zip(names, connectors, strict=True) if connector.scheduler.makes_handoffs]
        if len(makers) > 1:
            reason = f"{' and '.join(makers)} make handoffs, and a prompt has one; name one of them"
            raise ConfigError(f"connector.connectors: {reason}", param="connector.connectors")
        return cls(connectors)

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports of all that have some, in order."""
        return tuple(dict.fromkeys(name for connector in self._connectors for name in connector.transports))

    @property
    def host_id(self) -> str:
        """The host id of the part whose transports work on one host."""
        return next((connector.host_id for connector in self._connectors if connector.host_id), "")

    @property
    def meets_producers(self) -> bool:
        """True if a part prepares for the handoffs of another worker."""
        return any(connector.meets_producers for connector in self._connectors)

    @property
    def control_address(self) -> str:
        """The address of the part whose handoffs are read from this worker."""
        return next((connector.control_address for connector in self._connectors if connector.control_address), "")

    @property
    def prefix_address(self) -> str:
        """The address of the part that serves beginnings of prompts."""
        return next((connector.prefix_address for connector in self._connectors if connector.prefix_address), "")

    @property
    def has_digests(self) -> bool:
        """True if every read of a handoff can be verified byte by byte."""
        with_transports = [connector for connector in self._connectors if connector.transports]
        return bool(with_transports) and all(connector.has_digests for connector in with_transports)

    @property
    def content_parts(self) -> tuple[ContentPart, ...]:
        """The tiers of all parts; of two with one medium the first."""
        every = [part for connector in self._connectors for part in connector.content_parts]
        return tuple({part.medium: part for part in reversed(every)}.values())

    def follow_contents(self, publish: ContentFollower) -> None:
        """Follow the tiers of all parts that are in ``content_parts``."""
        kept = self.content_parts
        for connector in self._connectors:
            if connector.content_parts and connector.content_parts[0] in kept:
                connector.follow_contents(publish)

    async def start(self) -> None:
        """Start all in order; if one cannot start, stop those that have.

        Raises:
            ConnectorUnavailable: a library or device of one of them is missing.
        """
        async with AsyncExitStack() as stack:
            for connector in self._connectors:
                stack.push_async_callback(connector.stop)
                await connector.start()
            stack.pop_all()

    async def stop(self) -> None:
        """Stop all, the last first, also if one fails."""
        async with AsyncExitStack() as stack:
            for connector in self._connectors:
                stack.push_async_callback(connector.stop)

    def meet(self, producer: MeetProducer) -> None:
        """Let all get to know a worker whose handoff is about to come."""
        for connector in self._connectors:
            connector.meet(producer)

    def expect(self, handoff: KVHandoff) -> None:
        """Let all prepare for a request that may load this handoff."""
        for connector in self._connectors:
            connector.expect(handoff)

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these handoffs, each at the connector that made it."""
        for connector in self._connectors:
            connector.release(transfer_ids)

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Renew these handoffs, each at the connector that made it."""
        for connector in self._connectors:
            connector.renew(transfer_ids)

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return sum(connector.num_leased_blocks() for connector in self._connectors)

    def num_saving_blocks(self) -> int:
        """Return how many blocks are held until they are copied. One that several hold counts once, if they tell which."""
        known: set[int] = set()
        num_unknown = 0
        for connector in self._connectors:
            block_ids = connector.saving_block_ids()
            if block_ids is None:
                num_unknown += connector.num_saving_blocks()
            else:
                known.update(block_ids)
        return len(known) + num_unknown

    def longest_lease_s(self) -> float:
        """Return how long the longest lease of the parts lasts unless its reader renews it, in seconds."""
        return max((connector.longest_lease_s() for connector in self._connectors), default=0.0)


def _own_context(context: ConnectorContext, name: str) -> ConnectorContext:
    """Return the context of one part, as if it were configured alone."""
    connector = msgspec.structs.replace(context.config.connector, name=name, connectors=())
    return replace(context, config=msgspec.structs.replace(context.config, connector=connector))
