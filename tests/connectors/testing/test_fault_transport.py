"""The transport that goes wrong on purpose: each fault as planned, by the number of the read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from connectors.p2p.transport.interface import PeerId, ReadResult
from connectors.testing.fault_transport import FaultPlan, FaultTransport
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.transport_owner import HostRows
from core.errors import PeerUnreachable, TransferError

PEER = PeerId("inproc", 1)
NUM_ROWS, ROW_BYTES = 8, 16


class World:
    def __init__(self) -> None:
        fabric = InprocFabric()
        self.theirs, self.ours = HostRows(NUM_ROWS, ROW_BYTES), HostRows(NUM_ROWS, ROW_BYTES)
        self.theirs.fill(1)
        self.owner = InprocTransport(fabric)
        self.owner.register([self.theirs.region])
        self.plan = FaultPlan()
        self.transport = FaultTransport(InprocTransport(fabric), self.plan)
        self.transport.register([self.ours.region])
        self.transport.add_peer(PEER, self.owner.describe())

    def read(self, row: int) -> int:
        return self.transport.post_read(PEER, 0, [row], [row])

    def has_row(self, row: int) -> bool:
        return np.array_equal(self.ours.rows[row], self.theirs.rows[row])


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.transport.close()
    world.owner.close()
    world.theirs.close()
    world.ours.close()


def test_without_a_plan_it_is_the_transport_inside(world):
    first, second = world.read(1), world.read(2)
    assert world.transport.poll() == [ReadResult(first), ReadResult(second)]
    assert world.has_row(1)
    assert world.has_row(2)
    assert world.transport.name == "inproc"
    assert world.transport.max_wait_s() is None


def test_refused_read_is_not_posted(world):
    world.plan.refuse = {2}
    first = world.read(1)
    with pytest.raises(PeerUnreachable):
        world.read(2)
    assert world.transport.poll() == [ReadResult(first)]


def test_failed_read_ends_badly_although_its_bytes_have_come(world):
    world.plan.fail = {1}
    handle = world.read(1)
    (result,) = world.transport.poll()
    assert (result.handle, type(result.error)) == (handle, TransferError)
    assert world.has_row(1)


def test_corrupt_read_has_one_wrong_byte(world):
    world.plan.corrupt = {1}
    handle = world.read(1)
    assert world.transport.poll() == [ReadResult(handle)]
    assert (world.ours.rows[1] != world.theirs.rows[1]).sum() == 1


def test_stalled_read_ends_once_the_plan_lets_it(world):
    world.plan.stall = {1}
    handle = world.read(1)
    assert world.transport.poll() == world.transport.poll() == []
    assert world.transport.max_wait_s() == 0.001
    world.plan.stall.clear()
    assert world.transport.poll() == [ReadResult(handle)]


@pytest.mark.parametrize("ignores", [False, True])
def test_cancel_ends_a_stalled_read_unless_it_does_nothing(world, ignores):
    world.plan.stall, world.plan.ignore_cancel = {1}, ignores
    world.read(1)
    world.transport.poll()
    world.transport.cancel(1)
    ended = world.transport.poll()
    assert [type(result.error) for result in ended] == ([] if ignores else [TransferError])


def test_fence_ends_a_stalled_read_with_an_error_though_it_was_done(world):
    world.plan.stall, world.plan.ignore_cancel = {1}, True
    world.read(1)
    world.transport.poll()
    world.transport.remove_peer(PEER)
    (result,) = world.transport.poll()
    assert isinstance(result.error, PeerUnreachable)
    with pytest.raises(PeerUnreachable):
        world.read(1)
