"""The p2p connector over transports that go wrong on command; the workers of the fault tests load it by ``module:factory``.

``connector.extra.faults`` names a folder. ``<role>.json`` in it is the plan for all workers of a role; it may be replaced at
any time. ``<engine_id>.trace`` gets one JSON line per event of a read, with the time of the machine's monotonic clock, which
all processes share. Nothing here runs in the tests' own process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from connectors.p2p.actions import Action
from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import TransportSettings, create_transport
from connectors.p2p.transport.interface import PeerId, ReadResult, RowRegion, Transport
from connectors.testing.fault_transport import FaultPlan, FaultTransport
from core.connector import Connector, ConnectorContext, KVConnectorScheduler, KVConnectorWorker
from core.errors import KVFerryError, PeerUnreachable, TransferError
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.machine_driver import TimerDue
from core.request import Request, RequestStatus

_LOOK_AGAIN_S = 0.001  # at the plan, while a read waits for it


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connector of a worker."""
    desk = FaultDesk(Path(context.config.connector.extra["faults"]), context.role, context.engine_id)

    def create(name: str, settings: TransportSettings) -> Transport:
        return CommandedTransport(create_transport(name, settings), desk, made.end_deadlines)

    folder = Path(context.config.connector.extra["faults"])
    made = (BoastfulConnector if context.config.connector.extra.get("boastful_leases") else CommandedConnector)(context, create)
    hang_on_command(made.worker, folder / f"{context.engine_id}.hang")
    squeeze_on_command(made.scheduler, folder / f"{context.engine_id}.squeeze")
    return made


def hang_on_command(worker: KVConnectorWorker, command: Path) -> None:
    """Let the engine's thread, and nothing else of the process, stand still at the end of a step while the file exists."""
    wait_for_save = worker.wait_for_save

    def wait() -> None:
        while command.exists():
            time.sleep(_LOOK_AGAIN_S)
        wait_for_save()

    worker.wait_for_save = wait  # type: ignore[method-assign]


def squeeze_on_command(scheduler: KVConnectorScheduler, command: Path) -> None:
    """Let the pool have no block for a running request, once, when the file is there; the file is removed."""
    bind = scheduler.bind_kv_cache_manager

    def bind_kv_cache_manager(manager: KVCacheManager) -> None:
        allocate_slots = manager.allocate_slots

        def allocate(request: Request, *arguments: Any, **options: Any) -> KVCacheBlocks | None:
            if request.status is RequestStatus.RUNNING and command.exists():
                command.unlink()
                return None
            return allocate_slots(request, *arguments, **options)

        manager.allocate_slots = allocate  # type: ignore[method-assign]
        bind(manager)

    scheduler.bind_kv_cache_manager = bind_kv_cache_manager  # type: ignore[method-assign]


class CommandedConnector(P2PConnector):
    """Lets the deadlines of its loads pass on command: no test has to wait for them, or to be faster than they are."""

    _must_end = False

    def end_deadlines(self) -> None:
        """Let the deadline of every load in progress be now. Any thread."""
        self._must_end = True
        self.driver.post(TimerDue())

    async def start(self) -> None:
        await super().start()
        agent = self.driver.agent
        assert agent is not None
        agent.consumer.handlers[TimerDue] = self._on_timer

    def _on_timer(self, event: TimerDue, now: float) -> list[Action]:
        agent = self.driver.agent
        assert agent is not None
        for load in agent.consumer.loads if self._must_end else ():
            load.deadline = now
        self._must_end = False
        return agent.consumer.on_timer(event, now)


class BoastfulConnector(CommandedConnector):
    """Ends its leases in time, but promises consumers that they last, so that only the seals protect a read."""

    async def start(self) -> None:
        await super().start()
        agent = self.driver.agent
        assert agent is not None
        agent.producer.leases.renew = lambda transfer_ids, now: dict.fromkeys(transfer_ids, 60_000)  # type: ignore[method-assign]


class FaultDesk:
    """A worker's end of the folder: the plan as it stands, and the trace.

    Plans number the reads from 1, counted from the first read that is posted after a plan of a new ``epoch`` was put there.
    Every worker of the role counts for itself.
    """

    def __init__(self, folder: Path, role: str, engine_id: str) -> None:
        self._path = folder / f"{role}.json"
        self._trace = (folder / f"{engine_id}.trace").open("a", buffering=1)
        self._seen: tuple[int, int] = (0, 0)
        self._plan: dict[str, Any] = {}
        self._base = 0

    def look(self, num_posted: int) -> dict[str, Any]:
        """Return the plan; a new epoch begins after the reads that are posted already."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._plan
        if (stat.st_ino, stat.st_mtime_ns) != self._seen:
            self._seen = (stat.st_ino, stat.st_mtime_ns)
            plan = json.loads(self._path.read_text())
            if plan["epoch"] != self._plan.get("epoch"):
                self._base = num_posted
            self._plan = plan
            self.note("plan", plan=plan)
        return self._plan

    def absolute(self, kind: str) -> set[int]:
        """Return the numbers of the reads that get a fault, over the life of the transport."""
        return {self._base + number for number in self._plan.get(kind, ())}

    def number(self, absolute: int) -> int:
        """Return the number of a read in the plan's own count."""
        return absolute - self._base

    def note(self, event: str, **fields: object) -> None:
        """Append an event to the trace."""
        self._trace.write(json.dumps({"at": time.monotonic(), "pid": os.getpid(), "event": event, **fields}) + "\n")


class CommandedTransport(FaultTransport):
    """A fault transport over ``LateTransport`` over a real one; follows the desk's plan."""

    def __init__(self, inner: Transport, desk: FaultDesk, end_deadlines: Callable[[], None]) -> None:
        self._desk = desk
        self._end_deadlines = end_deadlines
        self._has_ended_deadlines = False  # by the plan as it stands
        self._late = LateTransport(inner, desk)
        self._excused: set[int] = set()  # stalled reads that a cancel or a fence has ended, against the plan
        super().__init__(self._late, FaultPlan())

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Post by the plan as it stands now."""
        self._follow()
        handle = super().post_read(peer, region, remote_rows, local_rows)
        self._desk.note(
            "posted",
            read=self._desk.number(self.num_posted),
            handle=handle,
            region=region,
            rows=list(local_rows),
            peer=peer.address,
        )
        return handle

    def poll(self) -> list[ReadResult]:
        """Poll by the plan as it stands now."""
        self._follow()
        results = super().poll()
        for result in results:
            self._desk.note("ended", handle=result.handle, error=repr(result.error) if result.error else "")
        return results

    def cancel(self, handle: int) -> None:
        """Note it and pass on."""
        self._desk.note("cancelled", handle=handle)
        self._late.given_up.add(handle)
        stalled = set(self.plan.stall)
        super().cancel(handle)
        self._excused |= stalled - self.plan.stall

    def remove_peer(self, peer: PeerId) -> None:
        """Note it and pass on."""
        self._desk.note("fenced", peer=peer.address)
        stalled = set(self.plan.stall)
        super().remove_peer(peer)
        self._excused |= stalled - self.plan.stall

    def _follow(self) -> None:
        plan = self._desk.look(self.num_posted)
        for kind in ("refuse", "fail", "stall", "corrupt"):
            setattr(self.plan, kind, self._desk.absolute(kind) - self._excused)
        self.plan.ignore_cancel = bool(plan.get("ignore_cancel"))
        wants_end = bool(plan.get("end_deadlines"))
        if wants_end and not self._has_ended_deadlines:
            self._end_deadlines()
        self._has_ended_deadlines = wants_end


class LateTransport(Transport):
    """Keeps the reads that the plan calls ``late`` from the real transport until the plan releases them.

    With ``ignore_cancel`` a read that the reader has given up still comes, as with NIXL: its bytes land late. A fence drops it.
    Handles are the numbers of the reads.
    """

    name = "late"

    def __init__(self, inner: Transport, desk: FaultDesk) -> None:
        self.name = inner.name  # type: ignore[misc]  # the name of an instance
        self.given_up: set[int] = set()  # handles of reads that were cancelled, whether or not that did anything
        self._inner = inner
        self._desk = desk
        self._num_posted = 0
        self._kept: dict[int, tuple[PeerId, int, Sequence[int], Sequence[int]]] = {}
        self._handles: dict[int, int] = {}  # the inner transport's handle → ours
        self._ended: list[ReadResult] = []

    def unavailable_reason(self) -> str | None:
        return self._inner.unavailable_reason()

    def counts(self) -> Mapping[str, int]:
        return self._inner.counts()

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        self._inner.register(regions, staging)

    def describe(self) -> bytes:
        return self._inner.describe()

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        self._inner.add_peer(peer, metadata)

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        handle = self._num_posted = self._num_posted + 1
        if handle in self._desk.absolute("late"):
            self._kept[handle] = (peer, region, remote_rows, local_rows)
            self._desk.note("kept", handle=handle)
        else:
            self._handles[self._inner.post_read(peer, region, remote_rows, local_rows)] = handle
        return handle

    def poll(self) -> list[ReadResult]:
        for handle in self._kept.keys() - self._desk.absolute("late"):
            self._let_go(handle)
        for result in self._inner.poll():
            handle = self._handles.pop(result.handle)
            if handle in self.given_up:
                self._desk.note("landed late", handle=handle, error=repr(result.error) if result.error else "")
            self._ended.append(ReadResult(handle, result.error))
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, handle: int) -> None:
        if self._kept.pop(handle, None) is not None:
            self._end(handle, TransferError("the read was cancelled before it began"))
        for inner_handle in [inner_handle for inner_handle, ours in self._handles.items() if ours == handle]:
            self._inner.cancel(inner_handle)

    def remove_peer(self, peer: PeerId) -> None:
        self._inner.remove_peer(peer)
        for handle in [handle for handle, read in self._kept.items() if read[0] == peer]:
            del self._kept[handle]
            self._end(handle, PeerUnreachable("the peer was fenced before the read began"))

    def pollables(self) -> Sequence[Any]:
        return self._inner.pollables()

    def max_wait_s(self) -> float | None:
        if self._ended:
            return 0.0
        inner = self._inner.max_wait_s()
        return min(_LOOK_AGAIN_S, _LOOK_AGAIN_S if inner is None else inner) if self._kept else inner

    def close(self) -> None:
        self._inner.close()

    def _let_go(self, handle: int) -> None:
        read = self._kept.pop(handle)
        self._desk.note("let go", handle=handle)
        try:
            self._handles[self._inner.post_read(*read)] = handle
        except KVFerryError as error:
            self._end(handle, error)

    def _end(self, handle: int, error: KVFerryError) -> None:
        self._ended.append(ReadResult(handle, error))
