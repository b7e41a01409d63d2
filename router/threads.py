"""Work of requests on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from core.errors import Overloaded

T = TypeVar("T")
AnyFuture = TypeVar("AnyFuture", bound="asyncio.Future[Any] | Future[Any]")


def submit(threads: ThreadPoolExecutor | None, work: Callable[[], T]) -> asyncio.Future[T]:
    """Have one of the threads do ``work``; None stands for the event loop's own threads.

    Raises:
        Overloaded: no thread can be started, as at a container's limit of processes; then ``work`` is not done later, either.
    """
    return _submitted(partial(asyncio.get_running_loop().run_in_executor, threads), work)


def submit_job(threads: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
    """As ``submit``, for a caller that must know whether a thread has begun the job when it cancels it."""
    return _submitted(threads.submit, work)


def _submitted(submit: Callable[[Callable[[], T]], AnyFuture], work: Callable[[], T]) -> AnyFuture:
    kept = [work]

    def do_kept() -> T:
        return kept.pop()()

    try:
        return submit(do_kept)
    except RuntimeError as error:
        kept.clear()  # the executor has put it into its queue, for the next thread that it can start
        raise Overloaded(f"no thread is free for this request: {error}: try again later") from None
