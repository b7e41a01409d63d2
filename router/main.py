"""The router's process: model files, signals, and a graceful end.

Owns the event loop and the signal handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from core.clock import SystemClock
from core.config import KVFerryConfig
from core.descriptors import raise_descriptor_limit, report_full_table
from core.gc_freeze import ShortCollections, freeze_loaded_objects
from core.model.hub import resolve_model
from core.process_signals import handled_signals
from core.tracing import open_tracer
from core.wire.key_rotation import keys_of
from router.http.server import Router
from router.openai.served_model import served_model

_LOOK_EVERY_S = 30.0


def run(config: KVFerryConfig, announce: Callable[[Mapping[str, str]], None] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; a second one of the first two stops at once. Returns the exit code, 1 after a bug.

    ``announce`` receives the bound ``http_address`` and ``worker_address``, and ``ops_address`` if there is one.

    Raises:
        ConfigError: the model cannot be found or used, or an address cannot be bound.
    """
    raise_descriptor_limit(config.router.max_connections)
    files = resolve_model(config.model.name, Path(config.model.cache_dir), needs_weights=False)
    keys = keys_of(config.security)
    clock = SystemClock()
    router = Router(config.router, served_model(config.model, files), clock=clock, keys=keys)
    tracer = open_tracer(config.tracing, "router", router.gateway.core.membership.welcome.router_id, clock)
    if tracer is None:
        return asyncio.run(_serve(router, announce))
    router.gateway.trace_with(tracer)
    try:
        return asyncio.run(_serve(router, announce))
    finally:
        tracer.close()


async def _serve(router: Router, announce: Callable[[Mapping[str, str]], None] | None) -> int:
    must_stop, must_hurry = asyncio.Event(), asyncio.Event()
    report_full_table(asyncio.get_running_loop())

    def on_signal() -> None:
        (must_hurry if must_stop.is_set() else must_stop).set()

    with handled_signals(asyncio.get_running_loop(), on_signal), ShortCollections() as collections:
        looking = asyncio.create_task(_look_for_garbage(router, collections))
        try:
            return await _serve_until(router, announce, must_stop, must_hurry)
        finally:
            looking.cancel()


async def _look_for_garbage(router: Router, collections: ShortCollections) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        collections.look(router.in_flight.num_open)


async def _serve_until(
    router: Router, announce: Callable[[Mapping[str, str]], None] | None, must_stop: asyncio.Event, must_hurry: asyncio.Event
) -> int:
    await router.start()
    freeze_loaded_objects()
    if announce is not None:
        ops = {} if router.ops_address is None else {"ops_address": router.ops_address}
        announce({"http_address": router.http_address, "worker_address": router.worker_address, **ops})
    dying, leaving = asyncio.create_task(router.gateway.wait_dead()), asyncio.create_task(must_stop.wait())
    await asyncio.wait((dying, leaving), return_when=asyncio.FIRST_COMPLETED)
    for waiting in (dying, leaving):
        waiting.cancel()
    if not must_stop.is_set():
        await router.stop()
        return 1
    stopping = asyncio.create_task(router.drain())
    hurrying = asyncio.create_task(must_hurry.wait())
    await asyncio.wait((stopping, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not stopping.done():
        stopping.cancel()
        await router.stop()
    else:
        stopping.result()
    return 0
