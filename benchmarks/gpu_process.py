"""Another process on the same device, and the pipe to it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120.0


@contextmanager
def other_process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run ``target(pipe, *arguments)``, which ends when this end of its pipe is closed; one that does not is killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


def receive(pipe: Connection) -> Any:  # noqa: ANN401
    """Return what the other process sends next. Raises: RuntimeError if nothing comes, or it has died."""
    if not pipe.poll(TIMEOUT_S):
        raise RuntimeError(f"the other process does not answer in {TIMEOUT_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("the other process has died") from None
