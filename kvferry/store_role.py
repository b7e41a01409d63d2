"""The process of ``kvferry kvstore``: a store server, its operations port, and a graceful end.

Owns what a process has once: signals and the event loop of the operations port. The store has its own thread
(``kvstore.server``); if a bug ends that thread, the process ends with exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.descriptors import report_full_table
from core.ids import RandomIds
from core.log import event
from core.process_signals import handled_signals
from core.wire.curve import ClusterKeys
from core.worker.ops_http import OpsResponse, OpsServer
from kvstore.build import machine_options, make_tiers
from kvstore.metrics import register_store_metrics
from kvstore.server import StoreServer

_log = logging.getLogger(__name__)


def run_store(
    config: KVStoreSection, announce: Callable[[Mapping[str, str]], None] | None = None, keys: ClusterKeys | None = None
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; returns the exit code. ``announce`` gets ``store_address`` and ``ops_address``.

    Raises:
        ConfigError: an address cannot be bound, or the folder of the disk tier cannot be used.
        ConnectorUnavailable: the library for Redis is missing.
    """
    return asyncio.run(_run(config, announce, keys))


async def _run(config: KVStoreSection, announce: Callable[[Mapping[str, str]], None] | None, keys: ClusterKeys | None) -> int:
    loop, must_stop = asyncio.get_running_loop(), asyncio.Event()
    report_full_table(loop)
    with handled_signals(loop, must_stop.set):
        return await _serve(config, announce, keys, must_stop)


async def _serve(
    config: KVStoreSection,
    announce: Callable[[Mapping[str, str]], None] | None,
    keys: ClusterKeys | None,
    must_stop: asyncio.Event,
) -> int:
    loop, ids = asyncio.get_running_loop(), RandomIds()

    def on_death(_: BaseException) -> None:
        loop.call_soon_threadsafe(must_stop.set)

    server = StoreServer(
        machine_options(config, ids),
        make_tiers(config, ids),
        SystemClock(),
        on_death,
        keys,
    )
    ops = OpsServer(store_routes(server), setting="kvstore.ops_port")
    try:
        if config.block_bytes:
            server.machine.prepare(config.block_bytes)  # errors in the settings end the process here, not at the first client
        addresses = {"store_address": server.start(config.bind_address)}
        addresses["ops_address"] = await ops.start(config.ops_host, config.ops_port)
        _log.info(event("kvstore_serving", incarnation=f"{server.machine.incarnation:016x}", **addresses))
        if announce is not None:
            announce(addresses)
        await must_stop.wait()
        exit_code = 0 if server.is_serving else 1
    finally:
        await ops.stop()
        await asyncio.to_thread(server.stop)
    return exit_code


def store_routes(server: StoreServer) -> dict[tuple[str, str], Callable[[], OpsResponse]]:
    """Return what a store's operations port answers. One that is too small for its clients is alive, and not ready."""
    registry = CollectorRegistry()
    register_store_metrics(registry, server.machine, server.workers)

    def health() -> OpsResponse:
        state = {"is_serving": server.is_serving, "clients": server.machine.num_clients}
        return OpsResponse.of_json(200 if server.is_serving else 503, state)

    def ready() -> OpsResponse:
        refusal = server.machine.refusal
        if not refusal:
            return health()
        return OpsResponse.of_json(503, {"is_serving": False, "clients": server.machine.num_clients, "reason": refusal})

    def metrics() -> OpsResponse:
        return OpsResponse(200, generate_latest(registry), CONTENT_TYPE_LATEST)

    return {("GET", "/health"): health, ("GET", "/ready"): ready, ("GET", "/metrics"): metrics}
