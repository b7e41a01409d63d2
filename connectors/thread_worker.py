"""The worker side of a connector with a thread of its own, which carries out the scheduler side's orders in sequence.

``StepOrders`` is the message of a step. The engine thread only queues its orders; the thread does the work, and may wait.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from connectors.async_worker import ReportingWorker, ReportT
from connectors.pool_access import PoolAccess, open_pool
from core.errors import EngineDead
from core.request import KVConnectorMetadata

OrderT = TypeVar("OrderT")


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata, Generic[OrderT]):
    """One engine step's orders to the thread."""

    orders: list[OrderT] = field(default_factory=list)


class ThreadWorker(ReportingWorker[ReportT], Generic[OrderT, ReportT]):
    """``carry_out`` and ``poll`` run on the thread. An error that they raise ends the engine: loads might never end."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the thread of connector {name}")
        self.blocks: PoolAccess  # of the pool, for the thread; there once it has started
        self._orders: queue.SimpleQueue[list[OrderT] | None] = queue.SimpleQueue()  # None = stop
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)

    @abstractmethod
    def carry_out(self, order: OrderT) -> None:
        """Carry out an order, and ``report`` its end now or later."""

    @abstractmethod
    def poll(self) -> float:
        """Do the work that is due without an order; return the seconds until the next poll."""

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Queue the orders of a step.

        Raises:
            EngineDead: the thread was never started, so that no order would be carried out.
        """
        assert isinstance(metadata, StepOrders)
        if not metadata.orders:
            return
        if self._thread.ident is None:
            raise EngineDead(f"{self._name} was not started: call start() of the worker side in Connector.start")
        self._orders.put(metadata.orders)

    def submit(self, order: OrderT) -> None:
        """Let the thread carry out an order that is not the scheduler side's, after those before it. Any thread, at once.

        For the methods of ``Connector``, which must not wait. An order after ``stop`` is never carried out.
        """
        self._orders.put([order])

    def start(self) -> None:
        """Open the pool, which is registered by now, and start the thread.

        Raises:
            ConnectorUnavailable: the pool is on a device, and the engine has no copier for its blocks.
        """
        assert self.pool is not None, "register_kv_caches comes before start"
        self.blocks = open_pool(self.pool)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its queued orders."""
        self._orders.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while True:
                orders: list[OrderT] | None = []
                with suppress(queue.Empty):
                    orders = self._orders.get(timeout=self.poll())
                if orders is None:
                    return
                for order in orders:
                    self.carry_out(order)
        except BaseException as error:  # the thread's main loop: the engine must learn of it
            self.fail(error)
