"""The calls of a store's client, from their tickets to their results.

Owns the open calls and their deadlines, the gets that are pinned, and what was counted. Blocks go by the store's arena if it
is attached, else as frames. Knows nothing of how a connection comes about: ``kvstore.client_state`` says when it is up, and
when it is lost. Does no I/O and never waits; time is passed as an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from core.errors import KVFerryError, ProtocolError, Unavailable
from core.kv.seals import SEAL_BYTES
from kvstore import messages
from kvstore.arena import ArenaView
from kvstore.base import GetTicket, LookupTicket, PutTicket, StoredBlock, Ticket
from kvstore.client_actions import ClientAction, ClientOptions, CopyIn, SendToStore
from kvstore.key import StoreKey, pack_keys
from kvstore.messages import MAX_BLOCKS_BYTES, MAX_KEYS, Parcel, ToStore, split_seals

SLOW_BYTES_PER_S = 100e6  # of a tier or a network that is still worth waiting for: a plain disk, 1 Gbit/s

IsCurrent = Callable[[], bool]


@dataclass(slots=True)
class _Call:
    """An open call. A put to a store elsewhere goes in parts, each with the indices of its blocks."""

    ticket: Ticket
    deadline: float
    blocks: list[StoredBlock | None] = field(default_factory=list)  # of a get that arrives in parts
    part: range = range(0)  # of a put: what the store has been sent last
    stored: list[bool] = field(default_factory=list)
    withheld: set[int] = field(default_factory=set)  # of a get


class ClientCalls:
    """The calls of one client to all incarnations of its store. ``emit`` receives the actions."""

    def __init__(self, options: ClientOptions, emit: Callable[[ClientAction], None]) -> None:
        self._options = options
        self._emit = emit
        self._is_up = False
        self._arena: ArenaView | None = None  # attached
        self._last_number = 0
        self._calls: dict[int, _Call] = {}
        self._pinned: dict[int, None] = {}  # gets that the store holds for us
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()

    @property
    def is_local(self) -> bool:
        """Whether blocks are read and written in the store's arena."""
        return self._arena is not None

    @property
    def num_open(self) -> int:
        """Number of tickets without an answer."""
        return len(self._calls)

    @property
    def num_pinned_gets(self) -> int:
        """Number of answered gets that are not released."""
        return len(self._pinned)

    def is_open(self, number: int) -> bool:
        """Return whether a call still waits for its answer. A driver whose puts may end before it copies checks this first."""
        return number in self._calls

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connect(self, arena: ArenaView | None) -> None:
        """Send calls to the store from now on; blocks go by its arena, or without one as frames."""
        self._is_up, self._arena = True, arena

    def disconnect(self, failure: str) -> None:
        """End all open calls as misses, and those to come; the store holds nothing for this client any more."""
        self._is_up, self._arena = False, None
        self._pinned.clear()
        for call in list(self._calls.values()):
            self._close(call, failure)

    def send_heartbeat(self) -> None:
        """Tell the store which calls are open or pinned, if one message can."""
        held = (*self._calls, *self._pinned)
        if len(held) <= MAX_KEYS:
            self._send(messages.StoreHeartbeat(last=self._last_number, held=held))

    # ---- what the caller wants ---------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[StoreKey], now: float) -> LookupTicket:
        """See ``BlockStore.lookup``."""
        ticket = LookupTicket(keys, self._next_number())
        self.counts["lookups"] += 1
        self.counts["lookup_keys"] += len(keys)
        if self._open(ticket, now):
            self._send(messages.Lookup(number=ticket.number, keys=pack_keys(keys)))
        return ticket

    def get(self, keys: Sequence[StoreKey], now: float) -> GetTicket:
        """See ``BlockStore.get``."""
        ticket = GetTicket(keys, self._next_number())
        if self._open(ticket, now):
            call = self._calls[ticket.number]
            call.blocks = [None] * len(keys)
            call.deadline += len(keys) * self._options.block_bytes / SLOW_BYTES_PER_S
            self._send(messages.Get(number=ticket.number, keys=pack_keys(keys)))
        return ticket

    def put(self, keys: Sequence[StoreKey], blocks: Sequence[memoryview], seals: Sequence[bytes], now: float) -> PutTicket:
        """See ``BlockStore.put``."""
        if not len(keys) == len(blocks) == len(seals):
            raise ProtocolError(f"{len(keys)} keys, {len(blocks)} blocks and {len(seals)} seals")
        if any(len(seal) != SEAL_BYTES for seal in seals):
            raise ProtocolError(f"a seal has {SEAL_BYTES} bytes")
        ticket = PutTicket(keys, self._next_number(), blocks=[_as_bytes(block) for block in blocks], seals=seals)
        if self._open(ticket, now):
            if self._arena is not None:
                sizes = tuple(block.nbytes for block in ticket.blocks)
                self._send(messages.Reserve(number=ticket.number, keys=pack_keys(keys), sizes=sizes))
            else:
                self._put_next_part(self._calls[ticket.number], ticket)
        return ticket

    def release(self, ticket: GetTicket) -> None:
        """See ``BlockStore.release``."""
        if ticket.number in self._calls:
            self._close(self._calls[ticket.number], "released", tell=True)
        elif ticket.number in self._pinned:
            del self._pinned[ticket.number]
            self._send(messages.ReleaseBlocks(numbers=(ticket.number,)))

    def reject(self, block: StoredBlock, code: str, *, tell: bool) -> None:
        """Count a block that failed verification; if told to ``tell``, the store drops it."""
        self.rejected[code] += 1
        if tell and self._is_up:
            self._send(messages.Corrupt(keys=block.key.pack(), code=code))

    # ---- answers -----------------------------------------------------------------------------------------------------

    def refuse(self, number: int, code: str) -> bool:
        """The store has refused a call; returns False if there is no such call."""
        call = self._calls.get(number)
        if call is not None:
            self._close(call, code)
        return call is not None

    def on_reply(
        self,
        message: messages.LookupReply | messages.GetReply | messages.Reserved | messages.PutReply,
        blocks: Sequence[memoryview | bytes],
        now: float,
    ) -> None:
        """Process an answer to a call; one to a call that has ended is ignored."""
        call = self._calls.get(message.number)
        if call is None:
            return
        call.deadline = now + self._options.request_timeout_s
        try:
            match message, call.ticket:
                case messages.LookupReply(), LookupTicket():
                    self._on_hits(call, call.ticket, message)
                case messages.GetReply(), GetTicket():
                    self._on_blocks(call, call.ticket, message, blocks)
                case messages.Reserved(), PutTicket():
                    self._on_reserved(call, call.ticket, message)
                case messages.PutReply(), PutTicket():
                    self._on_stored(call, call.ticket, message)
        except KVFerryError as error:
            self._close(call, error.code, tell=True)

    def _on_hits(self, call: _Call, ticket: LookupTicket, message: messages.LookupReply) -> None:
        if len(message.hits) != len(ticket.keys):
            raise ProtocolError(f"{len(message.hits)} answers to {len(ticket.keys)} keys")
        ticket.hits = [flag == 1 for flag in message.hits]
        self.counts["lookup_hits"] += sum(ticket.hits)
        self._close(call)

    def _on_blocks(
        self, call: _Call, ticket: GetTicket, message: messages.GetReply, blocks: Sequence[memoryview | bytes]
    ) -> None:
        indices = [message.first + offset for offset, flag in enumerate(message.present) if flag]
        seals = split_seals(message.seals)
        found = self._views_of(message, blocks)
        if not len(indices) == len(seals) == len(found) or (indices and indices[-1] >= len(ticket.keys)):
            raise ProtocolError("an answer to a get does not fit its question")
        for index, seal, (content, is_current) in zip(indices, seals, found, strict=True):
            call.blocks[index] = StoredBlock(ticket.keys[index], content, seal, is_current)
            self.counts["got_blocks"] += 1
            self.counts["got_bytes"] += content.nbytes
        call.withheld |= {message.first + offset for offset, flag in enumerate(message.withheld) if flag}
        if message.is_last:
            ticket.blocks, ticket.withheld = call.blocks, call.withheld
            if self._arena is not None:
                self._pinned[ticket.number] = None
            self._close(call)

    def _views_of(self, message: messages.GetReply, blocks: Sequence[memoryview | bytes]) -> list[tuple[memoryview, IsCurrent]]:
        """Return the blocks of a reply, as views of the arena or of received frames, and whether they are still current."""
        arena = self._arena
        if not message.slots or arena is None:
            return [(memoryview(block).toreadonly(), _always) for block in blocks]
        return [
            (arena.content(slot, num_bytes).toreadonly(), partial(arena.is_readable, slot, generation))
            for slot, generation, num_bytes in message.slots
        ]

    def _on_reserved(self, call: _Call, ticket: PutTicket, message: messages.Reserved) -> None:
        if self._arena is None or not len(message.slots) == len(message.stored) == len(ticket.keys):
            raise ProtocolError("a reservation does not fit its question")
        call.stored = [flag == 1 for flag in message.stored]
        copies = [
            (block, self._arena.content(slot, block.nbytes))
            for block, (slot, _, _) in zip(ticket.blocks, message.slots, strict=True)
            if slot >= 0
        ]
        if copies:
            self._emit(CopyIn(ticket.number, copies))
        else:
            self._finish_put(call, ticket, call.stored, tell=True)

    def _on_stored(self, call: _Call, ticket: PutTicket, message: messages.PutReply) -> None:
        stored = [flag == 1 for flag in message.stored]
        if self._arena is None:
            if len(stored) != len(call.part):
                raise ProtocolError(f"{len(stored)} answers to {len(call.part)} blocks")
            call.stored += stored
            if len(call.stored) < len(ticket.keys):
                self._put_next_part(call, ticket)
                return
            stored = call.stored
        self._finish_put(call, ticket, stored)

    def _finish_put(self, call: _Call, ticket: PutTicket, stored: Sequence[bool], *, tell: bool = False) -> None:
        if len(stored) != len(ticket.keys):
            raise ProtocolError(f"{len(stored)} answers to {len(ticket.keys)} blocks")
        ticket.stored = stored
        self.counts["put_blocks"] += sum(stored)
        self.counts["put_bytes"] += sum(block.nbytes for block, is_there in zip(ticket.blocks, stored, strict=True) if is_there)
        self.counts["refused_puts"] += len(stored) - sum(stored)
        self._close(call, tell=tell)

    def _put_next_part(self, call: _Call, ticket: PutTicket) -> None:
        """Send as many blocks as fit one message; their bytes get time of their own."""
        first = end = len(call.stored)
        num_bytes = 0
        while end < len(ticket.keys):
            num_bytes += ticket.blocks[end].nbytes
            if end > first and num_bytes > MAX_BLOCKS_BYTES:
                break
            end += 1
        call.part = range(first, end)
        call.deadline += sum(block.nbytes for block in ticket.blocks[first:end]) / SLOW_BYTES_PER_S
        message = messages.Put(
            number=ticket.number, keys=pack_keys(ticket.keys[first:end]), seals=b"".join(ticket.seals[first:end])
        )
        self._send(message, ticket.blocks[first:end])

    def on_copied(self, number: int, now: float) -> None:
        """Commit blocks that have been copied to their slots."""
        call = self._calls.get(number)
        if call is not None and isinstance(call.ticket, PutTicket):
            call.deadline = now + self._options.request_timeout_s
            self._send(messages.Commit(number=number, seals=b"".join(call.ticket.seals)))

    # ---- begin and end -----------------------------------------------------------------------------------------------

    def _open(self, ticket: Ticket, now: float) -> bool:
        """Register a call; without a connection it ends at once as a miss."""
        if len(ticket.keys) > MAX_KEYS:
            raise ProtocolError(f"{len(ticket.keys)} keys in one call; at most {MAX_KEYS}")
        call = _Call(ticket, now + self._options.request_timeout_s)
        if self._is_up:
            self._calls[ticket.number] = call
            return True
        self._close(call, Unavailable.code)
        return False

    def _close(self, call: _Call, failure: str = "", *, tell: bool = False) -> None:
        """End a call. ``is_done`` is set last, because other threads read it."""
        ticket = call.ticket
        self._calls.pop(ticket.number, None)
        if tell and self._is_up:
            self._send(messages.ReleaseBlocks(numbers=(ticket.number,)))
        if failure:
            nothing = [False] * len(ticket.keys)
            match ticket:
                case LookupTicket():
                    ticket.hits = nothing
                case GetTicket():
                    ticket.blocks = [None] * len(ticket.keys)
                case PutTicket():
                    ticket.stored = nothing
        ticket.failure = failure
        ticket.is_done = True

    # ---- time --------------------------------------------------------------------------------------------------------

    def end_late(self, now: float, *, but_puts: bool = False) -> float:
        """End calls at their deadlines, all ``but_puts`` if told so; return the next deadline of those left, inf for none."""
        calls = [call for call in self._calls.values() if not (but_puts and isinstance(call.ticket, PutTicket))]
        for call in (call for call in calls if now >= call.deadline):
            self.counts["timeouts"] += 1
            self._close(call, "deadline", tell=True)
        return min((call.deadline for call in calls if not call.ticket.is_done), default=math.inf)

    def next_deadline(self) -> float:
        """Return the earliest deadline of a call, inf for none."""
        return min((call.deadline for call in self._calls.values()), default=math.inf)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _send(self, message: ToStore, blocks: Sequence[memoryview] = ()) -> None:
        self._emit(SendToStore(Parcel(message, blocks)))


def _as_bytes(block: memoryview) -> memoryview:
    """Return the same memory as bytes.

    Raises:
        ProtocolError: it is not contiguous.
    """
    if not block.c_contiguous:
        raise ProtocolError("a block to be stored must lie in one piece")
    return block.cast("B")


def _always() -> bool:
    return True
