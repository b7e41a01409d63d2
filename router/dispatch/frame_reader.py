"""Reads the workers' socket, and says when all that has come is handled.

Owns the order of reading: one task takes messages, so they are handled in the order in which they came.
``router.dispatch.worker_gateway`` gives the socket and handles the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from core.clock import Clock
from core.wire.sockets import AsyncSocket

_FRAMES_PER_TURN = 64  # after so many frames in a row, HTTP gets its turn


class FrameReader:
    """Passes each message, as its parts, to ``handle``."""

    def __init__(self, socket: AsyncSocket, clock: Clock, handle: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._clock = clock
        self._handle = handle
        self._next_parts: asyncio.Future[list[bytes]] | None = None  # what ``run`` waits for, or is handling

    async def run(self) -> None:
        """Read until cancelled. The only place that receives."""
        num_frames = 0
        while True:
            self._next_parts = asyncio.ensure_future(self._socket.recv_multipart())
            self._handle(await self._next_parts)
            num_frames += 1
            if num_frames % _FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)

    async def catch_up(self, limit_s: float) -> None:
        """Return when all that has come is handled; under load, where there may always be more, after ``limit_s``."""
        ends_at = self._clock.now() + limit_s
        while self._has_unread and self._clock.now() < ends_at:  # noqa: ASYNC110 - a socket, which another task reads
            await asyncio.sleep(0)

    @property
    def _has_unread(self) -> bool:
        """Whether a message has come that is not handled.

        ZeroMQ signals that a socket has become readable once, and asking it takes the signal away from ``run``. ``get`` wakes
        ``run`` if there is something to read; ``poll`` does not, and the message would lie unread until the next one.
        """
        has_taken_one = self._next_parts is not None and self._next_parts.done()
        return has_taken_one or bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)
