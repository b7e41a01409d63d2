"""Pairs of connectors for test classes to derive from, and what must hold after a load.

``connector_suite`` and ``early_suite`` have the tests. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import pytest_asyncio

from connectors.testing.connector_pair import BLOCK_SIZE, PROMPT, Pair, Side
from connectors.testing.delayed_device import DelayedDevice
from core.connector import Connector
from core.kv.spec import ceil_div
from core.wire.messages import Role

ROLES: tuple[Role, Role] = ("prefill", "decode")
PATIENCE_S = 30.0  # of loads that should succeed
IMPATIENCE_S = 2.0  # of loads that should fail for want of an answer
PROMPT_BLOCKS = ceil_div(len(PROMPT), BLOCK_SIZE)


class ConnectorPairs:
    """Pairs of connectors, and what must hold after a load.

    ``copies_from_devices`` is False for a connector that does without ``connectors.pool_access`` and copiers: what a device
    does by itself is tested on a device.
    """

    copies_from_devices: ClassVar[bool] = True

    @abstractmethod
    def make_connector(self, role: Role, patience_s: float) -> Connector:
        """Return a new connector that is not started. A load in which nothing happens for ``patience_s`` must fail."""

    def num_loading_blocks(self, connector: Connector) -> int:
        """Return how many blocks a transfer may still write, if the connector can tell."""
        return 0

    @asynccontextmanager
    async def started_pair(self, patience_s: float = PATIENCE_S, *, beside_device: bool = False) -> AsyncIterator[Pair]:
        """Start both sides; stop them in the end, in any state. ``beside_device``: both pools are on devices."""
        devices = [DelayedDevice(seed=1) if beside_device else None for _ in ROLES]
        sides = [Side(role, self.make_connector(role, patience_s), device) for role, device in zip(ROLES, devices, strict=True)]
        try:
            for side in sides:
                await side.connector.start()
            yield Pair(*sides)
        finally:
            for side in reversed(sides):
                await side.close()

    @pytest_asyncio.fixture
    async def pair(self) -> AsyncIterator[Pair]:
        """Return a pair whose loads have time."""
        async with self.started_pair() as pair:
            yield pair

    @pytest_asyncio.fixture(params=["host", "device"])
    async def either_pair(self, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
        """Return a pair with pools in host memory, or on devices that copy when they like to."""
        beside_device = request.param == "device"
        if beside_device and not self.copies_from_devices:
            pytest.skip("the connector does not copy by a copier of the engine")
        async with self.started_pair(beside_device=beside_device) as pair:
            yield pair

    @pytest_asyncio.fixture
    async def impatient(self) -> AsyncIterator[Pair]:
        """Return a pair whose loads time out soon."""
        async with self.started_pair(IMPATIENCE_S) as pair:
            yield pair

    async def assert_consumer_is_empty(self, pair: Pair) -> None:
        """Wait for the end of quarantine, and check that neither blocks nor transfers are left."""
        consumer = pair.consumer
        await consumer.engine.until(lambda: not (consumer.engine.quarantined or consumer.connector.num_saving_blocks()))
        assert pair.consumer.engine.num_used_blocks == 0
        assert self.num_loading_blocks(pair.consumer.connector) == 0

    async def assert_ended_once(self, pair: Pair, request_id: str) -> None:
        """Check that the load is reported only once; the engine refuses a second end by itself."""
        for _ in range(5):
            await asyncio.sleep(0)
            output = pair.consumer.engine.step()
            assert request_id not in output.failed_recving
            assert request_id not in output.finished_recving

    async def assert_failed(self, pair: Pair, request_id: str, prompt: Sequence[int] = PROMPT) -> None:
        """Check that a load failed, was reported once, and left neither blocks nor cached content."""
        engine = pair.consumer.engine
        error = engine.loads[request_id].error
        assert error is not None
        assert error.code
        assert error.message
        usage = engine.loads[request_id].usage
        assert usage is not None, "a failed load has its costs too"
        assert usage.transferred_tokens == usage.verified_blocks == 0
        await self.assert_ended_once(pair, request_id)
        await self.assert_consumer_is_empty(pair)
        again = engine.add("again", list(prompt), None)
        assert engine.manager.get_computed_blocks(again)[1] == 0, "blocks of a failed load are in the prefix cache"
