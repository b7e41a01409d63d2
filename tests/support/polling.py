"""Waits for what other threads or processes do, by looking again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 30.0
_PAUSE_S = 0.005


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition is true.

    Raises:
        TimeoutError: it is not within ``WAIT_S``.
    """
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  polls state of other threads
            await asyncio.sleep(_PAUSE_S)


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Return once the condition is true; for callers without an event loop, or that must not let theirs run.

    Raises:
        TimeoutError: it is not within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not true within {timeout_s:g} s: {condition}")
        time.sleep(_PAUSE_S)
