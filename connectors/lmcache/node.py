"""The state machine between engine and server: what is asked, what is still open, and what happens when no answer comes.

``on_...`` methods take in what has happened and return what is to be done, in order; no I/O, no threads. Nothing that a request
waits for depends on the server's goodwill: a lookup that is not answered in time is a miss, a load that does not end in time
has failed, and a server that is silent, or gone, is left at the first doubt. Then everything open ends, and what it may still
write is memory that nobody uses any more: the next session gets fresh memory, a fresh connection and another instance id.

    DOWN ──timer──▶ PROBING ──version, settings, memory──▶ REGISTERING ──reply──▶ UP ──silence, loss──▶ DOWN

Owned by ``connectors.lmcache.connector``; the sessions of requests are kept by ``connectors.lmcache.sessions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum, auto

from connectors.lmcache.actions import (
    Action,
    ConnectToServer,
    LMCacheMPConnectorMetadata,
    ProbeServer,
    SavePages,
    ServerFacts,
    ServerSession,
    SessionClosed,
    SessionOpened,
)
from connectors.lmcache.loads import PageLoads
from connectors.lmcache.pending_requests import LMCacheSettings, PendingRequests
from connectors.lmcache.saves import PageSaves
from connectors.lmcache.sessions import ServerSessions
from connectors.lmcache.staging import Staging
from connectors.lmcache.tracker import ChunkGeometry
from connectors.lmcache.wire import (
    TESTED_VERSIONS,
    GroupInfo,
    Operation,
    encode_call,
    register_call,
)
from core.clock import Clock
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, TransferTimeout
from core.ids import IdSource

_INSTANCE_BITS = 48


class NodePhase(Enum):
    """Where the connection is."""

    DOWN = auto()
    PROBING = auto()
    REGISTERING = auto()
    UP = auto()


class LMCacheNode:
    """One worker's end of the connection to the server, with the lookups, loads and saves on it."""

    def __init__(self, settings: LMCacheSettings, ids: IdSource, clock: Clock) -> None:
        self._settings = settings
        self._ids = ids
        self._clock = clock
        self._phase = NodePhase.DOWN
        self._calls = PendingRequests(clock, settings)
        self._sessions = ServerSessions(self._calls)
        self._loads = PageLoads(self._calls, self._sessions)
        self._saves = PageSaves(self._calls, self._sessions)
        self._staging: Staging | None = None
        self._due = clock.now()  # of the next attempt, of its end, or of the next heartbeat

    @property
    def phase(self) -> NodePhase:
        """Where the connection is."""
        return self._phase

    @property
    def num_loading_blocks(self) -> int:
        """Blocks of loads that are not over."""
        return self._loads.num_blocks

    def counts(self) -> dict[str, int]:
        """Return what has happened how often."""
        return dict(self._calls.counts)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def on_timer(self) -> list[Action]:
        """Do what is due: connect, ask for a sign of life, give up what has waited too long."""
        now = self._clock.now()
        vital = self._calls.expire(now)
        if vital is not None:
            self._close(TransferTimeout(f"the LMCache server has not answered: {vital}"))
        self._sessions.on_timer(now)
        self._loads.on_timer(now)
        if self._due <= now:
            self._on_due(now)
        return self._calls.take_actions()

    def next_timer(self) -> float:
        """Return when ``on_timer`` is to be called."""
        parts = (self._calls.next_deadline(), self._sessions.next_deadline(), self._loads.next_deadline())
        return min(self._due, *parts)

    def on_probed(self, attempt: int, found: ServerFacts | KVFerryError, staging: Staging | None) -> list[Action]:
        """Register with a server that is one that we know; leave another alone, until the next attempt."""
        if attempt != self._calls.attempt or self._phase is not NodePhase.PROBING:
            self._drop(staging)
            return self._calls.take_actions()
        self._staging = staging
        error = found if isinstance(found, KVFerryError) else self._find_fault(found)
        if error is not None:
            self._close(error)
        else:
            assert isinstance(found, ServerFacts)
            assert staging is not None, "there is memory unless there is an error"
            self._register(found, staging)
        return self._calls.take_actions()

    def on_disconnected(self, attempt: int) -> list[Action]:
        """Leave a server whose connection is lost: if it answers again, it may be another one."""
        if attempt == self._calls.attempt and self._phase in (NodePhase.REGISTERING, NodePhase.UP):
            self._close(PeerUnreachable("the connection to the LMCache server is lost"))
        return self._calls.take_actions()

    def on_reply(self, attempt: int, uid: int, result: object) -> list[Action]:
        """Take a reply in."""
        if attempt == self._calls.attempt:
            self._calls.on_reply(uid, result)
        if self._saves.has_doubt and self._phase is NodePhase.UP:
            self._close(PeerUnreachable("the LMCache server has refused to keep blocks: it may know this worker no more"))
        return self._calls.take_actions()

    def on_metadata(self, metadata: LMCacheMPConnectorMetadata) -> list[Action]:
        """Take in what a step has decided, apart from its saves."""
        for number, is_good in metadata.verdicts.items():
            self._saves.judge(number, is_good)
        for lookup in metadata.lookups:
            self._sessions.look_up(lookup)
        for load in metadata.loads:
            self._loads.start(load)
        for session_id in metadata.unclaimed:
            self._sessions.release(session_id)
        for request_id in metadata.aborts:
            self._loads.abort(request_id)
        for session_id in metadata.ended:
            self._sessions.end(session_id)
        return self._calls.take_actions()

    def on_copied(self, saves: Sequence[SavePages]) -> None:
        """Keep what a step has copied, until it is judged."""
        self._saves.on_copied(saves)

    def on_sealed(self, save: SavePages) -> list[Action]:
        """Send what has been sealed."""
        self._saves.send(save)
        return self._calls.take_actions()

    def on_taken(self, request_id: str, faults: dict[int, KVFerryError]) -> list[Action]:
        """End a load whose pages have been looked at; ``faults`` maps moves that are not good to what is wrong."""
        self._loads.on_taken(request_id, faults)
        return self._calls.take_actions()

    def on_stop(self, on_parted: Callable[[], None]) -> list[Action]:
        """End all sessions and say good-bye; ``on_parted`` is called if the server answers."""
        if self._phase is NodePhase.UP:
            self._sessions.end_all()
            instance_id = self._calls.instance_id
            self._calls.send(
                lambda uid: encode_call(uid, Operation.UNREGISTER_KV_CACHE, instance_id),
                lambda _: on_parted(),
                what="good-bye",
            )
        return self._calls.take_actions()

    # ---- the connection --------------------------------------------------------------------------------------------

    def _on_due(self, now: float) -> None:
        if self._phase is NodePhase.UP:
            self._due = now + self._settings.heartbeat_interval_s
            instance_id = self._calls.instance_id
            self._calls.send(lambda uid: encode_call(uid, Operation.PING, instance_id), what="a heartbeat", is_vital=True)
        elif self._phase is NodePhase.DOWN:
            self._calls.attempt += 1
            self._phase = NodePhase.PROBING
            self._due = now + 2 * self._settings.request_timeout_s
            self._calls.act(ProbeServer(self._calls.attempt))
        else:
            self._close(TransferTimeout("the LMCache server could not be reached in time"))

    def _find_fault(self, facts: ServerFacts) -> KVFerryError | None:
        """Say why this server must not be used."""
        settings = self._settings
        if facts.version not in TESTED_VERSIONS:
            return ConnectorUnavailable(
                f"LMCache {facts.version} is not a version that this client was tested with: {', '.join(TESTED_VERSIONS)}"
            )
        if facts.chunk_size % settings.block_size:
            return ConnectorUnavailable(
                f"the LMCache server's --chunk-size {facts.chunk_size} is not a multiple of "
                f"cache.block_size = {settings.block_size}"
            )
        if max(settings.windows) >= 0 and not facts.separate_object_groups:
            return ConnectorUnavailable(
                "the model has attention windows: start the LMCache server with --separate-object-groups"
            )
        return None

    def _register(self, facts: ServerFacts, staging: Staging) -> None:
        calls, settings = self._calls, self._settings
        self._phase = NodePhase.REGISTERING
        self._due = math.inf
        calls.instance_id = self._ids.bits(_INSTANCE_BITS)
        geometry = ChunkGeometry(facts.chunk_size, settings.block_size, settings.windows)
        server = ServerSession(calls.attempt, staging, geometry)
        groups = [
            GroupInfo(
                engine_group_id=index,
                layer_indices=(index,),
                tokens_per_block=settings.block_size,
                sw_size_tokens=geometry.declared_window(settings.windows[group_id]),
            )
            for index, group_id in enumerate(geometry.server_order)
        ]
        calls.act(ConnectToServer(calls.attempt))
        calls.send(
            lambda uid: register_call(uid, calls.instance_id, settings.namespace, staging.pages, groups),
            lambda _: self._open(server),
            what="a registration",
            is_vital=True,
        )

    def _open(self, server: ServerSession) -> None:
        self._phase = NodePhase.UP
        self._calls.server = server
        self._calls.count("connections")
        self._calls.act(SessionOpened(server))
        self._due = self._clock.now() + self._settings.heartbeat_interval_s

    def _close(self, error: KVFerryError) -> None:
        """Leave the server: end everything, and try again later."""
        calls, staging = self._calls, self._staging
        self._phase = NodePhase.DOWN
        self._due = self._clock.now() + self._settings.retry_interval_s
        self._staging = calls.server = None
        calls.forget()
        calls.act(SessionClosed(calls.attempt, staging, error))
        self._sessions.fail_all()
        self._loads.fail_all(PeerUnreachable(f"the LMCache server was left in the middle of a load: {error.message}"))
        self._saves.fail_all()

    def _drop(self, staging: Staging | None) -> None:
        """Let go of memory that came too late to be used."""
        if staging is not None:
            self._calls.act(SessionClosed(0, staging, PeerUnreachable("the attempt is over")))
