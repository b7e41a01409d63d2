"""Steps of an engine in an event loop, with sleeps between them as in a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def step_until(
    condition: Callable[[], bool],
    step: Callable[[], object],
    woken: asyncio.Event,
    has_work: Callable[[], bool] = lambda: False,
    timeout_s: float = 20.0,
) -> None:
    """Step until the condition holds; after a step, sleep until ``woken`` is set unless there is work.

    Raises:
        TimeoutError: the condition does not hold after ``timeout_s``.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            woken.clear()
            step()
            if condition():
                return
            if not has_work():
                await woken.wait()


def call_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back in the event loop, from any thread; do nothing once the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
