"""A store inside the process that uses it: both state machines, the arena, the tiers' threads and one thread that copies.

Owns those threads and the order of events: except copies and tiers, everything happens at once in the caller's thread, so that
a lookup of blocks in memory or on disk is answered when it returns. No message can get lost between the machines, so there are
no heartbeats or restarts here. A tier can hang: while one does, lookups and gets end at their deadlines, by the thread that
copies. A tier that is only slow lets them wait. Puts wait for that thread only, which reads the caller's memory, and have none.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core.clock import Clock
from core.ids import IdSource
from core.log import event
from kvstore.client_actions import ClientAction, ClientOptions, CopyIn, MapArena, SendToStore
from kvstore.client_base import StoreClientBase
from kvstore.client_state import ClientState, ConnectionState
from kvstore.key import StoreKey
from kvstore.messages import Parcel, ToStore
from kvstore.server_state import Action, SendParcel, ServerOptions, ServerState, StartJob, WatchProcess
from kvstore.tiers.base import Tier, TierJob
from kvstore.tiers.worker import TierExecutor, stop_all

FLUSH_TIMEOUT_S = 25.0
STOP_TIMEOUT_S = 5.0  # of each tier's present job when the store is closed

_SELF = b"self"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TierProgress:
    """The jobs that a tier has, and when the present one began, on the store's clock."""

    num_jobs: int = 0
    began_at: float = 0.0

    def on_job(self, now: float) -> None:
        if not self.num_jobs:
            self.began_at = now
        self.num_jobs += 1

    def on_done(self, now: float) -> None:
        self.num_jobs -= 1
        self.began_at = now

    def hangs_at(self, patience_s: float) -> float:
        """Return from when on it hangs, if nothing happens; inf without jobs."""
        return self.began_at + patience_s if self.num_jobs else math.inf


class EmbeddedStore(StoreClientBase):
    """A store of this process alone. ``request_timeout_s`` bounds lookups and gets, as ``BlockStore`` says.

    Raises: ConfigError if the memory cannot hold one block, Full if the host lacks it.
    """

    def __init__(
        self,
        options: ServerOptions,
        tiers: Sequence[Tier],
        block_bytes: int,
        request_timeout_s: float,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        client = ClientOptions("embedded", block_bytes, request_timeout_s, process=(1, 0))
        super().__init__(ClientState(client, ids), clock)
        self._request_timeout_s = request_timeout_s
        self.machine = ServerState(options, tiers)
        self.machine.prepare(block_bytes)
        self._copies: queue.SimpleQueue[CopyIn | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy_all, name="kvstore-copier", daemon=True)
        self.workers = [TierExecutor(tier, self._on_job_done) for tier in tiers]
        self._progress_of = [_TierProgress() for _ in tiers]
        self._is_closed = False
        with self._lock:
            self._machine.on_timer(clock.now())  # sends the hello
            self._carry_out()
        assert self._machine.state is ConnectionState.UP, "a store in this process answers at once"
        self._copier.start()
        for worker in self.workers:
            worker.start()

    @property
    def own_memory(self) -> memoryview | None:
        """See ``BlockStore``."""
        return None if self.machine.memory is None else self.machine.memory.arena.memory

    def follow_evictions(self, on_evicted: Callable[[Sequence[StoreKey]], None]) -> bool:
        """See ``BlockStore``. It cannot tell if there are lower tiers, which may still have what leaves memory."""
        if self.machine.memory is None or self.workers:
            return False
        self.machine.memory.on_forgotten = lambda key: on_evicted([StoreKey.unpack(key)])
        return True

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Save the dirty blocks; False if that takes too long."""
        with self._progress:
            self._follow(deque(self.machine.flush()))
            return self._progress.wait_for(self._is_flushed, timeout_s)

    def close(self) -> None:
        """See ``BlockStore``. Ends the copies that are queued, then saves the dirty blocks."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._copies.put(None)
        self._copier.join()
        if not self.flush(FLUSH_TIMEOUT_S):
            _log.warning(event("kvstore_unsaved", blocks=self.machine.num_unsaved))
        with self._progress:
            self._machine.say_goodbye()
            self._carry_out()
            self._progress.notify_all()
        stop_all(self.workers, STOP_TIMEOUT_S)
        if self.machine.memory is not None:
            self.machine.memory.arena.close()  # its mapping stays: a tier that hangs may still write there

    def _carry_out(self) -> None:
        """Pass parcels in both directions until there are none."""
        self._follow(deque())

    def _follow(self, store_actions: deque[Action]) -> None:
        client_actions = deque(self._machine.take_actions())
        while client_actions or store_actions:
            if store_actions:
                store_actions.extend(self._follow_store(store_actions.popleft()))
            else:
                store_actions.extend(self._follow_client(client_actions.popleft()))
            client_actions.extend(self._machine.take_actions())
        self._progress.notify_all()

    def _follow_client(self, action: ClientAction) -> Sequence[Action]:
        """Carry out the actions of the client's machine; return the actions of the store's machine that follow."""
        match action:
            case SendToStore():
                return self._to_store(action.parcel)
            case CopyIn():
                self._copies.put(action)
            case MapArena():
                self._machine.on_mapped(None if self.machine.memory is None else self.machine.memory.arena)
        return ()

    def _to_store(self, parcel: Parcel[ToStore]) -> list[Action]:
        return self.machine.on_parcel(_SELF, parcel.message, parcel.blocks, self._clock.now())

    def _follow_store(self, action: Action) -> Sequence[Action]:
        """Carry out an action of the store's machine; return its actions that follow."""
        match action:
            case SendParcel():
                self._machine.on_parcel(action.parcel.message, action.parcel.blocks, self._clock.now())
            case StartJob():
                self._progress_of[action.job.tier].on_job(self._clock.now())
                self.workers[action.job.tier].submit(action.job)
            case WatchProcess():  # this one
                return self.machine.on_watched(action.client_id)
        return ()

    def _copy_all(self) -> None:
        while True:
            try:
                copy = self._copies.get(timeout=self._end_late_calls())
            except queue.Empty:
                continue
            if copy is None:
                return
            for source, target in copy.copies:
                np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
            with self._lock:
                self._machine.calls.on_copied(copy.number, self._clock.now())
                self._carry_out()

    def _end_late_calls(self) -> float:
        """If a tier hangs, end lookups and gets at their deadlines; return how long none has to end, in seconds."""
        patience_s = self._request_timeout_s
        with self._lock:
            now = self._clock.now()
            due = min((progress.hangs_at(patience_s) for progress in self._progress_of), default=math.inf)
            if due <= now:
                due = self._machine.calls.end_late(now, but_puts=True)
                self._carry_out()
        return min(due - now, patience_s)

    def _on_job_done(self, job: TierJob) -> None:
        with self._lock:
            self._progress_of[job.tier].on_done(self._clock.now())
            self._follow(deque(self.machine.on_job_done(job)))

    def _is_flushed(self) -> bool:
        tiering, memory = self.machine.tiering, self.machine.memory
        if tiering is None or memory is None:
            return True
        if memory.num_dirty and not tiering.num_saving:
            self._follow(deque(self.machine.flush()))
        return not self.machine.num_unsaved
