"""The client of a request, and the end of what is done for it alone: when it leaves, or when its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from litestar.types import Receive

from core.errors import Cancelled
from core.tracing import TraceContext
from router.images.reader import Hold

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client's side of a request: its id, its connection, its trace."""

    client_id: str
    receive: Receive
    arrival: float  # when its body had come, seconds of the router's clock
    paused_s: float  # how long the router had paused by then
    hold: Hold  # counts memory kept for the request in addition to its body
    trace: TraceContext | None = None  # the client's span
    tenant: int = 0  # names its API key, if keys share the cluster fairly


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], left_s: Callable[[], float] | None = None) -> T:
    """Return the result of ``work``, which is cancelled when the client leaves, or when its time is over. Its body was read.

    ``left_s`` tells how many seconds are left. It is asked again at their end, because they may have been extended.

    Raises:
        Cancelled: the client has left.
        TimeoutError: the time is over.
    """
    leaving = asyncio.create_task(wait_for_leave(receive))
    try:
        return await unless_left(leaving, work, left_s)
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


async def unless_left(
    leaving: asyncio.Task[None], work: Coroutine[Any, Any, T], left_s: Callable[[], float] | None = None
) -> T:
    """Return the result of ``work``, which is cancelled when ``leaving`` ends. Raises as ``unless_gone``."""
    working = asyncio.create_task(work)
    try:
        timeout_s = left_s() if left_s is not None else None
        while timeout_s is None or timeout_s > 0:
            await asyncio.wait([working, leaving], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if leaving.done():
                raise Cancelled("client disconnected")
            timeout_s = left_s() if left_s is not None else None
        raise TimeoutError
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        del working  # with an error it is in a ring: the task holds the error, and by its traceback the error this frame


async def wait_for_leave(receive: Receive) -> None:
    """Wait until the client disconnects. The body has been read, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
