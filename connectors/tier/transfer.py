"""Moves blocks between the pool and a tier, a few blocks at a time. Loads go before saves.

It owns the loads and saves in flight. It has no thread and never waits: ``step`` does the work that is possible now and returns
whether there was any. Every load ends, even if the tier fails, since every ticket ends.

    load   asked ──ticket──▶ copied and checked, block by block ──▶ LoadEnded
             ◀── withheld by the tier: asked again after a moment
    save   asked ──ticket──▶ those the tier lacks: sealed, put ──ticket──▶ SaveEnded, for each put

If the tier's memory is pinned, blocks are copied to the device directly, and the digest of the copy on the device is compared
with the seal. Otherwise a copy in host memory is verified before it is copied to the pool.

A missing block ends the load of its group, because the blocks after it cannot be used. A corrupt block does not: the load goes
on, so that every corrupt block is found and stored again. A load ends by its deadline.

The seal of a saved block is read before its bytes, and again when their digest is computed. A block that was written in between
is not put, so a digest never covers other bytes than its seal names. A block that is written after that does not match the
digest stored with it, and readers reject it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connectors.pool_access import PoolAccess
from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.tier.contents import TierContents
from connectors.tier.messages import Report, SaveEnded, SaveItem, SavesAreSlow, TierConnectorMetadata, TierLoad
from connectors.withheld import WITHHELD_S, WithheldPatience
from core.clock import Clock
from core.digest import BlockDigester
from core.errors import CorruptBlock, KVFerryError, NotFound, StaleBlock, TransferTimeout
from core.kv.seals import Seal, SealTable, decode_seal, encode_seal
from core.wire.messages import ErrorInfo, TransferUsage
from kvstore.base import BlockStore, GetTicket, LookupTicket, PutTicket, StoredBlock, Ticket
from kvstore.messages import MAX_KEYS
from kvstore.seal_check import check_seal

RETRY_S = 0.005  # before it asks again for blocks that the tier has and could not pin
SLOW_S = 0.1  # without progress, and saves are slow: preempting is better than waiting for their blocks
BLOCKS_PER_TURN = 4  # of one load, before the others and new commands get their turn
GET_BYTES = 64 << 20  # asked for at a time: a store pins only so much for one client
_ANY_GENERATION = 1  # of a block in a tier: it is never rewritten there


@dataclass(slots=True)
class _Load:
    """A load in flight. ``tickets`` are gets of consecutive blocks, with the index of their first; blocks before ``num_done``
    are copied or failed. ``errors`` has the failed blocks and those after them that are not needed any more.
    """

    job: TierLoad
    started_at: float
    tickets: deque[tuple[int, GetTicket]] = field(default_factory=deque)
    num_asked: int = 0
    num_done: int = 0
    retry_at: float = 0.0  # no question before
    withheld_since: float | None = None  # the tier withholds what is next
    errors: dict[int, KVFerryError] = field(default_factory=dict)
    is_aborted: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.job.keys)


@dataclass(slots=True)
class _Save:
    """A save in flight: first a lookup of the blocks that the tier lacks, then puts of some blocks at a time."""

    items: tuple[SaveItem, ...]
    lookup: LookupTicket
    missing: deque[SaveItem] | None = None  # not put yet; None until the question is answered
    put: PutTicket | None = None
    putting: tuple[SaveItem, ...] = ()


class TierTransfer:
    """Moves blocks of one pool. All calls come from one thread. ``name`` is that of the connector.

    ``contents`` receives what the tier has; it may be replaced before the first call.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        pool: PoolAccess,
        seals: SealTable,
        block_bytes: int,
        clock: Clock,
    ) -> None:
        self._name = name
        self.contents = TierContents()
        self._store = store
        self._pool = pool
        self._seals = seals
        self._block_bytes = block_bytes
        self._blocks_per_get = min(max(1, GET_BYTES // block_bytes), MAX_KEYS)
        self._digester = BlockDigester(block_bytes)
        self._clock = clock
        self._loads: dict[str, _Load] = {}
        self._saves: deque[_Save] = deque()
        self._saved_at = 0.0  # when the saves last came further, or began
        self._is_slow = False  # and it was said
        self._patience = WithheldPatience(clock)
        self._reports: list[Report] = []
        self.counts: Counter[str] = Counter()

    @property
    def is_waiting(self) -> bool:
        """True if a ticket is open."""
        return bool(self._loads or self._saves)

    def submit(self, metadata: TierConnectorMetadata) -> None:
        """Accept the orders of a step."""
        for job in metadata.loads:
            assert job.request_id not in self._loads, f"{job.request_id} loads twice"
            self._loads[job.request_id] = _Load(job, self._clock.now())
        for request_id in metadata.aborts:
            load = self._loads.get(request_id)
            if load is not None:
                load.is_aborted = True
        if metadata.saves:
            items = tuple(metadata.saves)
            if not self._saves:
                self._saved_at = self._clock.now()
            self._saves.append(_Save(items, self._store.lookup([item.key for item in items])))

    def take_reports(self) -> list[Report]:
        """Return the results since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def step(self) -> bool:
        """Do one piece of work; False if all of it waits for the tier. Saves wait while a load can continue."""
        has_loaded = [self._advance_load(load) for load in list(self._loads.values())]
        if any(has_loaded) or not self._advance_save():
            self._note_slowness()
            return any(has_loaded)
        self._saved_at, self._is_slow = self._clock.now(), False
        return True

    def _note_slowness(self) -> None:
        """Report slow saves if none has made progress for a while, because of the tier or of loads."""
        if self._saves and not self._is_slow and self._clock.now() - self._saved_at >= SLOW_S:
            self._is_slow = True
            self._reports.append(SavesAreSlow())

    def close(self) -> None:
        """Release the blocks pinned in the tier; nothing is reported after this."""
        for load in self._loads.values():
            self._release(load)
        self._pool.finish_writes()

    # ---- loads -------------------------------------------------------------------------------------------------------

    def _advance_load(self, load: _Load) -> bool:
        if load.is_aborted or load.num_done == load.num_blocks:
            self._end_load(load)
            return True
        now = self._clock.now()
        if now >= load.job.deadline:
            error = TransferTimeout(f"{self._name}: {load.num_blocks - load.num_done} blocks are not here at the deadline")
            load.errors |= {index: error for index in range(load.num_done, load.num_blocks) if index not in load.errors}
            self._end_load(load)
            return True
        if now >= load.retry_at:
            self._ask_for_more(load)
        if not load.tickets or not load.tickets[0][1].is_done:
            return False
        self._load_some(load, *load.tickets[0])
        return True

    def _ask_for_more(self, load: _Load) -> None:
        """Keep two gets open: the next part is loaded while one is copied."""
        while load.num_asked < load.num_blocks and len(load.tickets) < 2:
            keys = load.job.keys[load.num_asked : load.num_asked + self._blocks_per_get]
            load.tickets.append((load.num_asked, self._store.get(keys)))
            load.num_asked = _next_wanted(load, load.num_asked + len(keys))

    def _load_some(self, load: _Load, first: int, ticket: GetTicket) -> None:
        """Copy the next blocks of an answered get."""
        end = first + len(ticket.keys)
        landed: dict[int, StoredBlock] = {}
        for _ in range(BLOCKS_PER_TURN):
            if load.num_done - first in ticket.withheld:
                self._check_landed(load, landed)
                self._wait_for_withheld(load)
                return
            self._load_block(load, load.num_done, ticket, landed)
            if load.withheld_since is not None:
                load.withheld_since = None
                self._patience.on_arrival()
            load.num_done = _next_wanted(load, load.num_done + 1)
            load.num_asked = max(load.num_asked, load.num_done)
            if load.num_done >= end:
                break
        self._check_landed(load, landed)
        while load.tickets and load.num_done >= load.tickets[0][0] + len(load.tickets[0][1].keys):
            self._store.release(load.tickets.popleft()[1])

    def _wait_for_withheld(self, load: _Load) -> None:
        """Ask again in a moment, for a bounded time."""
        now = self._clock.now()
        self.counts["withheld_gets"] += 1
        self._release(load)
        load.withheld_since = now if load.withheld_since is None else load.withheld_since
        if self._patience.is_over(load.withheld_since):
            self._end_group(
                load, load.num_done, NotFound(f"{self._name}: the tier withholds it, as it has done for {WITHHELD_S:g} s")
            )
            load.num_done = _next_wanted(load, load.num_done)
        load.num_asked, load.retry_at = load.num_done, now + RETRY_S

    def _load_block(self, load: _Load, index: int, ticket: GetTicket, landed: dict[int, StoredBlock]) -> None:
        """Copy and verify a block, or add it to ``landed`` for verification on the device."""
        position = index - load.tickets[0][0]
        block = ticket.blocks[position] if position < len(ticket.blocks) else None
        if block is None:
            error = NotFound(f"{self._name}: the block is not there{ticket.failure and ': '}{ticket.failure}")
            self._end_group(load, index, error)
            if not ticket.failure:
                self.contents.remove([load.job.keys[index]])
        elif self._pool.write_from(load.job.block_ids[index], block.content):
            landed[index] = block
        else:
            self._copy_checked(load, index, block)

    def _copy_checked(self, load: _Load, index: int, block: StoredBlock) -> None:
        try:
            self._pool.write(load.job.block_ids[index], lambda target: self._store.copy_out(block, target))
        except (CorruptBlock, StaleBlock) as error:
            load.errors[index] = error

    def _check_landed(self, load: _Load, landed: Mapping[int, StoredBlock]) -> None:
        """Verify landed blocks; one that fails is copied again through host memory, which finds the error."""
        if not landed:
            return
        self._pool.finish_writes()
        digests = self._pool.digests([load.job.block_ids[index] for index in landed])
        for (index, block), digest in zip(landed.items(), digests, strict=True):
            if not _is_of(block, digest):
                self.counts["blocks_copied_again"] += 1
                self._copy_checked(load, index, block)

    @staticmethod
    def _end_group(load: _Load, index: int, error: KVFerryError) -> None:
        """Mark a block and those after it in its group as failed, because they cannot be used without it."""
        keys = load.job.keys
        group_id = keys[index].group_id
        load.errors |= {later: error for later in range(index, load.num_blocks) if keys[later].group_id == group_id}

    def _end_load(self, load: _Load) -> None:
        self._pool.finish_writes()
        self._release(load)
        job = load.job
        del self._loads[job.request_id]
        if load.is_aborted:
            self.counts["aborted_loads"] += 1
            self._reports.append(LoadEnded(job.request_id, None))
            return
        num_loaded = len(job.keys) - len(load.errors)
        self.counts["loads"] += 1
        self.counts["loaded_blocks"] += num_loaded
        self.counts["failed_blocks"] += len(load.errors)
        invalid_block_ids = tuple(job.block_ids[index] for index in sorted(load.errors))
        error = load.errors[min(load.errors)] if load.errors else None
        self._reports.append(
            LoadEnded(
                job.request_id,
                usage=TransferUsage(
                    transport=self._name,
                    transferred_tokens=_num_loaded_tokens(load),
                    transferred_bytes=num_loaded * self._block_bytes,
                    transfer_ms=1000 * (self._clock.now() - load.started_at),
                    verified_blocks=num_loaded,
                ),
                error=None if error is None else ErrorInfo.of(error),
                invalid_block_ids=() if error is None else invalid_block_ids if num_loaded else ALL_BLOCKS,
            )
        )

    def _release(self, load: _Load) -> None:
        while load.tickets:
            self._store.release(load.tickets.popleft()[1])

    # ---- saves -------------------------------------------------------------------------------------------------------

    def _advance_save(self) -> bool:
        if not self._saves:
            return False
        save = self._saves[0]
        if save.missing is None:
            if not save.lookup.is_done:
                return False
            hits = _answers(save.lookup, save.lookup.hits)
            save.missing = deque(item for item, is_hit in zip(save.items, hits, strict=True) if not is_hit)
            known = [item for item, is_hit in zip(save.items, hits, strict=True) if is_hit]
            self.contents.answer(save.lookup.keys, save.lookup.hits)
            self.counts["known_blocks"] += len(known)
            self._end_saves(known)
        elif save.put is not None:
            if not save.put.is_done:
                return False
            self._check_put(save, save.put)
        if save.missing:
            self._put_some(save)
        elif save.put is None:
            self._saves.popleft()
        return True

    def _end_saves(self, items: Sequence[SaveItem]) -> None:
        """Report blocks that are not read any more, before the rest of their save has ended."""
        if items:
            self._reports.append(SaveEnded(tuple(item.block_id for item in items)))

    def _put_some(self, save: _Save) -> None:
        """Seal and put as many blocks as may be read at a time."""
        assert save.missing is not None
        chosen = [save.missing.popleft() for _ in range(min(len(save.missing), self._pool.max_reads))]
        sealed = [(item, seal) for item in chosen if (seal := self._seal_of(item)) is not None]
        contents = self._pool.read([item.block_id for item, _ in sealed]) if sealed else []
        digests = self._digests_of(sealed, contents)
        rows = [_portable(seal, digest) for (_, seal), digest in zip(sealed, digests, strict=True)]
        good = [
            (item, content, row)
            for (item, seal), content, row in zip(sealed, contents, rows, strict=True)
            if self._seal_of(item) == seal
        ]
        save.putting = tuple(item for item, _, _ in good)
        stale = [item for item in chosen if item not in save.putting]
        self.counts["stale_blocks"] += len(stale)
        self._end_saves(stale)
        if good:
            save.put = self._store.put(
                [item.key for item in save.putting], [content for _, content, _ in good], [row for _, _, row in good]
            )

    def _check_put(self, save: _Save, put: PutTicket) -> None:
        for item, is_stored in zip(save.putting, _answers(put, put.stored), strict=True):
            if self._seal_of(item) is None:
                self.counts["stale_blocks"] += 1
            else:
                self.counts["saved_blocks" if is_stored else "refused_blocks"] += 1
        self.contents.store([key for key, is_stored in zip(put.keys, _answers(put, put.stored), strict=True) if is_stored])
        self._end_saves(save.putting)
        save.put, save.putting = None, ()

    def _seal_of(self, item: SaveItem) -> Seal | None:
        """Return the seal of a block if it still has the generation to save."""
        seal = decode_seal(self._seals.row(item.block_id))
        if seal is None or seal.generation != item.generation:
            return None
        return seal if (seal.block_hash, seal.group_id) == (item.key.block_hash, item.key.group_id) else None

    def _digests_of(self, sealed: Sequence[tuple[SaveItem, Seal]], contents: Sequence[memoryview]) -> Sequence[int]:
        """Return the digests of blocks: those in their seals, or computed now, in one batch on a device.

        On a device the digest covers the blocks in the pool, not the bytes read; they are equal while the seal is unchanged.
        """
        found = {item.block_id: seal.digest for item, seal in sealed if seal.digest is not None}
        lacking = [index for index, (item, _) in enumerate(sealed) if item.block_id not in found]
        block_ids = [sealed[index][0].block_id for index in lacking]
        if self._pool.has_digests:
            found |= zip(block_ids, self._pool.digests(block_ids), strict=True)
        else:
            found |= {sealed[index][0].block_id: self._digester.digest(contents[index]) for index in lacking}
        return [found[item.block_id] for item, _ in sealed]


def _portable(seal: Seal, digest: int) -> bytes:
    """Return the seal that is stored with the bytes: with a digest, and without a generation."""
    return encode_seal(
        Seal(
            incarnation=seal.incarnation,
            generation=_ANY_GENERATION,
            group_id=seal.group_id,
            block_hash=seal.block_hash,
            num_tokens=seal.num_tokens,
            layout_version=seal.layout_version,
            digest=digest,
        )
    )


def _is_of(block: StoredBlock, digest: int) -> bool:
    """Return whether the digest and the seal match the block and its slot still holds it."""
    try:
        return check_seal(block.key, block.seal).digest == digest and block.is_current()
    except StaleBlock:
        return False


def _answers(ticket: Ticket, answers: Sequence[bool]) -> Sequence[bool]:
    """Return the answers of a ticket; all False if it was not answered."""
    return answers if len(answers) == len(ticket.keys) else [False] * len(ticket.keys)


def _next_wanted(load: _Load, index: int) -> int:
    """Return the first block from ``index`` on that is still needed."""
    while index in load.errors:
        index += 1
    return index


def _num_loaded_tokens(load: _Load) -> int:
    """Return the number of usable tokens: that of the group with the smallest loaded share."""
    if not load.errors:
        return load.job.num_tokens
    wanted = Counter(key.group_id for key in load.job.keys)
    bad = Counter(load.job.keys[index].group_id for index in load.errors)
    return min(load.job.num_tokens * (wanted[group_id] - bad[group_id]) // wanted[group_id] for group_id in wanted)
