"""A prefill and a decode worker without a model, with two connectors of one process, for ``connector_suite``.

Real blocks in random order, real memory of known content, and the calls of the scheduler and the runner in their order. Knows
no connector; it fails only on errors that the engine itself refuses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.delayed_device import DelayedDevice
from connectors.testing.memory_pool import small_layout
from connectors.testing.scattered_blocks import scatter_blocks
from core.connector import Connector
from core.request import KVConnectorOutput, Request
from core.wire.kv import KVHandoff
from core.wire.messages import Role

# of a load: nobody has asked the producer yet, turns of the event loop after it was asked and the load has started, a change
Moment = int | Literal["no bytes", "first bytes"]

FINGERPRINT = b"conformance"
LAYOUT = small_layout(block_size=32)
BLOCK_SIZE = LAYOUT.block_size
NUM_BLOCKS = 64
INCARNATIONS: dict[Role, int] = {"prefill": 11, "decode": 12}
UNTOUCHED = 0xA5
OVERWRITTEN = 0x5C
PROMPT = list(range(100, 200))  # three full blocks and a part of one
_LOOKS, _LOOK_S = 10_000, 0.0005  # for the first bytes of a load


class Side:
    """A connector and an engine without a model. It takes blocks in random order, its memory has a known content.

    With a device the connector sees a pool that is there. With ``overwrites_freed_blocks``, blocks that are no longer kept for
    a reader are overwritten in the same step.
    """

    def __init__(self, role: Role, connector: Connector, device: DelayedDevice | None = None) -> None:
        self.connector = connector
        self.engine = ConnectorEngine(
            connector.scheduler,
            connector.worker,
            FINGERPRINT,
            LAYOUT,
            NUM_BLOCKS,
            INCARNATIONS[role],
            show_pool=device.holding if device is not None else None,
        )
        self.engine.checks_content = True
        self.engine.pool.rows[:] = UNTOUCHED
        scatter_blocks(self.engine.manager.block_pool, role)
        self.overwrites_freed_blocks = False
        self._step, self.engine.step = self.engine.step, self._step_and_overwrite  # type: ignore[method-assign]

    def block_ids(self, request: Request) -> list[int]:
        """Return the blocks of a request, in table order."""
        return self.engine.manager.get_block_ids(request.request_id)[0]

    def untouched_rows(self) -> set[int]:
        """Return the blocks that still have their initial content."""
        return {row for row, content in enumerate(self.engine.pool.rows) if (content == UNTOUCHED).all()}

    def _step_and_overwrite(self) -> KVConnectorOutput:
        output = self._step()
        if self.overwrites_freed_blocks and output.finished_sending:
            self._overwrite_free_blocks()
        return output

    def _overwrite_free_blocks(self) -> None:
        """Let another request take all blocks that are free, fill them and free them again."""
        pool = self.engine.manager.block_pool
        blocks = pool.get_new_blocks(pool.num_free_blocks)
        self.engine.pool.rows[[block.block_id for block in blocks]] = OVERWRITTEN
        pool.free_blocks(blocks)

    async def settle(self) -> None:
        """Step until the connector has no message for its worker side."""
        await self.engine.until(lambda: not self.connector.scheduler.has_pending_push_work())

    async def close(self) -> None:
        """Stop the connector, then close the memory."""
        await self.connector.stop()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker."""

    producer: Side
    consumer: Side

    def load(self, request_id: str, prompt: list[int], handoff: KVHandoff | None) -> Request:
        """Add and admit a request of the consumer."""
        request = self.consumer.engine.add(request_id, prompt, handoff)
        self.consumer.engine.admit(request)
        return request

    async def load_until(self, moment: Moment, request_id: str, prompt: list[int]) -> Request:
        """Compute a prompt, start its load, and let it come as far as ``moment``: as a rule into the middle of its bytes.

        The producer has its orders by then, unless "no bytes" are to come. The first bytes are not waited for once the
        connector has something to report: it may write in a step.
        """
        request = self.load(request_id, prompt, self.producer.engine.prefill(request_id, prompt))
        engine, rows = self.consumer.engine, sorted(self.consumer.block_ids(request))
        before = engine.pool.rows[rows]
        if moment != "no bytes":
            await self.producer.settle()
        engine.is_woken = False
        engine.step()
        if moment != "first bytes":
            for _ in range(moment if isinstance(moment, int) else 0):
                await asyncio.sleep(0)
            return request
        for _ in range(_LOOKS):
            if engine.is_woken or (engine.pool.rows[rows] != before).any():
                break
            self.producer.engine.step()
            await asyncio.sleep(_LOOK_S)
        return request

    async def ended(self, *request_ids: str) -> None:
        """Wait for the ends of these loads, and until the consumer has reported all that follows from them."""
        await self.producer.settle()  # it may have to write first
        loads = self.consumer.engine.loads
        try:
            await self.consumer.engine.until(lambda: all(loads[request_id].is_ended for request_id in request_ids))
        except TimeoutError:
            self.producer.engine.step()  # if it has died, its error is the reason
            raise
        await self.consumer.settle()

    async def drained(self) -> None:
        """Wait until the producer keeps nothing for readers, and check that it holds nothing else."""
        await self.consumer.settle()
        producer = self.producer
        await producer.engine.until(lambda: not (producer.engine.parked or producer.connector.num_saving_blocks()))
        assert self.producer.engine.num_used_blocks == 0
        assert self.producer.connector.num_leased_blocks() == 0

    async def make_handoff(self, request_id: str, prompt: list[int]) -> Request:
        """Compute a prompt here, load it there, and return the running request."""
        request = self.load(request_id, prompt, self.producer.engine.prefill(request_id, prompt))
        await self.ended(request_id)
        assert self.consumer.engine.loads[request_id].error is None
        return request
