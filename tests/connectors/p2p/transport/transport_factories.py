"""Makes transports for the suite: in the test's process and, loaded by path, in the processes of owners."""

from connectors.p2p.transport.nixl import NixlTransport
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.tcp_client import TcpTransport
from core.ids import RandomIds
from core.wire.curve import derive_keys


def make_tcp() -> TcpTransport:
    return TcpTransport(RandomIds(), "tcp://127.0.0.1:0")


def make_tcp_with_key() -> TcpTransport:
    return TcpTransport(RandomIds(), "tcp://127.0.0.1:0", keys=derive_keys("the same key in the test and in its owners"))


def make_shm() -> ShmTransport:
    return ShmTransport(RandomIds())


def make_nixl() -> NixlTransport:
    return NixlTransport(RandomIds(), "test")
