"""The p2p connector's driver: its start refuses what its peers could not use; a bug in its machines ends the worker."""

import asyncio
import dataclasses
import logging
from types import SimpleNamespace

import pytest

from connectors.p2p.actions import ControlLost, ControlReceived, OpenPeer, PeerFailed, PeerLost, TransferReport
from connectors.p2p.config import transfer_settings
from connectors.p2p.connector import P2PConnector
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.settings import agent_settings
from connectors.p2p.transport.factory import create_transport
from connectors.p2p.transport.interface import PeerId
from connectors.testing.connector_pair import LAYOUT
from connectors.testing.contexts import connector_context
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.memory_pool import MemoryPool
from core.config_workers import ConnectorSection, WorkerSection
from core.errors import ConfigError, ConnectorUnavailable, EngineDead, PeerUnreachable
from core.machine_driver import TimerDue
from core.wire.kv import LeaseRenew, LeaseState
from core.wire.pairing import STAGING_BYTES


def broken(event, now):
    raise ValueError("a bug")


def never(name, settings):
    raise AssertionError("no transport was expected to be opened")


def context_of(role="prefill", address="tcp://127.0.0.1:0", transports=("shm", "tcp")):
    return connector_context(
        role,
        engine_id="prefill-0",
        incarnation=1,
        connector=ConnectorSection(name="test", transports=transports),
        worker=WorkerSection(control_address=address),
    )


@pytest.fixture
def pool():
    pool = MemoryPool(8, LAYOUT)
    yield pool
    pool.close()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
async def test_wildcard_without_an_advertised_host_is_refused_before_anything_is_open(pool, address):
    connector = P2PConnector(context_of(address=address), never)
    connector.worker.register_kv_caches(pool.region)
    with pytest.raises(ConfigError, match="set it to the host name") as caught:
        await connector.start()
    assert caught.value.param == "worker.advertise_host"
    await connector.stop()


async def test_reader_without_digests_is_refused_if_every_transport_is_verified(pool):
    connector = P2PConnector(context_of(role="decode", transports=("tcp",)), never)
    connector.worker.register_kv_caches(dataclasses.replace(pool.region, new_digester=None))
    with pytest.raises(ConnectorUnavailable, match=r"connector.kv_verify = auto verifies .* over tcp.* set it to identity"):
        await connector.start()
    await connector.stop()


@pytest.mark.parametrize(("role", "usable"), [("decode", ("inproc",)), ("prefill", ("tcp", "inproc"))])
async def test_transport_that_a_reader_without_digests_cannot_verify_is_skipped(pool, role, usable, caplog):
    def create(name, settings):
        transport = InprocTransport(InprocFabric())
        transport.name = name
        return transport

    connector = P2PConnector(context_of(role=role, transports=("tcp", "inproc")), create)
    connector.worker.register_kv_caches(dataclasses.replace(pool.region, new_digester=None))
    await connector.start()
    assert connector.transports == usable
    assert ("kv_transport_skipped" in caplog.text) == (role == "decode")
    await connector.stop()


async def test_shm_on_a_device_whose_memory_the_engine_cannot_share_is_skipped(pool, caplog):
    closed = []

    def create(name, settings):
        transport = create_transport(name, settings)
        close, transport.close = transport.close, lambda: (closed.append(name), close())
        return transport

    connector = P2PConnector(context_of(transports=("shm", "tcp")), create)
    on_device = dataclasses.replace(
        pool.region, buffer=None, memory_fd=None, device="cuda:0", new_copier=lambda: SimpleNamespace(num_slots=2)
    )
    connector.worker.register_kv_caches(on_device)
    await connector.start()
    assert (connector.transports, closed) == (("tcp",), ["shm"])
    assert "kv_transport_skipped transport=shm" in caplog.text
    await connector.stop()


async def test_engine_without_seals_is_refused(pool):
    connector = P2PConnector(context_of(), never)
    connector.worker.register_kv_caches(dataclasses.replace(pool.region, seals=None))
    with pytest.raises(ConnectorUnavailable, match="no seals"):
        await connector.start()
    await connector.stop()


@pytest.mark.parametrize(
    "happen",
    [
        lambda connector: connector.worker.start_load_kv(P2PConnectorMetadata(aborts=["r"])),
        lambda connector: connector.expect(SimpleNamespace(transfer_id="t", control_address="tcp://p:1", incarnation=1)),
        lambda connector: connector.release(["t"]),
        lambda connector: connector.driver.handle(LeaseRenew(transfer_ids=("t",))),
        lambda connector: connector.driver.handle(TimerDue()),
        lambda connector: connector.driver.handle(ControlReceived("tcp://p:1", LeaseState(incarnation=1, left_ms={}))),
        lambda connector: connector.driver.handle(ControlLost("tcp://p:1")),
    ],
    ids=["step", "expect", "release", "question", "timer", "control", "disconnected"],
)
async def test_bug_in_taking_something_in_ends_the_worker(pool, happen):
    connector = P2PConnector(context_of(transports=("inproc",)), lambda name, settings: InprocTransport(InprocFabric()))
    connector.worker.register_kv_caches(pool.region)
    woken = asyncio.Event()
    connector.worker.set_wakeup(woken.set)
    await connector.start()
    for machine in (connector.driver.agent.consumer, connector.driver.agent.producer):
        machine.handlers.update(dict.fromkeys(machine.handlers, broken))
    happen(connector)
    async with asyncio.timeout(20):
        await woken.wait()
    with pytest.raises(EngineDead, match="a bug"):
        connector.worker.get_transfer_results(set())
    await connector.stop()


async def test_transport_that_failed_for_a_peer_or_lost_it_is_reported(pool, caplog):
    caplog.set_level(logging.INFO)
    connector = P2PConnector(context_of(transports=("inproc",)), lambda name, settings: InprocTransport(InprocFabric()))
    connector.worker.register_kv_caches(pool.region)
    await connector.start()
    how = OpenPeer(PeerId("tcp://p:1", 1), "inproc", b"", 1, pool.region.layout)
    connector.driver.handle(TransferReport(PeerFailed(how, PeerUnreachable("permission denied")), 0.0))
    assert "kv_transport_failed" in caplog.text
    assert "permission denied" in caplog.text
    connector.driver.handle(TransferReport(PeerLost(how, PeerUnreachable("the connection broke")), 0.0))
    assert "kv_transport lost=inproc" in caplog.text
    assert "the connection broke" in caplog.text
    await connector.stop()


def test_reads_without_a_wait_for_a_network_are_larger():
    config = ConnectorSection()
    host, device = (
        agent_settings(transfer_settings(config), 100, is_on_device=is_on_device).pull for is_on_device in (False, True)
    )
    assert set(device.max_read_bytes_by) == {"shm", "nixl"}, "tcp goes through host memory, and takes its time over a network"
    assert min(device.max_read_bytes_by.values()) > device.max_read_bytes
    assert set(host.max_read_bytes_by) == {"shm"}, "nixl's copy through the kernel cannot be interrupted"
    assert host.max_read_bytes_by["shm"] > host.max_read_bytes
    assert dataclasses.replace(device, max_read_bytes_by=host.max_read_bytes_by) == host


@pytest.mark.parametrize("is_on_device", [False, True])
def test_reads_in_flight_of_blocks_that_are_converted_fit_the_staging_area_together(is_on_device):
    pull = agent_settings(transfer_settings(ConnectorSection()), 100, is_on_device=is_on_device).pull
    assert pull.max_read_bytes * pull.max_reads_in_flight <= STAGING_BYTES
