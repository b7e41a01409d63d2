"""Turns of fetches from other hosts: so many at a time, and not all of them for one host.

Owns the waits for a turn. Knows no URLs: a host is a name here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from core.errors import Overloaded


class FetchTurns:
    """At most ``max_fetches`` turns at a time, of which one host leaves a quarter to others, at least one if there are two.

    ``wait_s`` bounds a wait.
    """

    def __init__(self, max_fetches: int, wait_s: float) -> None:
        self._wait_s = wait_s
        self._max_of_host = max(1, max_fetches * 3 // 4)
        self._all = asyncio.Semaphore(max_fetches)
        self._of_hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while one has or awaits a turn

    @asynccontextmanager
    async def take(self, host: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            Overloaded: no turn was free in time.
        """
        of_host = self._of_hosts.setdefault(host, asyncio.Semaphore(self._max_of_host))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._wait_s):
                    await held.enter_async_context(of_host)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                raise Overloaded("too many images are being fetched at the moment: try again later") from None
            yield
