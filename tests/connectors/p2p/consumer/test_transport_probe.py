"""The transfer thread's part in finding dead transports: probes, and what it says of a peer's progress."""

from __future__ import annotations

import numpy as np
import pytest

from connectors.p2p.actions import (
    AskProgress,
    ClosePeer,
    EndProbe,
    OpenPeer,
    PeerProgress,
    PostRead,
    ProbeEnded,
    ReadEnded,
    StartProbe,
)
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transport.interface import PeerId, RowRegion
from connectors.testing.inproc_transport import InprocFabric, InprocTransport
from connectors.testing.transport_owner import HostRows, layout_of_rows
from core.errors import PeerUnreachable, ProtocolError
from core.kv.seals import SealTable, each_by_itself, map_seal_memory

PEER = PeerId("tcp://10.0.0.1:5600", 1)
NUM_ROWS, ROW_BYTES = 8, 256
LAYOUT = layout_of_rows(ROW_BYTES)


class World:
    """An executor and one owner. ``events`` is what was reported and not looked at."""

    def __init__(self, *, late_bytes=False):
        self.fabric = InprocFabric()
        self.theirs, self.ours = HostRows(NUM_ROWS, ROW_BYTES), HostRows(NUM_ROWS, ROW_BYTES)
        self.their_seals = SealTable(map_seal_memory(NUM_ROWS), 1, 1)
        self.our_seals = SealTable(map_seal_memory(NUM_ROWS), 2, 1)
        self.owner = InprocTransport(self.fabric)
        self.owner.register([self.theirs.region, RowRegion.of_seals(self.their_seals)])
        self.how_to_open = OpenPeer(PEER, "inproc", self.owner.describe(), NUM_ROWS, LAYOUT)
        self.transport = InprocTransport(self.fabric, late_bytes)
        self.transport.register([self.ours.region, RowRegion.of_seals(self.our_seals)])
        self.events = []
        self.executor = TransferExecutor(
            {"inproc": self.transport}, self.our_seals, each_by_itself(lambda _: 0), self.report, lambda: 0.0
        )

    def report(self, event, at):
        self.events.append(event)

    def take(self, *kinds):
        while self.executor.poll():
            pass
        taken = [event for event in self.events if isinstance(event, kinds)]
        self.events.clear()
        return taken

    def freeze(self, is_frozen=True):
        self.fabric.set_frozen(self.owner.number, is_frozen)

    def ask(self):
        self.executor.execute(AskProgress(PEER))
        return [event.has_advanced for event in self.take(PeerProgress)]

    def close(self):
        self.executor.close()
        self.owner.close()
        self.theirs.close()
        self.ours.close()


@pytest.fixture(params=[False, True], ids=["cancels", "late bytes"])
def world(request):
    world = World(late_bytes=request.param)
    yield world
    world.close()


def test_probe_of_a_peer_that_can_be_read_succeeds(world):
    world.executor.execute(StartProbe(7, world.how_to_open))
    assert world.take(ProbeEnded) == [ProbeEnded(7)]
    assert not world.transport._peers, "it leaves no connection"


def test_probe_writes_only_its_own_row(world):
    world.our_seals.buffer[:] = b"\xa5" * len(world.our_seals.buffer)
    world.theirs.fill(1)
    world.executor.execute(StartProbe(7, world.how_to_open))
    world.take()
    rows = np.frombuffer(world.our_seals.buffer, np.uint8).reshape(world.our_seals.num_rows, -1)
    assert (rows[:-1] == 0xA5).all()
    assert not (rows[-1] == 0xA5).all()
    assert (world.ours.rows == 0).all()


def test_peer_can_be_opened_after_its_probe(world):
    for number in (7, 8):
        world.executor.execute(StartProbe(number, world.how_to_open))
        assert world.take(ProbeEnded) == [ProbeEnded(number)]
    world.executor.execute(world.how_to_open)
    world.executor.execute(PostRead(1, PEER, (1,), (2,)))
    assert world.take(ReadEnded) == [ReadEnded(1)]


@pytest.mark.parametrize("metadata", [b"", b"nonsense"])
def test_probe_that_cannot_begin_fails(world, metadata):
    how_to_open = OpenPeer(PEER, "inproc", metadata, NUM_ROWS, LAYOUT)
    world.executor.execute(StartProbe(7, how_to_open))
    (ended,) = world.take(ProbeEnded)
    assert (ended.probe_id, type(ended.error)) == (7, ProtocolError)


def test_probe_of_an_owner_that_dies_fails(world):
    world.freeze()
    world.executor.execute(StartProbe(7, world.how_to_open))
    world.owner.close()
    (ended,) = world.take(ProbeEnded)
    assert isinstance(ended.error, PeerUnreachable)


def test_abandoned_probe_reports_nothing_and_leaves_nothing(world):
    world.freeze()
    world.executor.execute(StartProbe(7, world.how_to_open))
    world.executor.execute(EndProbe(7))
    assert not world.transport._peers
    assert world.take(ProbeEnded) == []
    world.freeze(False)
    assert world.take(ProbeEnded) == []
    world.executor.execute(StartProbe(8, world.how_to_open))
    assert world.take(ProbeEnded) == [ProbeEnded(8)]
    assert not world.executor._probes._probes
    assert not world.executor._probes._given_up


def test_frozen_peer_makes_no_progress(world):
    world.executor.execute(world.how_to_open)
    world.executor.execute(PostRead(1, PEER, (1,), (2,)))
    world.take()
    world.freeze()
    world.executor.execute(PostRead(2, PEER, (1,), (3,)))
    assert world.ask() == [False], "what came with the end of the first read is old"
    assert world.ask() == [False]


def test_what_has_come_is_taken_in_before_the_question_is_answered(world, monkeypatch):
    world.executor.execute(world.how_to_open)

    def receive_a_part():
        world.transport._bytes_received[PEER] += 1
        return []

    monkeypatch.setattr(world.transport, "poll", receive_a_part)
    world.executor.execute(AskProgress(PEER))
    assert world.events[-1] == PeerProgress(PEER, has_advanced=True)


def test_bytes_since_the_last_question_are_progress(world):
    world.executor.execute(world.how_to_open)
    assert world.ask() == [False]
    world.transport._bytes_received[PEER] += 1
    assert world.ask() == [True]
    assert world.ask() == [False]


def test_question_about_a_closed_peer_has_no_answer(world):
    world.executor.execute(world.how_to_open)
    world.executor.execute(ClosePeer(PEER))
    assert world.ask() == []
