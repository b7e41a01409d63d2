"""Reads the workers' socket, and reports when all received messages are handled.

One task receives, so messages are handled in the order of their arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from core.clock import Clock
from core.wire.sockets import AsyncSocket

_FRAMES_PER_TURN = 64  # in a row, before the event loop serves HTTP again


class FrameReader:
    """Passes each message, as its parts, to ``handle``."""

    def __init__(self, socket: AsyncSocket, clock: Clock, handle: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._clock = clock
        self._handle = handle
        self._next_parts: asyncio.Future[list[bytes]] | None = None  # the message that ``run`` awaits or handles

    async def run(self) -> None:
        """Receive and handle messages until cancelled."""
        num_frames = 0
        while True:
            self._next_parts = asyncio.ensure_future(self._socket.recv_multipart())
            self._handle(await self._next_parts)
            num_frames += 1
            if num_frames % _FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)

    async def catch_up(self, limit_s: float) -> None:
        """Return when all received messages are handled, or after ``limit_s``: under load there may always be more."""
        ends_at = self._clock.now() + limit_s
        while self._has_unread and self._clock.now() < ends_at:  # noqa: ASYNC110 - another task reads the socket
            await asyncio.sleep(0)

    @property
    def _has_unread(self) -> bool:
        """True if a received message is not handled yet.

        ZeroMQ signals once that a socket has become readable, and a query takes this signal away from ``run``. ``get`` wakes
        ``run`` if a message can be read. ``poll`` does not, and the message would stay unread until the next one arrives.
        """
        has_taken_one = self._next_parts is not None and self._next_parts.done()
        return has_taken_one or bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)
