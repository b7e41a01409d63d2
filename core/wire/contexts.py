"""ZeroMQ contexts whose threads run from the first moment.

libzmq starts a context's threads with its first socket, and aborts the process if they find no file descriptor. A socket that
cannot be made later is an error that costs one message or one peer.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import zmq

from core.descriptors import is_full_table, too_few_descriptors

# Of the context itself, its reaper, its I/O thread and the socket that starts them: 6. A pipe has two.
_NEEDED_PIPES = 4

AnyContext = TypeVar("AnyContext", bound="zmq.Context[Any]")


def started_context(kind: type[AnyContext]) -> AnyContext:
    """Return a new context with its threads running. Call it before the process serves.

    Raises:
        ConfigError: too few descriptors are free.
    """
    try:
        _check_free_descriptors()
        context = kind()
        context.socket(zmq.PAIR, socket_class=zmq.Socket).close(linger=0)
    except (OSError, zmq.ZMQError) as error:
        if not is_full_table(error):
            raise
        raise too_few_descriptors(error) from None
    return context


def _check_free_descriptors() -> None:
    """Raise OSError if there is no room for what a context needs."""
    opened: list[int] = []
    try:
        for _ in range(_NEEDED_PIPES):
            opened += os.pipe()
    finally:
        for descriptor in opened:
            os.close(descriptor)
