"""Moves embeddings between a worker and the store of its host: fetches from the store, and saves of computed embeddings.

Owns the fetches and saves in flight, and the keys of chunks in the store. It has no thread and never waits: ``step`` does the
work that is possible now and returns whether there was any. Everything ends, even if the store is lost: every ticket does, and
a fetch ends by its deadline.

    fetch   got ──ticket──▶ copied out and checked, chunk by chunk ──▶ FetchEnded
              ◀── withheld by the store: asked again after a moment
    save    sealed, put ──ticket──▶ OfferEnded
              ◀── not taken, as another worker may be storing the same: looked up for a moment
    check   looked up ──ticket──▶ Forgotten, if the store no longer has it
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.ec.chunks import ChunkLayout, RowsDigester, num_chunks, rows_in_chunk
from connectors.ec.jobs import Fetch, FetchEnded, FetchingMetadata
from connectors.ec.memory import ChunkMemory
from connectors.ec.worker import OfferEnded
from connectors.withheld import WITHHELD_S, WithheldPatience
from core.clock import Clock
from core.digest import BlockDigester
from core.errors import CorruptBlock, KVFerryError, NotFound, StaleBlock, TransferTimeout, Unavailable
from core.kv.seals import Seal, encode_seal, layout_fingerprint
from core.wire.media import ECSeal, ECSource
from core.wire.messages import ErrorInfo
from kvstore.base import BlockStore, GetTicket, LookupTicket, PutTicket, Ticket
from kvstore.key import StoreKey, layout_key

NAME = "shared"
RETRY_S = 0.005  # before chunks that the store has and could not pin are requested again
OTHERS_SAVE_S = 0.5  # how long a save waits for another worker that is storing the same embeddings
CHUNKS_PER_GET = 64  # a store limits the pins of one client
CHUNKS_PER_TURN = 8  # of one fetch, before other fetches and new orders get their turn
_ANY_GENERATION = 1  # of a chunk in a store, where chunks are never rewritten


@dataclass(frozen=True, slots=True)
class SaveEmbeddings:
    """Store these rows; ``content`` is whole chunks, the last one padded with zeros."""

    identifier: bytes
    num_embeds: int
    content: memoryview


@dataclass(frozen=True, slots=True)
class CheckStored:
    """Check whether the store still has these embeddings."""

    seal: ECSeal


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The store no longer has these embeddings."""

    identifier: bytes


Order = FetchingMetadata | SaveEmbeddings | CheckStored
StoreReport = FetchEnded | OfferEnded | Forgotten


@dataclass(slots=True)
class _Fetching:
    fetch: Fetch
    keys: list[StoreKey]
    num_done: int = 0
    ticket: GetTicket | None = None
    first_got: int = 0  # the first chunk of the ticket
    retry_at: float = 0.0
    withheld_since: float | None = None  # the store withholds what is next
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class _Saving:
    save: SaveEmbeddings
    seal: ECSeal
    put: PutTicket
    lookup: LookupTicket | None = None  # whether another worker has stored what was not taken
    asked_at: float = 0.0
    retry_at: float = 0.0
    waits_since: float | None = None  # the put has ended


@dataclass(slots=True)
class _Checking:
    seal: ECSeal
    lookup: LookupTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingHolder:
    """The worker that stores; its identity is part of the announcements to readers."""

    engine_id: str
    incarnation: int


class EmbeddingTransfer:
    """Moves embeddings of one model. All calls come from one thread. ``memory`` is where fetches go."""

    def __init__(
        self, store: BlockStore, layout: ChunkLayout, memory: ChunkMemory, holder: EmbeddingHolder, clock: Clock
    ) -> None:
        self._store = store
        self._layout = layout
        self._memory = memory
        self._holder = holder
        self._clock = clock
        self._patience = WithheldPatience(clock)
        self._layout_key = layout_key(layout.as_blocks)
        self._layout_version = layout_fingerprint(layout.as_blocks)
        self._chunk_digester = BlockDigester(layout.chunk_bytes)
        self._digester = RowsDigester()
        self._fetches: dict[bytes, _Fetching] = {}
        self._saves: list[_Saving] = []
        self._checks: deque[_Checking] = deque()
        self._reports: list[StoreReport] = []
        self.counts: Counter[str] = Counter()

    @property
    def is_waiting(self) -> bool:
        """True if a ticket is open."""
        return bool(self._fetches or self._saves or self._checks)

    def submit(self, order: Order) -> None:
        """Accept an order."""
        match order:
            case FetchingMetadata():
                for fetch in order.fetches:
                    self._fetches[fetch.identifier] = _Fetching(fetch, self._keys(fetch.identifier, fetch.num_embeds))
                for identifier in order.aborts:
                    if identifier in self._fetches:
                        self._fetches[identifier].is_aborted = True
            case SaveEmbeddings():
                self._begin_save(order)
            case CheckStored():
                lookup = self._store.lookup(self._keys(order.seal.identifier, order.seal.num_embeds))
                self._checks.append(_Checking(order.seal, lookup))

    def take_reports(self) -> list[StoreReport]:
        """Return the results since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def step(self) -> bool:
        """Do the work that is possible now; False if everything waits for the store."""
        has_fetched = [self._advance_fetch(fetching) for fetching in list(self._fetches.values())]
        has_saved = [self._advance_save(saving) for saving in list(self._saves)]
        return any([*has_fetched, *has_saved, self._advance_check()])

    def close(self) -> None:
        """Release everything pinned in the store; nothing is reported after this."""
        for fetching in self._fetches.values():
            self._release(fetching)

    # ---- fetches -----------------------------------------------------------------------------------------------------

    def _advance_fetch(self, fetching: _Fetching) -> bool:
        if fetching.is_aborted or fetching.num_done == len(fetching.keys):
            self._end_fetch(fetching, None)
            return True
        now = self._clock.now()
        if now >= fetching.fetch.deadline:
            missing = len(fetching.keys) - fetching.num_done
            self._end_fetch(fetching, TransferTimeout(f"{missing} chunks of embeddings are not here at the deadline"))
            return True
        if fetching.ticket is None:
            if now < fetching.retry_at:
                return False
            fetching.first_got = fetching.num_done
            fetching.ticket = self._store.get(fetching.keys[fetching.num_done : fetching.num_done + CHUNKS_PER_GET])
        if not fetching.ticket.is_done:
            return False
        try:
            self._copy_some(fetching, fetching.ticket)
        except (NotFound, CorruptBlock, StaleBlock) as error:
            self._end_fetch(fetching, error)
        return True

    def _copy_some(self, fetching: _Fetching, ticket: GetTicket) -> None:
        """Copy the next chunks of an answered get.

        Raises:
            NotFound, CorruptBlock, StaleBlock: a chunk is missing, or not the one that was stored.
        """
        for _ in range(CHUNKS_PER_TURN):
            position = fetching.num_done - fetching.first_got
            if position == len(ticket.keys):
                self._release(fetching)
                return
            if position in ticket.withheld:
                self._wait_for_withheld(fetching)
                return
            block = ticket.blocks[position] if position < len(ticket.blocks) else None
            if block is None:
                raise NotFound(f"the store does not have the embeddings{ticket.failure and ': '}{ticket.failure}")
            self._store.copy_out(block, self._memory.chunk(fetching.fetch.chunks[fetching.num_done]))
            fetching.num_done += 1
            if fetching.withheld_since is not None:
                fetching.withheld_since = None
                self._patience.on_arrival()
            if fetching.num_done == len(fetching.keys):
                return

    def _wait_for_withheld(self, fetching: _Fetching) -> None:
        """Ask again in a moment, for a bounded time.

        Raises:
            NotFound: it has waited long enough.
        """
        now = self._clock.now()
        self._release(fetching)
        fetching.withheld_since = now if fetching.withheld_since is None else fetching.withheld_since
        if self._patience.is_over(fetching.withheld_since):
            raise NotFound(f"the store withholds the embeddings, as it has done for {WITHHELD_S:g} s")
        fetching.retry_at = now + RETRY_S

    def _end_fetch(self, fetching: _Fetching, error: KVFerryError | None) -> None:
        self._release(fetching)
        identifier = fetching.fetch.identifier
        del self._fetches[identifier]
        info = None if error is None else ErrorInfo.of(error)
        self._reports.append(FetchEnded(identifier, info, was_aborted=fetching.is_aborted))

    def _release(self, fetching: _Fetching) -> None:
        if fetching.ticket is not None:
            self._store.release(fetching.ticket)
            fetching.ticket = None

    # ---- saves and checks --------------------------------------------------------------------------------------------

    def _begin_save(self, save: SaveEmbeddings) -> None:
        """Seal the chunks and put them."""
        size = self._layout.chunk_bytes
        keys = self._keys(save.identifier, save.num_embeds)
        chunks = [save.content[index * size : (index + 1) * size] for index in range(len(keys))]
        seals = [self._seal(key, rows_in_chunk(save.num_embeds, i), chunks[i]) for i, key in enumerate(keys)]
        digest = self._digester.digest(save.content[: self._layout.num_bytes(save.num_embeds)])
        seal = self._layout.seal(save.identifier, save.num_embeds, digest)
        self._saves.append(_Saving(save, seal, self._store.put(keys, chunks, seals)))

    def _advance_save(self, saving: _Saving) -> bool:
        put, lookup, now = saving.put, saving.lookup, self._clock.now()
        if not put.is_done or (lookup is not None and not lookup.is_done):
            return False
        if saving.waits_since is None:
            saving.waits_since = now
        gives_up_at = saving.waits_since + OTHERS_SAVE_S
        is_stored = _are_all(put.stored, put) or (lookup is not None and _are_all(lookup.hits, lookup))
        if not is_stored and not put.failure and saving.asked_at < gives_up_at:
            if now < saving.retry_at:
                return False
            saving.lookup, saving.asked_at = self._store.lookup(put.keys), now
            pause_s = max(RETRY_S, now - saving.waits_since)  # doubles: it may be room that the store lacks
            saving.retry_at = min(now + pause_s, gives_up_at)
            return True
        self._saves.remove(saving)
        self._report_save(saving, is_stored=is_stored)
        return True

    def _report_save(self, saving: _Saving, *, is_stored: bool) -> None:
        identifier = saving.save.identifier
        self.counts["stored" if is_stored else "refused"] += 1
        if is_stored:
            self._reports.append(OfferEnded(identifier, self._source(saving.seal)))
        else:
            error = Unavailable(f"the store has not taken the embeddings{saving.put.failure and ': '}{saving.put.failure}")
            self._reports.append(OfferEnded(identifier, error=ErrorInfo.of(error)))

    def _advance_check(self) -> bool:
        if not self._checks or not self._checks[0].lookup.is_done:
            return False
        checking = self._checks.popleft()
        if not _are_all(checking.lookup.hits, checking.lookup):
            self._reports.append(Forgotten(checking.seal.identifier))
        return True

    def _source(self, seal: ECSeal) -> ECSource:
        holder = self._holder
        return ECSource(seal=seal, connector=NAME, engine_id=holder.engine_id, incarnation=holder.incarnation, lease_ms=0)

    def _seal(self, key: StoreKey, num_rows: int, chunk: memoryview) -> bytes:
        return encode_seal(
            Seal(
                incarnation=self._holder.incarnation,
                generation=_ANY_GENERATION,
                group_id=key.group_id,
                block_hash=key.block_hash,
                num_tokens=num_rows,
                layout_version=self._layout_version,
                digest=self._chunk_digester.digest(chunk),
            )
        )

    def _keys(self, identifier: bytes, num_embeds: int) -> list[StoreKey]:
        hashes = self._layout.chunk_hashes(identifier, num_embeds)
        assert len(hashes) == num_chunks(num_embeds)
        return [StoreKey(block_hash, self._layout_key, 0) for block_hash in hashes]


def _are_all(flags: Sequence[bool], ticket: Ticket) -> bool:
    """Return whether a ticket has a flag for each key, and all are set: a lost store answers with none."""
    return len(flags) == len(ticket.keys) and all(flags)
