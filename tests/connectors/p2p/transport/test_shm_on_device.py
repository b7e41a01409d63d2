"""Shared memory on a device: on a GPU, and on a device whose copies are late and whose memory is a file."""

from __future__ import annotations

import dataclasses
import gc
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from connectors.p2p.transport.base import DEVICE_BACKOFF_S
from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, RowRegion
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.shm_metadata import HANDLE_BYTES, ShmMetadata
from connectors.testing.delayed_device import DelayedDevice
from connectors.testing.torn_read_suite import RewrittenRowsSuite
from connectors.testing.transport_owner import HostRegions, ProcessOwner, row_content
from connectors.testing.transport_suite import NUM_ROWS, PEER, ROW_BYTES, Reader, TransportSuite
from core.errors import ConnectorUnavailable, PeerUnreachable, ProtocolError, TransferError
from core.ids import RandomIds
from tests.support.shared_device import HANDLE, on_shared_device

FACTORIES = Path(__file__).with_name("device_factories.py")
HOST_FACTORIES = Path(__file__).with_name("transport_factories.py")
OTHER = PEER._replace(incarnation=2)


@pytest.mark.full
class TestShmBesideDevice(TransportSuite):
    factory = f"{FACTORIES}:make_shm_beside_device"


@pytest.mark.slow
class TestShmBesideDeviceOverRewrittenRows(RewrittenRowsSuite):
    factory = f"{FACTORIES}:make_shm_beside_device"


@pytest.mark.gpu
class TestShmOnGpu(TransportSuite):
    """Rows lie in video memory on both ends: by CUDA IPC between the processes."""

    factory = f"{FACTORIES}:make_shm_on_gpu"


class ShmWithDevice(ShmTransport):
    """The transport in a worker whose pool is on ``device``, which copies when the test says so."""

    def __init__(self, device, staging=None):
        super().__init__(RandomIds())
        self.device = device
        self.staging = staging

    def register(self, regions, staging=None):
        pool, *others = regions
        super().register([on_shared_device(pool, self.device), *others], self.staging)


@pytest.fixture
def device():
    return DelayedDevice(seed=1, share=0.0)


@pytest.fixture
def reader(device):
    reader = Reader(ShmWithDevice(device))
    yield reader
    reader.close()


@pytest.fixture
def memory_there(reader):
    """What the reader has mapped."""
    return reader.transport._devices._memory


@pytest.fixture(scope="module")
def owner():
    owner = ProcessOwner(f"{FACTORIES}:make_shm_beside_device", NUM_ROWS, ROW_BYTES, 1)
    yield owner
    owner.close()


@pytest.fixture
def connected(reader, owner):
    reader.transport.add_peer(PEER, owner.metadata)
    return reader


def changed(owner, **fields):
    """Return the owner's metadata with other facts about its pool."""
    metadata = msgspec.msgpack.decode(owner.metadata, type=ShmMetadata)
    pool = msgspec.structs.replace(metadata.device, **fields)
    return msgspec.msgpack.encode(msgspec.structs.replace(metadata, device=pool))


def num_open_files():
    gc.collect()  # files of earlier tests that nobody has closed
    return len(os.listdir("/proc/self/fd"))


# ---- order and ends --------------------------------------------------------------------------------------------------------


def test_copies_begin_when_their_read_is_posted_and_it_ends_when_they_are_done(connected, device):
    handle = connected.transport.post_read(PEER, POOL_REGION, [3, 7], [5, 6])
    connected.poll()
    assert not connected.results
    device.finish()  # without a poll
    connected.assert_rows(1, [3, 7], [5, 6])
    connected.poll()
    assert connected.results[handle].error is None


def test_seals_wait_for_the_blocks_of_their_peer_that_were_asked_for_before(connected, device):
    blocks = connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    seals = connected.transport.post_read(PEER, SEAL_REGION, [3], [5])
    for _ in range(3):
        connected.poll()
    connected.assert_untouched([5], SEAL_REGION)
    device.finish()
    assert connected.wait(blocks, seals) == [None, None]
    assert list(connected.results) == [blocks, seals]
    connected.assert_rows(1, [3], [5], SEAL_REGION)


def test_blocks_wait_for_seals_that_were_asked_for_before(connected, device):
    seals = connected.transport.post_read(PEER, SEAL_REGION, [3], [5])
    blocks = connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    device.finish()
    connected.assert_untouched([5])
    connected.poll()
    assert list(connected.results) == [seals]
    device.finish()
    assert connected.wait(blocks) == [None]
    connected.assert_rows(1, [3], [5])


def test_seals_of_another_peer_do_not_wait(connected, owner):
    connected.transport.add_peer(OTHER, owner.metadata)
    blocks = connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    seals = connected.transport.post_read(OTHER, SEAL_REGION, [3], [5])
    connected.poll()
    assert list(connected.results) == [seals]
    connected.transport.cancel(blocks)


def test_waits_grow_while_the_device_copies_and_end_with_the_reads(connected, device):
    assert connected.transport.max_wait_s() is None
    connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    connected.transport.post_read(PEER, SEAL_REGION, [3], [5])
    waits = []
    for _ in range(8):
        connected.transport.poll()
        waits.append(connected.transport.max_wait_s())
    assert waits == sorted(waits)
    assert DEVICE_BACKOFF_S[0] < waits[0] < waits[-1] == DEVICE_BACKOFF_S[1]
    device.finish()
    connected.transport.poll()
    assert connected.transport.max_wait_s() == 0.0, "the turn of the seals has come"
    connected.transport.poll()
    assert connected.transport.max_wait_s() is None


def test_cancelled_read_is_told_of_when_the_device_has_done_its_copies(connected, device):
    handle = connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    connected.transport.cancel(handle)
    connected.poll()
    assert not connected.results
    device.finish()
    (error,) = connected.wait(handle)
    assert isinstance(error, TransferError)
    assert "cancelled" in error.message


def test_cancelled_read_whose_turn_has_not_come_never_begins(connected, device):
    seals = connected.transport.post_read(PEER, SEAL_REGION, [3], [5])
    blocks = connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    connected.transport.cancel(blocks)
    connected.wait(seals, blocks)
    device.finish()
    connected.assert_untouched([5])


def test_fence_waits_for_the_device_before_memory_is_unmapped(connected, memory_there):
    handle = connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    connected.transport.remove_peer(PEER)
    connected.assert_rows(1, [3], [5])
    assert not memory_there.mapped
    assert isinstance(connected.wait(handle)[0], PeerUnreachable)


class LostDevice:
    """Copies whose device has failed."""

    def query(self):
        return False

    def synchronize(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_device_that_fails_leaves_no_read_and_no_memory_mapped(connected, owner, memory_there, monkeypatch):
    """The worker ends by such an error; what it has mapped is given back all the same, of all peers."""
    connected.transport.add_peer(OTHER, owner.metadata)
    monkeypatch.setattr(memory_there, "submit", lambda *copy: LostDevice())
    connected.transport.post_read(PEER, POOL_REGION, [3], [5])
    connected.transport.post_read(OTHER, POOL_REGION, [3], [6])

    def refuse(*copy):
        raise RuntimeError("CUDA error: launch failure")

    monkeypatch.setattr(memory_there, "submit", refuse)
    with pytest.raises(RuntimeError, match="launch failure"):
        connected.transport.post_read(PEER, POOL_REGION, [4], [7])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        connected.transport.close()
    assert not memory_there.mapped
    assert not connected.transport._reads
    assert connected.transport._token_fd is None


def test_owner_that_dies_is_lost_once_the_device_has_done_its_copies(reader, device, memory_there):
    mortal = ProcessOwner(f"{FACTORIES}:make_shm_beside_device", NUM_ROWS, ROW_BYTES, 1)
    reader.transport.add_peer(PEER, mortal.metadata)
    handle = reader.transport.post_read(PEER, POOL_REGION, [3], [5])
    mortal.close()
    with pytest.raises(PeerUnreachable, match="died"):
        reader.transport.post_read(PEER, POOL_REGION, [4], [6])
    reader.poll()
    assert isinstance(reader.results[handle].error, PeerUnreachable)
    assert reader.transport.take_lost_peers() == [PEER]
    assert not memory_there.mapped
    before = reader.memory.rows.copy()
    device.finish()
    assert np.array_equal(reader.memory.rows, before)


# ---- mappings --------------------------------------------------------------------------------------------------------------


def test_allocation_is_mapped_once_for_all_peers_that_are_of_it(connected, owner, device, memory_there):
    connected.transport.add_peer(OTHER, owner.metadata)
    assert memory_there.num_opened == 1
    connected.transport.remove_peer(PEER)
    handle = connected.transport.post_read(OTHER, POOL_REGION, [3], [5])
    device.finish()
    assert connected.wait(handle) == [None]
    connected.transport.remove_peer(OTHER)
    assert not memory_there.mapped


def test_pool_of_the_same_process_is_read_where_it_is(reader, device, memory_there):
    memory = HostRegions(NUM_ROWS, ROW_BYTES)
    memory.fill(7)
    ours = ShmWithDevice(device)
    ours.register(memory.regions)
    memory_there.known = [memory.pool.region]
    reader.transport.add_peer(PEER, ours.describe())
    handle = reader.transport.post_read(PEER, POOL_REGION, [3], [5])
    device.finish()
    assert reader.wait(handle) == [None]
    reader.assert_rows(7, [3], [5])
    assert not memory_there.num_opened
    reader.transport.remove_peer(PEER)
    ours.close()
    memory.close()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"offset": 1}, ProtocolError),
        ({"offset": 2**48 - 1}, ProtocolError),
        ({"offset": 2**48}, ProtocolError),
        ({"offset": -1}, ProtocolError),
        ({"address": -1}, ProtocolError),
        ({"handle": bytes(HANDLE_BYTES - 1)}, ProtocolError),
        ({"handle": HANDLE.pack(1, 9999)}, PeerUnreachable),
    ],
    ids=str,
)
def test_memory_that_is_not_as_described_is_refused_and_unmapped(reader, owner, memory_there, fields, kind):
    before = num_open_files()
    with pytest.raises(kind):
        reader.transport.add_peer(PEER, changed(owner, **fields))
    assert (num_open_files(), memory_there.mapped) == (before, {})


def test_more_rows_than_the_allocation_holds_are_refused(reader, owner, memory_there):
    metadata = msgspec.msgpack.decode(owner.metadata, type=ShmMetadata)
    shape = msgspec.structs.replace(metadata.device.shape, num_rows=NUM_ROWS + 1)
    with pytest.raises(ProtocolError, match=rf"cannot hold the {NUM_ROWS + 1} rows"):
        reader.transport.add_peer(PEER, changed(owner, shape=shape))
    assert not memory_there.mapped


# ---- other kinds of memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ours_on_host", [True, False])
def test_pool_in_the_other_kind_of_memory_is_refused_by_both_kinds_and_the_way_out(device, owner, is_ours_on_host):
    transport = ShmTransport(RandomIds()) if is_ours_on_host else ShmWithDevice(device)
    reader = Reader(transport)
    theirs = owner if is_ours_on_host else ProcessOwner(f"{HOST_FACTORIES}:make_shm", NUM_ROWS, ROW_BYTES, 1)
    kinds = ("memory on a device", "host memory") if is_ours_on_host else ("host memory", "memory on a device")
    with pytest.raises(PeerUnreachable, match=f"is {kinds[0]}, and ours is {kinds[1]}.* tcp .*connector.transports"):
        transport.add_peer(PEER, theirs.metadata)
    reader.close()
    if theirs is not owner:
        theirs.close()


def test_pool_that_the_device_cannot_share_is_read_by_none_and_reads_itself(device, owner):
    memory = HostRegions(NUM_ROWS, ROW_BYTES)
    transport = ShmWithDevice(device)
    transport.register([dataclasses.replace(memory.pool.region, memory_fd=None), memory.seals.region])
    with pytest.raises(ConnectorUnavailable, match="cannot be shared"):
        transport.describe()
    transport.add_peer(PEER, owner.metadata)
    transport.close()
    memory.close()


def test_blocks_of_another_size_land_in_host_memory_in_pieces(device, owner, monkeypatch):
    monkeypatch.setattr("connectors.p2p.transport.shm.COPY_BYTES_PER_POLL", 2 * ROW_BYTES)
    landing = np.zeros(8 * ROW_BYTES, np.uint8)
    staging = RowRegion(landing.ctypes.data, 8, ROW_BYTES, memoryview(landing))
    memory = HostRegions(NUM_ROWS, 2 * ROW_BYTES)
    transport = ShmWithDevice(device, staging)
    transport.register(memory.regions)
    transport.add_peer(PEER, owner.metadata)
    handle = transport.post_read(PEER, POOL_REGION, [3, 4, 5, 9], [0, 1, 2, 3])
    assert transport.max_wait_s() == 0.0
    assert transport.poll() == []
    assert [(ended.handle, ended.error) for ended in transport.poll() + transport.poll()] == [(handle, None)]
    found = landing.reshape(8, ROW_BYTES)
    assert all(np.array_equal(found[n], row_content(1, row, ROW_BYTES)) for n, row in enumerate([3, 4, 5, 9]))
    transport.close()
    memory.close()
