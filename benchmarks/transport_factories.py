"""How ``benchmarks/transport.py`` makes its transports: in its own process and, loaded by path, in the owners'."""

from __future__ import annotations

from connectors.p2p.transport.factory import TransportSettings, create_transport
from connectors.p2p.transport.interface import Transport
from core.ids import RandomIds


def make(name: str) -> Transport:
    return create_transport(name, TransportSettings(ids=RandomIds(), engine_id="benchmark", bind_address="tcp://127.0.0.1:0"))


def make_shm() -> Transport:
    return make("shm")


def make_nixl() -> Transport:
    return make("nixl")


def make_tcp() -> Transport:
    return make("tcp")
