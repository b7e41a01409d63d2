"""Work of requests on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from core.errors import Overloaded

T = TypeVar("T")


def submit(threads: ThreadPoolExecutor | None, work: Callable[[], T]) -> asyncio.Future[T]:
    """Have one of the threads do ``work``; None stands for the event loop's own threads.

    Raises:
        Overloaded: no thread can be started, as at a container's limit of processes; then ``work`` is not done later, either.
    """
    kept = [work]

    def do_kept() -> T:
        return kept.pop()()

    try:
        return asyncio.get_running_loop().run_in_executor(threads, do_kept)
    except RuntimeError as error:
        kept.clear()  # the executor has put it into its queue, for the next thread that it can start
        raise Overloaded(f"no thread is free for this request: {error}: try again later") from None
