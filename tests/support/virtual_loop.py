"""An asyncio event loop in virtual time, without I/O and without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from core.testing.clock import FakeClock

_TURNS = 50  # of the loop, until nothing goes on without an event; more than any chain of coroutines needs


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is that of ``clock``. What coroutines give to threads runs at once.

    What they give to an executor of their own waits in ``jobs``, until the test sets the result of the job's future; while
    ``holds_threads`` is set, so does everything else.
    """

    def __init__(self, clock: FakeClock) -> None:
        self._virtual = clock
        self.jobs: list[tuple[tuple[object, ...], asyncio.Future[Any]]] = []
        self.holds_threads = False
        super().__init__()

    def time(self) -> float:
        return self._virtual.now()

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()
        if executor is not None or self.holds_threads:
            self.jobs.append((args, future))
            return future
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def settle(self) -> None:
        """Run what is due now, and what follows from it."""

        async def turn() -> None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)

        self.run_until_complete(turn())
