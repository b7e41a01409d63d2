"""A whole router in one object: the workers' socket, the HTTP server, and the order of start and shutdown.

Owns the listening HTTP socket. Runs inside the caller's event loop, without signal handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator

import msgspec
import uvicorn
from litestar.types import ASGIApp
from prometheus_client import CollectorRegistry

from core.clock import Clock, SystemClock
from core.config_router import RouterSection
from core.descriptors import connections_within
from core.errors import ConfigError
from core.ids import IdSource, RandomIds, new_hex_id
from core.log import event
from core.release import package_version
from core.wire.curve import ClusterKeys
from core.wire.sockets import warn_if_exposed
from core.worker.ops_http import OpsServer
from router.dispatch.worker_gateway import WorkerGateway
from router.http.app import BodyLimits, create_app
from router.http.connections import ClientLimits, HttpConfig, limit_unread_answers
from router.http.endpoints import Endpoints
from router.http.in_flight import InFlight
from router.http.listener import BACKLOG, create_listener
from router.http.probes import ProbeAnswers
from router.http.tls import server_context
from router.images.reader import RequestImageReader
from router.metrics import RouterMetrics
from router.openai.served_model import ServedModel

logger = logging.getLogger(__name__)


class Router:
    """Serves one model at ``config.host:config.port`` to clients and at ``config.worker_address`` to workers.

    Clients request ``model.name``, and workers register with it. With ``keys``, only processes with a cluster key can register.

    Raises:
        ConfigError: the TLS certificate or its key cannot be loaded.
    """

    def __init__(
        self,
        config: RouterSection,
        model: ServedModel,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        registry: CollectorRegistry | None = None,
        keys: ClusterKeys | None = None,
    ) -> None:
        clock, ids = clock or SystemClock(), ids or RandomIds()
        metrics = RouterMetrics(registry or CollectorRegistry())
        self._config = config
        self._model = model
        self._keys = keys
        self.gateway = WorkerGateway(config, model.name, new_hex_id(ids, "router-"), clock, metrics, keys)
        self._images = RequestImageReader(config.images)
        self.endpoints = Endpoints(
            model=model,
            gateway=self.gateway,
            metrics=metrics,
            ids=ids,
            config=config,
            images=self._images,
        )
        limits = BodyLimits(
            max_body_bytes=config.max_body_bytes,
            max_upload_bytes=config.max_upload_bytes,
            max_requests_per_key=config.max_requests_per_key,
            has_fair_shares=config.fair_shares,
        )
        app = create_app(
            self.endpoints,
            version=package_version(),
            api_key=config.api_key,
            limits=limits,
            has_metrics=config.ops_port is None,
            cors_origins=config.cors_origins,
        )
        self.in_flight = InFlight(app)
        self.app: ASGIApp = self.in_flight
        tls = server_context(config.tls_cert, config.tls_key)
        self.http = HttpConfig(self.app, _client_limits(config), metrics.count_cut, tls)
        answers = ProbeAnswers(self.endpoints, package_version())
        ops = OpsServer(answers.routes(), setting="router.ops_port", query_routes=answers.query_routes())
        self._ops = ops if config.ops_port is not None else None
        self.ops_address: str | None = None  # of the probes' port, once it is bound
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        assert self._socket is not None, "the router has not been started"
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def http_address(self) -> str:
        """The base URL for clients."""
        host, scheme = self._config.host, "https" if self._config.tls_cert else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def worker_address(self) -> str:
        """The bound address for workers."""
        return self.gateway.worker_address

    async def start(self) -> None:
        """Bind all sockets and start to serve.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self._socket = _listen(self._config.host, self._config.port, is_shared=self._config.shares_port)
        try:
            if self._ops is not None:
                self.ops_address = await self._ops.start(self._config.ops_host, self._config.ops_port or 0)
            await self.gateway.start()
        except ConfigError:
            await self._close_sockets()
            raise
        if self._keys is None:
            warn_if_exposed("router.worker_address", self.worker_address)
        limit_unread_answers(self._socket, self._config.send_timeout_s)
        self._server = _Server(self.http)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        is_up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((is_up, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if not is_up.done():  # serving has failed, as for want of a descriptor
            is_up.cancel()
            await self.gateway.stop()
            await self._close_sockets()
            self._serving.result()
        self._socket.listen(BACKLOG)  # uvicorn has set the queue to what one callback accepts
        sampling = msgspec.structs.asdict(self._model.defaults)
        logger.info(
            event("router_started", http=self.http_address, workers=self.worker_address, model=self._model.name, **sampling)
        )
        if self.ops_address is not None:
            logger.info(event("ops_port_open", address=self.ops_address))

    async def drain(self) -> None:
        """Call ``stop`` with the configured time for requests in flight."""
        await self.stop(self._config.drain_timeout_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait up to ``grace_s`` for those in flight, fail the rest, and close. Idempotent.

        What is left of that time is for clients that still read. Answers that begin from now on
        end their connections.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + grace_s
        self.endpoints.is_closing = True
        if self._config.shares_port and self._server is not None:
            self._server.stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.in_flight.drain()
        serving, self._serving = self._serving, None
        await self.gateway.stop()
        if self._server is not None and serving is not None:
            self.http.timeout_graceful_shutdown = max(1, math.ceil(ends_at - loop.time()))
            self._server.should_exit = True
            await serving
            logger.info(event("router_stopped"))
        await self._images.close()
        self.endpoints.close()
        await self._close_sockets()

    async def _close_sockets(self) -> None:
        if self._ops is not None:
            await self._ops.stop()
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which the entry point installs, and with an event for the start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and set the event."""
        await super().startup(sockets)
        self.is_up.set()

    def stop_listening(self) -> None:
        """Accept no more connections: the other processes that listen at this port get them."""
        for server in self.servers:
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _client_limits(config: RouterSection) -> ClientLimits:
    return ClientLimits(
        max_connections=connections_within(config.max_connections, "router.max_connections"),
        receive_timeout_s=config.receive_timeout_s,
        send_timeout_s=config.send_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        max_head_bytes=config.max_head_bytes,
        max_connections_per_address=config.max_connections_per_address,
        proxies=config.proxy_addresses,
    )


def _listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return the socket of ``create_listener``, which sends without delay.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        listening = create_listener(host, port, is_shared=is_shared)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", param="router.port") from None
    # asyncio sets it only for sockets of its own. Without it a token waits until the client's kernel acknowledges
    # the one before: 40 ms on most systems.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    return listening
