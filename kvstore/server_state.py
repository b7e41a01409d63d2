"""The store's side of the protocol: sessions, and what each message does to the memory tier and the tiers below.

It owns the pins, reservations and queries of each client, and ends them with the client's session. It does no I/O and never
waits: it returns actions, which a driver (``kvstore.server``, ``kvstore.embedded``, the simulation) carries out at once and in
order. Blocks in a parcel are views of the arena that are valid until the next call. Time is passed as an argument.

The death of a client ends its session: its pins are removed, and its reserved slots are freed, since a dead process writes
nothing. A silent client loses its pins, since readers check the slot again after copying. Its reserved slots stay quarantined
until the process has died or says hello, because it may still write to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.errors import Full, KVFerryError, LayoutMismatch, ProtocolError, Unavailable
from kvstore import messages
from kvstore.key import StoreKey, split_keys
from kvstore.memory import MemoryTier, Resident
from kvstore.messages import MAX_BLOCKS_BYTES, NO_SLOT, Parcel, ToClient, ToStore, split_seals
from kvstore.seal_check import check_seal
from kvstore.tiering import Query, Tiering
from kvstore.tiers.base import Tier, TierJob


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``make_memory`` makes the memory tier for blocks of a size, when the first client has told its block size.

    ``max_pinned_share`` bounds what one client may pin; ``client_timeout_s`` how long it may be silent.
    """

    incarnation: int
    make_memory: Callable[[int], MemoryTier]
    client_timeout_s: float = 5.0
    max_pinned_share: float = 0.5
    write_back: bool = False


@dataclass(frozen=True, slots=True)
class SendParcel:
    """Send to a client. A client that is gone or does not read is detected by its silence."""

    client: bytes
    parcel: Parcel[ToClient]


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Call ``on_process_died(client_id)`` when this process has ended, at once if it already has.

    Before that call ``on_watched(client_id)``, or ``on_unwatchable`` if its end cannot be observed here.
    """

    client_id: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run this job on the thread of its tier, then call ``on_job_done``."""

    job: TierJob


Action = SendParcel | WatchProcess | StartJob


@dataclass(slots=True)
class _Session:
    client: bytes
    client_id: str
    last_heard: float
    is_local: bool = False
    queries: dict[int, Query] = field(default_factory=dict)  # lookups until they are answered, gets until they are released
    reservations: dict[int, list[Resident | None]] = field(default_factory=dict)
    stored: dict[int, list[bool]] = field(default_factory=dict)  # per reservation: blocks that the store had already

    @property
    def num_pinned(self) -> int:
        return sum(resident is not None for query in self.queries.values() for resident in query.residents)


class ServerState:
    """Answers clients. ``client`` is the driver's handle of a connection."""

    def __init__(self, options: ServerOptions, tiers: Sequence[Tier] = ()) -> None:
        self._options = options
        self._tiers = tiers
        self._sessions: dict[bytes, _Session] = {}
        self._late_writers: dict[str, list[Resident]] = {}  # by client id: slots that it may still write
        self._actions: list[Action] = []
        self.memory: MemoryTier | None = None
        self.tiering: Tiering | None = None
        self.counts: Counter[str] = Counter()
        self.refusal = ""  # why there is no memory for a client that asks for it; for any thread
        self._refused_at = 0.0
        self.rejected: Counter[str] = Counter()  # blocks that failed verification, by the error's code

    @property
    def incarnation(self) -> int:
        """The incarnation of the store."""
        return self._options.incarnation

    @property
    def num_clients(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def num_local_clients(self) -> int:
        """Number of sessions whose client has proven that it maps the arena."""
        return sum(session.is_local for session in list(self._sessions.values()))  # a copy: metrics are read by other threads

    @property
    def num_quarantined(self) -> int:
        """Number of slots that silent clients may still write."""
        return sum(map(len, self._late_writers.values()))

    def prepare(self, block_bytes: int) -> MemoryTier:
        """Return the memory tier for blocks of this size; makes it at the first call.

        Raises:
            ConfigError, Full: as ``make_memory``.
            LayoutMismatch: the memory exists and has another block size.
        """
        if self.memory is None:
            self.memory = self._options.make_memory(block_bytes)
            self.tiering = Tiering(self.memory, self._tiers, write_back=self._options.write_back)
        if block_bytes > self.memory.arena.slot_bytes:
            raise LayoutMismatch(
                f"blocks of {block_bytes} bytes do not fit this store, whose slots have {self.memory.arena.slot_bytes} bytes: "
                "set kvstore.block_bytes to the largest block of all clients"
            )
        return self.memory

    def on_parcel(self, client: bytes, message: ToStore, blocks: Sequence[memoryview | bytes], now: float) -> list[Action]:
        """Process one message."""
        session = self._sessions.get(client)
        if session is not None:
            session.last_heard = now
        try:
            if isinstance(message, messages.Hello):
                self._on_hello(client, message, now)
            elif session is None:
                self._send(client, messages.UnknownClient(incarnation=self.incarnation))
            else:
                self._follow(session, message, blocks)
        except KVFerryError as error:
            self.counts["refused_messages"] += 1
            number = getattr(message, "number", 0)
            self._send(client, messages.AttachRefused(code=error.code, message=error.message[:1000], number=number))
        return self._take_actions()

    def on_job_done(self, job: TierJob) -> list[Action]:
        """Apply the result of a job of a tier."""
        if self.tiering is not None:
            for query in self.tiering.on_done(job):
                self._answer(query)
        return self._take_actions()

    def on_watched(self, client_id: str) -> list[Action]:
        """Let a client use the arena from now on: the end of its process will be noticed."""
        for session in self._sessions_of(client_id):
            session.is_local = True
            self._send(session.client, messages.Attached())
        return self._take_actions()

    def on_unwatchable(self, client_id: str, reason: str) -> list[Action]:
        """Refuse a client the arena: slots that it writes could not be freed after its death. Its blocks go as frames."""
        for session in self._sessions_of(client_id):
            self._send(session.client, messages.AttachRefused(code=Unavailable.code, message=reason[:1000]))
        return self._take_actions()

    def on_process_died(self, client_id: str) -> list[Action]:
        """End the sessions of a process that has ended, and free the slots reserved for it."""
        for session in self._sessions_of(client_id):
            self._end(session, may_still_write=False)
        self._reclaim(client_id)
        return self._take_actions()

    def on_timer(self, now: float) -> list[Action]:
        """End the sessions of clients that were silent for longer than the timeout, and forget one that was refused."""
        if now - self._refused_at >= self._options.client_timeout_s:
            self.refusal = ""
        for session in list(self._sessions.values()):
            if now - session.last_heard >= self._options.client_timeout_s:
                self.counts["silent_clients"] += 1
                self._end(session, may_still_write=True)
        return self._take_actions()

    @property
    def num_unsaved(self) -> int:
        """Number of blocks that a lower tier is to get and has not got yet."""
        if self.memory is None or self.tiering is None:
            return 0
        return max(self.memory.num_dirty, self.tiering.num_saving)  # a dirty block may be one that is being saved

    def flush(self) -> list[Action]:
        """Start to save dirty blocks (write-back), as many as the tiers accept at once."""
        if self.tiering is not None:
            self.tiering.flush()
        return self._take_actions()

    def _follow(self, session: _Session, message: ToStore, blocks: Sequence[memoryview | bytes]) -> None:
        match message:
            case messages.Attach():
                self._on_attach(session, message)
            case messages.Lookup():
                self._ask(session, message.number, message.keys, is_get=False)
            case messages.Get():
                self._ask(session, message.number, message.keys, is_get=True)
            case messages.ReleaseBlocks():
                for number in message.numbers:
                    self._release(session, number)
            case messages.Reserve():
                self._on_reserve(session, message)
            case messages.Commit():
                self._on_commit(session, message)
            case messages.Put():
                self._on_put(session, message, blocks)
            case messages.Corrupt():
                self._on_corrupt(message)
            case messages.StoreHeartbeat():
                self._on_heartbeat(session, message)
                self._send(session.client, messages.Alive(incarnation=self.incarnation))
            case messages.StoreGoodbye():
                self._end(session, may_still_write=False)
            case messages.Hello():  # a session begins before it is looked up
                pass

    def _sessions_of(self, client_id: str) -> list[_Session]:
        return [session for session in self._sessions.values() if session.client_id == client_id]

    def _on_hello(self, client: bytes, message: messages.Hello, now: float) -> None:
        """Begin a session. Ends the earlier session of the process, which has stopped writing."""
        for session in list(self._sessions.values()):
            if client == session.client or session.client_id == message.client_id:
                self._end(session, may_still_write=False)
        self._reclaim(message.client_id)
        memory = self._prepare_for(message, now)
        self._sessions[client] = _Session(client, message.client_id, now)
        arena: messages.ArenaFile | None = memory.arena.describe()
        self._send(
            client,
            messages.Welcome(
                session=message.session, incarnation=self.incarnation, slot_bytes=memory.arena.slot_bytes, arena=arena
            ),
        )

    def _prepare_for(self, message: messages.Hello, now: float) -> MemoryTier:
        """Return the memory; without any, remember why: the store is of use to nobody then, and looks healthy."""
        try:
            memory = self.prepare(message.block_bytes)
        except KVFerryError as error:
            if self.memory is None:
                self.refusal, self._refused_at = error.message, now
            raise
        self.refusal = ""
        return memory

    def _on_attach(self, session: _Session, message: messages.Attach) -> None:
        if self._open_memory().arena.nonce != message.nonce:
            raise ProtocolError("the nonce is not that of the arena: no shared memory")
        self._actions.append(WatchProcess(session.client_id, message.pid, message.start_ticks))

    def _ask(self, session: _Session, number: int, packed: bytes, *, is_get: bool) -> None:
        keys = split_keys(packed)
        query = Query(session, number, keys, is_get=is_get)
        if number in session.queries:
            raise ProtocolError(f"call {number} is open already")
        if is_get:
            max_pinned = max(1, int(self._open_memory().arena.num_slots * self._options.max_pinned_share))
            query.max_pins = max_pinned - session.num_pinned
        session.queries[number] = query
        self.counts["get_keys" if is_get else "lookup_keys"] += len(keys)
        if self._open_tiering().start(query):
            self._answer(query)

    def _answer(self, query: Query) -> None:
        session = query.owner
        assert isinstance(session, _Session)
        if not query.is_get:
            del session.queries[query.number]
            self.counts["lookup_hits"] += sum(query.hits)
            self._send(session.client, messages.LookupReply(number=query.number, hits=bytes(query.hits)))
            return
        found = [resident.key for resident in query.residents if resident is not None]
        self.counts["get_hits"] += len(found)
        memory = self._open_memory()
        memory.use(found)
        if session.is_local:
            self._send(session.client, _slots_of(query))
            return
        for reply, residents in _parts_of(query):
            self._send(session.client, reply, [memory.content(resident).toreadonly() for resident in residents])
        self._release(session, query.number)  # the frames are the client's own

    def _on_reserve(self, session: _Session, message: messages.Reserve) -> None:
        keys = split_keys(message.keys)
        if not session.is_local or len(keys) != len(message.sizes) or message.number in session.reservations:
            raise ProtocolError("a reservation needs the arena, a size for each key, and a number of its own")
        residents = self._reserve(keys, message.sizes)
        stored = [self._open_memory().find(key) is not None for key in keys]
        session.reservations[message.number] = residents
        session.stored[message.number] = stored
        slots = tuple(NO_SLOT if resident is None else (resident.slot, resident.generation, 1) for resident in residents)
        self._send(session.client, messages.Reserved(number=message.number, slots=slots, stored=bytes(stored)))

    def _reserve(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[Resident | None]:
        """Return a slot for each block; None if the store has or receives it, or lacks room. Invalid requests reserve none."""
        for key in keys:
            StoreKey.unpack(key)
        if not all(sizes):
            raise ProtocolError("a block without bytes")
        return [self._reserve_one(key, num_bytes) for key, num_bytes in zip(keys, sizes, strict=True)]

    def _reserve_one(self, key: bytes, num_bytes: int) -> Resident | None:
        memory = self._open_memory()
        if memory.find(key) is not None or memory.is_incoming(key):
            return None
        try:
            return memory.reserve(key, num_bytes)
        except Full:
            self.counts["refused_blocks"] += 1
            return None

    def _on_commit(self, session: _Session, message: messages.Commit) -> None:
        seals = split_seals(message.seals)
        residents = session.reservations.pop(message.number, None)
        if residents is None:
            raise ProtocolError(f"nothing is reserved by number {message.number}")
        stored = session.stored.pop(message.number)
        if len(seals) != len(residents):
            self._give_back(residents)
            raise ProtocolError(f"{len(seals)} seals for {len(residents)} blocks")
        for index in reversed(range(len(residents))):  # the beginning of a prompt is the most recent
            resident = residents[index]
            if resident is not None:
                stored[index] = self._commit(resident, seals[index])
        self._send(session.client, messages.PutReply(number=message.number, stored=bytes(stored)))

    def _commit(self, resident: Resident, seal: bytes) -> bool:
        memory, tiering = self._open_memory(), self._open_tiering()
        try:
            check_seal(StoreKey.unpack(resident.key), seal)
        except KVFerryError as error:
            self.rejected[error.code] += 1
            self._give_back([resident])
            return False
        memory.commit(resident, seal, is_dirty=tiering.makes_dirty)
        self.counts["put_blocks"] += 1
        tiering.on_new(resident)
        return True

    def _on_put(self, session: _Session, message: messages.Put, blocks: Sequence[memoryview | bytes]) -> None:
        keys, seals = split_keys(message.keys), split_seals(message.seals)
        if not len(keys) == len(seals) == len(blocks):
            raise ProtocolError(f"{len(keys)} keys, {len(seals)} seals and {len(blocks)} blocks")
        memory = self._open_memory()
        residents = self._reserve(keys, [len(block) for block in blocks])
        stored = [memory.find(key) is not None for key in keys]
        for index in reversed(range(len(keys))):  # as for a commit
            resident = residents[index]
            if resident is not None:
                memory.content(resident)[:] = blocks[index]
                stored[index] = self._commit(resident, seals[index])
        self._send(session.client, messages.PutReply(number=message.number, stored=bytes(stored)))

    def _on_heartbeat(self, session: _Session, message: messages.StoreHeartbeat) -> None:
        held = set(message.held)
        for number in [*session.queries, *session.reservations]:
            if number <= message.last and number not in held:
                self.counts["forgotten_calls"] += 1
                self._release(session, number)

    def _on_corrupt(self, message: messages.Corrupt) -> None:
        for key in split_keys(message.keys):
            self.rejected[message.code if message.code in ("stale", "digest") else "other"] += 1
            self.counts["dropped_blocks"] += self._open_memory().drop(key)

    def _release(self, session: _Session, number: int) -> None:
        query = session.queries.pop(number, None)
        if query is not None:
            self._open_tiering().abandon(query)
            for resident in query.residents:
                if resident is not None:
                    self._open_memory().unpin(resident)
        self._give_back(session.reservations.pop(number, ()))
        session.stored.pop(number, None)

    def _end(self, session: _Session, *, may_still_write: bool) -> None:
        del self._sessions[session.client]
        if may_still_write:
            reserved = [resident for slots in session.reservations.values() for resident in slots if resident is not None]
            session.reservations.clear()
            for resident in reserved:
                self._open_memory().abandon(resident)
            if reserved:
                self._late_writers.setdefault(session.client_id, []).extend(reserved)
        for number in [*session.queries, *session.reservations]:
            self._release(session, number)

    def _reclaim(self, client_id: str) -> None:
        for resident in self._late_writers.pop(client_id, ()):
            self._open_memory().give_back(resident)

    def _give_back(self, residents: Sequence[Resident | None]) -> None:
        for resident in residents:
            if resident is not None:
                self._open_memory().abandon(resident)
                self._open_memory().give_back(resident)

    def _open_memory(self) -> MemoryTier:
        assert self.memory is not None, "a session begins with hello, which makes the memory"
        return self.memory

    def _open_tiering(self) -> Tiering:
        assert self.tiering is not None, "a session begins with hello, which makes the memory"
        return self.tiering

    def _send(self, client: bytes, message: ToClient, blocks: Sequence[memoryview | bytes] = ()) -> None:
        self._actions.append(SendParcel(client, Parcel(message, blocks)))

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        if self.tiering is not None:
            actions += [StartJob(job) for job in self.tiering.take_jobs()]
        return actions


def _slots_of(query: Query) -> messages.GetReply:
    """Return the answer to a client that maps the arena."""
    found = [resident for resident in query.residents if resident is not None]
    return messages.GetReply(
        number=query.number,
        present=bytes(resident is not None for resident in query.residents),
        seals=b"".join(resident.seal for resident in found),
        slots=tuple((resident.slot, resident.generation, resident.num_bytes) for resident in found),
        withheld=_withheld_of(query, 0, len(query.keys)),
    )


def _withheld_of(query: Query, first: int, end: int) -> bytes:
    """Return which of some keys are in the store and not pinned, because of the limit. Empty if there are none."""
    flags = bytes(query.hits[index] and query.residents[index] is None for index in range(first, end))
    return flags if any(flags) else b""


def _parts_of(query: Query) -> list[tuple[messages.GetReply, list[Resident]]]:
    """Return the answer to a remote client, in messages of bounded size."""
    parts: list[tuple[messages.GetReply, list[Resident]]] = []
    first = 0
    while first < len(query.residents) or not parts:
        end = _end_of_part(query.residents, first)
        found = [resident for resident in query.residents[first:end] if resident is not None]
        reply = messages.GetReply(
            number=query.number,
            present=bytes(resident is not None for resident in query.residents[first:end]),
            seals=b"".join(resident.seal for resident in found),
            first=first,
            is_last=end >= len(query.residents),
            withheld=_withheld_of(query, first, end),
        )
        parts.append((reply, found))
        first = end
    return parts


def _end_of_part(residents: Sequence[Resident | None], first: int) -> int:
    """Return the end of the blocks from ``first`` on that fit one message; at least one does."""
    num_bytes = 0
    for index in range(first, len(residents)):
        resident = residents[index]
        size = 0 if resident is None else resident.num_bytes
        if num_bytes and num_bytes + size > MAX_BLOCKS_BYTES:
            return index
        num_bytes += size
    return len(residents)
