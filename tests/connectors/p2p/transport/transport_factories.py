"""Makes transports for the suite: in the test's process and, loaded by path, in the processes of owners."""

from connectors.p2p.transport.nixl import NixlTransport
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.tcp import TcpTransport
from core.ids import RandomIds


def make_tcp() -> TcpTransport:
    return TcpTransport(RandomIds(), "tcp://127.0.0.1:0")


def make_shm() -> ShmTransport:
    return ShmTransport(RandomIds())


def make_nixl() -> NixlTransport:
    return NixlTransport(RandomIds(), "test")
