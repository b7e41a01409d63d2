"""A reader whose process has no more file descriptors loses loads, and not its life: libzmq must have nothing to abort for."""

import pytest

from tests.support.descriptors import run_program

FIRST_HANDOFF = """
import asyncio, contextlib, sys

import zmq
from prometheus_client import CollectorRegistry

from connectors.p2p.actions import HandoffRef, PullRequest, row_units
from connectors.p2p.connector import P2PConnector
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.transport.factory import create_transport
from connectors.p2p.transport.interface import PeerId, regions_of
from connectors.p2p.transport.tcp_client import TcpTransport
from connectors.testing.connector_pair import LAYOUT
from connectors.testing.contexts import connector_context
from connectors.testing.memory_pool import MemoryPool
from core.config_workers import ConnectorSection
from core.ids import RandomIds
from core.kv.seals import ExpectedSeal
from tests.support.descriptors import leave_descriptors

PEER = PeerId("tcp://127.0.0.1:1", 1)


async def main():
    woken, transports = asyncio.Event(), []

    def create(name, settings):
        transports.append(create_transport(name, settings))
        return transports[-1]

    section = ConnectorSection(transports=("tcp",), handshake_timeout_s=1000.0)
    context = connector_context("decode", incarnation=1, connector=section, metrics=CollectorRegistry())
    connector = P2PConnector(context, create)
    pool = MemoryPool(8, LAYOUT)
    connector.worker.register_kv_caches(pool.region)
    connector.worker.set_wakeup(woken.set)
    await connector.start()
    units = row_units(range(3), range(3), [ExpectedSeal(1, 0, bytes(16), 32)] * 3)
    pull = PullRequest("r/0", HandoffRef("t", PEER), units, 96)
    owner = TcpTransport(RandomIds(), "tcp://127.0.0.1:0")
    owner.register(regions_of(pool.region))
    metadata = owner.describe()

    leave_descriptors(int(sys.argv[1]))
    connector.worker.start_load_kv(P2PConnectorMetadata(pulls=[pull]))
    await woken.wait()
    (error,) = connector.worker.get_transfer_results(set()).failed_recving.values()
    with contextlib.suppress(zmq.ZMQError):
        transports[0].add_peer(PEER, metadata)
    await connector.stop()
    print(error.code, error.message)


asyncio.run(main())
"""


CONTROL = """
import asyncio
from connectors.p2p.control import ControlClients, ControlServer
from core.wire.contexts import started_context
from core.wire.kv import LeaseRenew, LeaseState
from core.wire.sockets import AsyncContext
from tests.support.descriptors import leave_none


async def main():
    context, answered, lost = started_context(AsyncContext), asyncio.Event(), asyncio.Event()
    owner = ControlServer(context, lambda message: LeaseState(incarnation=5, left_ms={}), print)
    address = owner.start("tcp://127.0.0.1:0")
    clients = ControlClients(context, lambda *_: answered.set(), lambda _: lost.set(), print)
    clients.send(address, LeaseRenew(transfer_ids=("t",)))
    await answered.wait()
    leave_none()
    await owner.stop()
    await lost.wait()
    await clients.stop()
    context.destroy(linger=0)


asyncio.run(main())
"""
DATA = """
import numpy as np, zmq
from connectors.p2p.transport.interface import PeerId
from connectors.p2p.transport.tcp_client import TcpTransport
from connectors.testing.transport_owner import HostRegions
from core.ids import RandomIds
from tests.support.descriptors import leave_none

PEER = PeerId("tcp://127.0.0.1:1", 1)
owner, reader = (TcpTransport(RandomIds(), "tcp://127.0.0.1:0") for _ in range(2))
for transport in (owner, reader):
    transport.register(HostRegions(8, 1024).regions)
reader.add_peer(PEER, owner.describe())
reader.post_read(PEER, 0, [1], [1])
while not reader.poll():
    owner.poll()
leave_none()
owner.close()
while not reader.take_lost_peers():
    reader.poll()
reader.close()
"""


@pytest.mark.parametrize("program", [CONTROL, DATA], ids=["control", "data"])
def test_loss_of_a_peer_without_descriptors_does_not_end_the_process(program):
    ended = run_program(program)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


@pytest.mark.parametrize("num_free", range(4))
def test_first_handoff_without_descriptors_costs_the_load_and_not_the_process(num_free):
    ended = run_program(FIRST_HANDOFF, num_free)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("peer_lost"), ended.stderr


def test_handoff_that_cannot_even_ask_ends_at_once_and_says_why():
    ended = run_program(FIRST_HANDOFF, 0)
    reason = "the handshake with tcp://127.0.0.1:1 could not be sent: Too many open files"
    assert ended.stdout == f"peer_lost {reason}\n", ended.stderr
