"""Calls of a worker's event loop and of its engine: they return at once, and what was started ends.

A part of ``connector_suite``. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from connectors.testing.connector_bytes import ByteConformance
from connectors.testing.connector_pair import INCARNATIONS, PROMPT, Pair
from connectors.testing.waiting_calls import WaitingCalls
from core.connector import Connector, KVConnectorScheduler, KVConnectorWorker
from core.wire.early import MeetProducer

_OPEN_FILES = Path("/proc/self/fd")
_THREADS = Path("/proc/self/task")
_TURNS_TO_END = 10  # of tasks that stop has cancelled
_POOL_OF_THE_LOOP = "asyncio_"  # the threads of asyncio.to_thread stay


class CallConformance(ByteConformance):
    """The tests."""

    async def lose_backend(self, pair: Pair) -> None:
        """Make what lies between the two workers fail from now on: its server is gone, or its folder."""
        if self.holds_until_read:
            pytest.skip("nothing is known to lie between the two workers: override lose_backend if something does")
        pytest.skip("not tested: override lose_backend, since the blocks lie between the two workers until they are read")

    # ---- handoffs that are given up, or kept longer --------------------------------------------------------------------

    async def test_a_handoff_that_is_released_ends(self, impatient: Pair) -> None:
        """A reader that comes all the same has bytes or an error. Another release does nothing, nor does a renewal."""
        pair = impatient
        handoff = await self.make_readable(pair, "a", PROMPT)
        await pair.producer.settle()
        for _ in range(3):  # until the router has the handoff
            await asyncio.sleep(0)
        for side in (pair.producer, pair.producer, pair.consumer):
            side.connector.release([handoff.transfer_id, "unknown"])
            side.connector.renew([handoff.transfer_id, "unknown"])
        await pair.drained()
        assert "a" not in pair.producer.engine.parked
        pair.load("a", PROMPT, handoff)
        await pair.ended("a")
        await self.assert_ended_once(pair, "a")
        other = [*PROMPT[:-1], 7]
        assert pair.consumer.engine.has_content(await pair.make_handoff("b", other))
        await pair.drained()

    async def test_a_handoff_that_is_renewed_is_loaded_like_any_other(self, pair: Pair) -> None:
        """A router renews what has not been read yet, also of workers that do not know it."""
        handoff = await self.make_readable(pair, "a", PROMPT)
        for _ in range(2):
            pair.producer.connector.renew([handoff.transfer_id, "unknown"])
        request = pair.load("a", PROMPT, handoff)
        await pair.ended("a")
        assert pair.consumer.engine.loads["a"].error is None
        assert pair.consumer.engine.has_content(request)
        await pair.drained()

    # ---- the backend ---------------------------------------------------------------------------------------------------

    async def test_loads_and_saves_end_when_the_backend_is_lost(self, impatient: Pair) -> None:
        """Those that have begun before, those that begin then, and none is tried for ever."""
        pair = impatient
        handoff = await self.make_readable(pair, "a", PROMPT)
        await self.lose_backend(pair)
        pair.load("a", PROMPT, handoff)
        other = [*PROMPT[:-1], 7]
        pair.load("b", other, pair.producer.engine.prefill("b", other))
        await pair.ended("a", "b")
        assert pair.consumer.engine.loads["b"].error is not None
        await self.assert_failed(pair, "a")
        for connector in (pair.producer.connector, pair.consumer.connector):
            connector.renew([handoff.transfer_id])
            connector.release([handoff.transfer_id])
        await pair.drained()

    # ---- time ----------------------------------------------------------------------------------------------------------

    async def test_no_call_waits(self, pair: Pair) -> None:
        """The event loop answers routers, and the engine computes for other requests: neither may wait for a transfer."""
        waits = WaitingCalls()
        for side in (pair.producer, pair.consumer):
            waits.watch(side.connector, Connector)
            waits.watch(side.connector.scheduler, KVConnectorScheduler)
            waits.watch(side.connector.worker, KVConnectorWorker)
        producer, consumer = pair.producer, pair.consumer
        address = producer.connector.control_address
        met = MeetProducer(engine_id="producer", incarnation=INCARNATIONS["prefill"], control_address=address)
        consumer.connector.meet(met)
        handoff = producer.engine.prefill("a", PROMPT)
        assert handoff is not None
        consumer.connector.expect(handoff)
        requests = [pair.load(name, PROMPT, handoff) for name in ("a/0", "a/1")]
        refused = pair.load("refused", [*PROMPT[:-1], 7], handoff)
        consumer.engine.step()
        consumer.engine.abort(requests[1])
        producer.connector.renew([handoff.transfer_id])
        await pair.ended("a/0", "a/1", refused.request_id)
        for side in (producer, consumer):
            side.connector.release([handoff.transfer_id])
            side.connector.num_leased_blocks()
            side.connector.num_saving_blocks()
            side.connector.saving_block_ids()
            side.connector.longest_lease_s()
        await pair.drained()
        assert not waits.found, "these calls wait; let a thread do it:\n" + "\n".join(dict.fromkeys(waits.found))

    async def test_stop_leaves_no_thread_and_no_open_file(self) -> None:
        """Nor a task or a process; and it does not wait in the event loop."""
        for _ in range(2):  # the first pair may leave what a process has once
            gc.collect()
            threads, files, tasks, processes = set(threading.enumerate()), _open_files(), asyncio.all_tasks(), _children()
            async with self.started_pair() as pair:
                await pair.make_handoff("a", PROMPT)
                await pair.drained()
                waits = WaitingCalls()
                with waits.watching("stop"):
                    await pair.consumer.connector.stop()
                    await pair.producer.connector.stop()
                assert not waits.found, f"stop waits in the event loop: {waits.found}"
            del pair
        for _ in range(_TURNS_TO_END):
            await asyncio.sleep(0)
        running = asyncio.all_tasks() - tasks
        assert not running, f"stop leaves the tasks {running}"
        gc.collect()
        names = [thread.name for thread in threading.enumerate() if thread not in threads]
        left = [name for name in names if not name.startswith(_POOL_OF_THE_LOOP)]
        assert not left, f"stop leaves the threads {left}"
        children = _children().items() - processes.items()
        assert not children, f"stop leaves the processes {dict(children)}"
        opened = _open_files() - files
        assert not opened, f"stop leaves open {dict(opened)}"


def _children() -> dict[int, str]:
    """Return the names of this process's children by id, without those that have ended."""
    found: dict[int, str] = {}
    for pid in " ".join(path.read_text() for path in _THREADS.glob("*/children")).split():
        with suppress(OSError):  # it has been waited for
            name, _, state = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
            if not state.startswith("Z"):
                found[int(pid)] = name
    return found


def _open_files() -> Counter[str]:
    """Count this process's open files by what they are, without numbers that differ between any two of them.

    Not the pools of the tests: they are closed with the last reference to them, such as one of a timer of the event loop.
    """
    if not _OPEN_FILES.exists():
        return Counter()
    found: Counter[str] = Counter()
    for path in _OPEN_FILES.iterdir():
        with suppress(OSError):  # the listing itself
            name = os.readlink(path)
            if "kvferry-test-" not in name:
                found[name.partition(":[")[0]] += 1
    return found
