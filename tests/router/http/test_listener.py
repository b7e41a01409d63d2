"""The router's listening socket where no descriptor is left."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from asyncio import constants

from router.http.connections import ACCEPT_BATCH
from router.http.listener import create_listener


async def test_full_table_costs_one_try_and_plans_one_more_that_serves_whoever_waits(monkeypatch):
    """asyncio would fail, and plan a further series of tries, as often as one callback may accept connections."""
    loop, accept = asyncio.get_running_loop(), socket.socket.accept
    reports, is_full, has_failed, served = [], [True], asyncio.Event(), asyncio.Event()

    def accept_if_room(listening):
        if is_full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    def handle(_loop, context):
        reports.append(context["exception"].errno)
        has_failed.set()

    class Served(asyncio.Protocol):
        def connection_made(self, transport):
            served.set()
            transport.close()

    monkeypatch.setattr(socket.socket, "accept", accept_if_room)
    monkeypatch.setattr(constants, "ACCEPT_RETRY_DELAY", 3600)
    loop.set_exception_handler(handle)
    listening = create_listener("127.0.0.1", 0)
    server = await loop.create_server(Served, sock=listening, backlog=ACCEPT_BATCH)
    with socket.create_connection(listening.getsockname()):
        async with asyncio.timeout(10):
            await has_failed.wait()
            (retry,) = [timer for timer in loop._scheduled if "_start_serving" in repr(timer)]
            assert reports == [errno.EMFILE]
            is_full.clear()
            retry._run()
            retry.cancel()
            await served.wait()
    server.close()
