"""Transports that end with their test, and a ZeroMQ context for an owner that a test drives itself."""

from pathlib import Path

import pytest
import zmq

from connectors.p2p.transport.nixl import NixlTransport
from connectors.p2p.transport.tcp_client import TcpTransport
from connectors.testing.transport_owner import HostRows
from connectors.testing.transport_suite import Reader
from core.ids import RandomIds

NUM_OWNER_ROWS = 8


@pytest.fixture(autouse=True, scope="module")
def _owners_find_the_tests_support():
    """A factory is loaded by the owner's process, too, which does not begin in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
        yield


@pytest.fixture
def reader():
    reader = Reader(TcpTransport(RandomIds(), "tcp://127.0.0.1:0"), NUM_OWNER_ROWS)
    yield reader
    reader.close()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def make_nixl():
    """Make NIXL transports of two rows: ``make_nixl(name, *address)``."""
    made = []

    def make(name, *address):
        transport, memory = NixlTransport(RandomIds(), name, *address), HostRows(2, 4096)
        made.append((transport, memory))
        transport.register([memory.region])
        return transport

    yield make
    for transport, memory in made:
        transport.close()
        memory.close()
