"""Transports by name, and which of them work here.

A transport that cannot run here is skipped with a log line; none at all is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from connectors.p2p.transport.interface import RowRegion, Transport
from connectors.p2p.transport.nixl import NixlTransport
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.tcp_client import TcpTransport
from core.errors import ConfigError, ConnectorUnavailable
from core.ids import IdSource
from core.log import event
from core.wire.curve import ClusterKeys

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """A worker's settings for its transports."""

    ids: IdSource
    engine_id: str
    bind_address: str  # of data sockets; port 0 = any
    advertise_host: str = ""
    keys: ClusterKeys | None = None  # for sockets of our own


TransportFactory = Callable[[str, TransportSettings], Transport]


@dataclass(slots=True)
class TransportSet:
    """The transports that work here, in order of preference, and the metadata of the serving ones for consumers."""

    transports: dict[str, Transport] = field(default_factory=dict)
    offers: dict[str, bytes] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # name → why


def create_transport(name: str, settings: TransportSettings) -> Transport:
    """Return a new transport.

    Raises:
        ConfigError: no transport has this name.
    """
    match name:
        case "shm":
            return ShmTransport(settings.ids)
        case "tcp":
            return TcpTransport(settings.ids, settings.bind_address, settings.advertise_host, settings.keys)
        case "nixl":
            return NixlTransport(settings.ids, settings.engine_id, settings.bind_address)
    raise ConfigError(f"connector.transports: {name!r} is not one of shm, nixl, tcp", param="connector.transports")


def open_transports(
    names: Iterable[str],
    regions: Sequence[RowRegion],
    settings: TransportSettings,
    is_producer: bool,
    create: TransportFactory,
    staging: RowRegion | None = None,
) -> TransportSet:
    """Create every transport, register the regions with it and, for a producer, start to serve; keep those that work here.

    ``staging`` is the memory for blocks of another size, on a worker that reads.

    Raises:
        ConfigError: an unknown name.
        ConnectorUnavailable: none works; the message says why for each.
    """
    found = TransportSet()
    with ExitStack() as on_failure:
        for name in names:
            transport = create(name, settings)
            on_failure.callback(transport.close)
            try:
                _register(transport, regions, staging)
                found.offers |= {name: transport.describe()} if is_producer else {}
            except ConnectorUnavailable as error:
                transport.close()
                found.skipped[name] = error.message
                _log.warning(event("kv_transport_skipped", transport=name, reason=error.message))
                continue
            found.transports[name] = transport
        on_failure.pop_all()
    if not found.transports:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.skipped.items()) or "none is configured"
        raise ConnectorUnavailable(f"no KV transport works here: {reasons}")
    return found


def _register(transport: Transport, regions: Sequence[RowRegion], staging: RowRegion | None) -> None:
    reason = transport.unavailable_reason()
    if reason is not None:
        raise ConnectorUnavailable(reason)
    transport.register(regions, staging)
