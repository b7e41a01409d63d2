"""The client of a request, and the end of what is done for it alone: when it leaves, or when its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
    hold: Hold  # counts memory kept for the request in addition to its body
    trace: TraceContext | None = None  # the client's span
    tenant: int = 0  # names its API key, if keys share the cluster fairly


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Return the result of ``work``, which is cancelled when the client leaves, or after ``timeout_s``. Its body has been read.

    Raises:
        Cancelled: the client has left.
        TimeoutError: the time is over.
    """
    leaving = asyncio.create_task(wait_for_leave(receive))
    try:
        return await unless_left(leaving, work, timeout_s)
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


async def unless_left(leaving: asyncio.Task[None], work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Return the result of ``work``, which is cancelled when ``leaving`` ends. Raises as ``unless_gone``."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait([working, leaving], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("client disconnected") if leaving.done() else TimeoutError
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def wait_for_leave(receive: Receive) -> None:
    """Wait until the client disconnects. The body has been read, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
