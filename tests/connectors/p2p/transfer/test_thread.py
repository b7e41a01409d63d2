"""The thread that runs the transfer executor."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Iterator

import pytest

from connectors.p2p.actions import OpenPeer, PostRead, ReadEnded
from connectors.p2p.transfer.thread import TransferThread
from tests.connectors.p2p.transfer.conftest import LAYOUT, NUM_ROWS, PEER, WAIT_S, World


@pytest.fixture
def run_thread() -> Iterator[Callable[[World], TransferThread]]:
    threads: list[TransferThread] = []

    def run(world: World) -> TransferThread:
        threads.append(TransferThread(world.executor, lambda error: None))
        threads[-1].start()
        return threads[-1]

    yield run
    for thread in threads:
        thread.stop()


def test_thread_carries_out_what_is_submitted(world, run_thread):
    thread = run_thread(world)
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    for read_id in range(8):
        thread.submit(PostRead(read_id, PEER, (read_id,), (read_id,)))
    events = [world.events.get(timeout=WAIT_S) for _ in range(8)]
    assert [event.read_id for event in events] == list(range(8))
    assert all(world.has_row(row, row) for row in range(8))


def test_thread_keeps_looking_after_a_read_that_nothing_announces(world, run_thread):
    thread = run_thread(world)
    world.freeze()
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    thread.submit(PostRead(1, PEER, (2,), (2,)))
    thread.submit(PostRead(2, PEER, (99,), (0,)))
    assert world.events.get(timeout=WAIT_S).read_id == 2  # the first is posted by now, and frozen
    world.freeze(False)
    assert world.events.get(timeout=WAIT_S) == ReadEnded(1)


def test_sleeps_of_the_thread_and_of_no_other_end_in_time(world):
    """The kernel may add the slack of a thread to each of its sleeps, in nanoseconds."""
    get_slack, answers = 30, queue.SimpleQueue()  # PR_GET_TIMERSLACK

    def slack():
        return ctypes.CDLL(None).prctl(get_slack, 0, 0, 0, 0)

    before = slack()
    thread = TransferThread(world.executor, lambda error: None, lambda: answers.put(slack()))
    thread.start()
    assert answers.get(timeout=WAIT_S) == 1
    assert slack() == before > 1
    thread.stop()


def test_bug_in_the_thread_is_reported_and_fences_everything(world):
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    thread = TransferThread(world.executor, deaths.put)
    thread.start()
    world.freeze()
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    thread.submit(PostRead(1, PEER, (2,), (2,)))
    thread.submit(OpenPeer(PEER, "a transport that does not exist", b"", NUM_ROWS, LAYOUT))
    assert isinstance(deaths.get(timeout=WAIT_S), KeyError)
    thread.stop()
    world.freeze(False)
    world.poll()
    assert not world.ours.rows.any()


def test_stop_closes_the_transports(world):
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    thread = TransferThread(world.executor, deaths.put)
    thread.start()
    world.freeze()
    thread.submit(OpenPeer(PEER, "inproc", world.metadata, NUM_ROWS, LAYOUT))
    thread.submit(PostRead(1, PEER, (2,), (2,)))
    thread.stop()
    world.freeze(False)
    world.poll()
    assert not world.ours.rows.any()
    assert deaths.empty()


def test_thread_that_never_started_can_be_stopped(world):
    thread = TransferThread(world.executor, lambda error: None)
    thread.stop()
