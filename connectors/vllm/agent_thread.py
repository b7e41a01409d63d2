"""A thread with an event loop for one p2p agent: vLLM's workers have no loop of their own.

The agent answers readers, renews leases and moves bytes while the engine computes or sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

from connectors.p2p.driver import P2PDriver
from core.kv.pool_region import KVPoolRegion
from core.log import event

START_TIMEOUT_S = 60.0  # the first import of a transport's library, and its agent
STOP_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class AgentThread:
    """Runs a driver until ``stop``."""

    def __init__(self, driver: P2PDriver) -> None:
        self.driver = driver
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvferry-agent", daemon=True)

    def start(self, pool: KVPoolRegion) -> None:
        """Start the thread and the driver; return when peers can connect.

        Raises: what ``P2PDriver.start`` raises, and TimeoutError.
        """
        self._thread.start()
        started: Future[None] = asyncio.run_coroutine_threadsafe(self.driver.start(pool), self._loop)
        started.result(START_TIMEOUT_S)

    def stop(self) -> None:
        """Stop the driver and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        stopped: Future[None] = asyncio.run_coroutine_threadsafe(self.driver.stop(), self._loop)
        try:
            stopped.result(STOP_TIMEOUT_S)
        except Exception as error:  # the process ends anyway
            _log.warning(event("agent_stop_failed", error=repr(error)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
