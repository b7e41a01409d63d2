"""Moves blocks between the arena and the tiers below it: locates, promotes (loads) and saves them.

This module owns the queries that wait for a tier, the promotions (one per block, shared by all queries that need it) and the
saves. It knows no messages and does no I/O: it makes jobs (``kvstore.tiers.base``) and is informed when they are done.

Write-through: a new block is saved at once and may be evicted at any time. Write-back: a new block is dirty and is saved when
too few slots are free or clean. A block that every tier has refused becomes clean too, so that it can be evicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import Full
from kvstore.memory import MemoryTier, Resident
from kvstore.tiers.base import LoadJob, LocateJob, SaveJob, Tier, TierJob

CLEAN_SHARE = 0.25  # of the slots that write-back keeps free or clean, at least one
MAX_LOADING_SHARE = 0.5  # of the slots: promotions of all clients together
MAX_SAVE_JOBS = 64  # in flight in each tier; their blocks are pinned, so also at most a quarter of the slots


@dataclass(slots=True, eq=False)
class Query:
    """A lookup or a get of some keys.

    ``max_pins`` is the number of blocks that it may still pin; a lookup pins none. A client uses blocks in the order of its
    keys, so an earlier key gets a pin and a slot before a later one.
    """

    owner: object
    number: int
    keys: Sequence[bytes]
    max_pins: int = 0
    is_get: bool = False
    is_over: bool = False  # abandoned
    hits: list[bool] = field(default_factory=list)
    residents: list[Resident | None] = field(default_factory=list)  # pinned
    tiers: list[int | None] = field(default_factory=list)  # where the block is, if not in memory
    num_waiting: int = 0  # jobs in flight


@dataclass(slots=True, eq=False)
class _Promotion:
    resident: Resident
    job: LoadJob
    waiters: list[tuple[Query, int]] = field(default_factory=list)  # with the index of the key


@dataclass(slots=True, eq=False)
class _Location:
    query: Query
    indices: list[int]


@dataclass(slots=True, eq=False)
class _Save:
    resident: Resident
    jobs: list[SaveJob]
    num_jobs: int  # in flight


class Tiering:
    """Moves blocks between the arena and ``tiers``, the fastest first."""

    def __init__(self, memory: MemoryTier, tiers: Sequence[Tier], *, write_back: bool) -> None:
        self._memory = memory
        self._tiers = tiers
        self._write_back = write_back
        self._max_loads = max(1, int(memory.arena.num_slots * MAX_LOADING_SHARE))
        self._max_saves = max(1, min(MAX_SAVE_JOBS, memory.arena.num_slots // 4))
        self._promotions: dict[bytes, _Promotion] = {}
        self._locations: dict[LocateJob, _Location] = {}
        self._saves: dict[bytes, _Save] = {}
        self._backlog: dict[bytes, Resident] = {}  # write-through: in memory, not saved yet, may be evicted
        self._num_save_jobs = [0] * len(tiers)
        self._jobs: list[TierJob] = []
        self.num_dropped_saves = 0
        if tiers:
            memory.on_forgotten = self._on_forgotten

    @property
    def num_loading(self) -> int:
        """Number of promotions in flight."""
        return len(self._promotions)

    @property
    def num_saving(self) -> int:
        """Number of blocks that are being saved or wait to be saved."""
        return len(self._saves) + len(self._backlog)

    def take_jobs(self) -> list[TierJob]:
        """Return the jobs made since the last call."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def start(self, query: Query) -> bool:
        """Start a query; return True if it is answered already."""
        asked: dict[int, list[int]] = {}
        query.residents = [None] * len(query.keys)
        query.tiers = [None] * len(query.keys)
        query.hits = [False] * len(query.keys)
        num_first = query.max_pins  # keys that get a pin even if blocks of others are in lower tiers
        for index, key in enumerate(query.keys):
            if self._memory.find(key) is not None:
                query.hits[index] = True
                if index < num_first:
                    self._pin(query, index)
                continue
            query.tiers[index] = tier = self._tier_that_knows(key)
            query.hits[index] = tier is not None
            for candidate, below in enumerate(self._tiers):
                if tier is None and below.knows(key) is None:
                    asked.setdefault(candidate, []).append(index)
        for tier, indices in asked.items():
            job = LocateJob(tier, [query.keys[index] for index in indices])
            self._locations[job] = _Location(query, indices)
            self._jobs.append(job)
            query.num_waiting += 1
        return query.num_waiting == 0 and self._fetch(query)

    def abandon(self, query: Query) -> None:
        """End a query. Jobs that only this query needs are skipped if their tier has not started them."""
        query.is_over = True
        if not query.num_waiting:
            return
        for job, location in self._locations.items():
            job.is_wanted &= location.query is not query
        for promotion in filter(None, map(self._promotions.get, query.keys)):
            promotion.job.is_wanted = any(not waiting.is_over for waiting, _ in promotion.waiters)

    def on_done(self, job: TierJob) -> list[Query]:
        """Apply the result of a job; return the queries that it completes."""
        match job:
            case LocateJob():
                return self._on_located(job)
            case LoadJob():
                return self._on_loaded(job)
            case SaveJob():
                self._on_saved(job)
        return []

    def on_new(self, resident: Resident) -> None:
        """Save a block that a client has just committed, now (write-through) or later (write-back)."""
        if self._write_back:
            self._demote()
        elif not self._save(resident):
            self._backlog[resident.key] = resident

    @property
    def makes_dirty(self) -> bool:
        """Whether new blocks are dirty: they must be saved before they can be evicted."""
        return self._write_back and bool(self._tiers)

    def flush(self) -> None:
        """Save the dirty blocks. Call it again after each finished job until no block is dirty."""
        for resident in list(self._memory.dirty()):
            if not self._save(resident):
                return

    def _tier_that_knows(self, key: bytes) -> int | None:
        return next((index for index, tier in enumerate(self._tiers) if tier.knows(key)), None)

    def _on_located(self, job: LocateJob) -> list[Query]:
        location = self._locations.pop(job)
        query = location.query
        query.num_waiting -= 1
        for index, is_found in zip(location.indices, job.found, strict=False):  # empty if the tier failed
            if is_found:
                query.hits[index] = True
                query.tiers[index] = job.tier if query.tiers[index] is None else min(job.tier, query.tiers[index] or 0)
        is_answered = query.num_waiting == 0 and not query.is_over and self._fetch(query)
        return [query] if is_answered else []

    def _fetch(self, query: Query) -> bool:
        """Start the promotions that a get needs; return True if it waits for none."""
        if query.is_get:
            for index in range(len(query.keys)):
                if query.residents[index] is None and not self._pin(query, index) and query.tiers[index] is not None:
                    self._promote(query, index)
        return query.num_waiting == 0

    def _pin(self, query: Query, index: int) -> bool:
        """Pin a block that is in memory for a get."""
        resident = self._memory.find(query.keys[index])
        if resident is None or query.max_pins <= 0:
            return False
        query.max_pins -= 1
        query.residents[index] = resident
        self._memory.pin(resident)
        return True

    def _promote(self, query: Query, index: int) -> None:
        key, tier = query.keys[index], query.tiers[index]
        if tier is None or query.max_pins <= 0 or self._memory.find(key) is not None:
            return
        promotion = self._promotions.get(key)
        if promotion is None:
            if self._memory.is_incoming(key):  # a client is writing it
                return
            if len(self._promotions) >= self._max_loads:
                query.hits[index] = True
                return
            resident = self._reserve(query, index)
            if resident is None:
                return
            job = LoadJob(tier, key, self._memory.content(resident))
            promotion = self._promotions[key] = _Promotion(resident, job)
            self._jobs.append(job)
        promotion.job.is_wanted = True
        promotion.waiters.append((query, index))
        query.num_waiting += 1
        query.max_pins -= 1

    def _reserve(self, query: Query, index: int) -> Resident | None:
        """Return a slot for a key, if need be in place of a later block of the query; None if every other slot is in use."""
        while True:
            try:
                return self._memory.reserve(query.keys[index], self._memory.arena.slot_bytes)
            except Full:
                if not self._unpin_later(query, index):
                    return None

    def _unpin_later(self, query: Query, index: int) -> bool:
        """Unpin the last block of a query after this key; False if none is pinned."""
        for later in reversed(range(index + 1, len(query.keys))):
            resident = query.residents[later]
            if resident is not None:
                query.residents[later] = None
                query.max_pins += 1
                self._memory.unpin(resident)
                return True
        return False

    def _on_loaded(self, job: LoadJob) -> list[Query]:
        if job.is_skipped and job.is_wanted:  # a new query needs it, and the tier has just skipped it
            self._jobs.append(job)
            return []
        if job.loaded is None and self._load_from_next(self._promotions[job.key]):
            return []
        promotion = self._promotions.pop(job.key)
        resident = promotion.resident
        if job.loaded is None:
            self._memory.abandon(resident)
            self._memory.give_back(resident)
        else:
            self._memory.resize(resident, job.loaded.num_bytes)
            self._memory.commit(resident, job.loaded.seal)
        answered = []
        for query, index in promotion.waiters:
            query.num_waiting -= 1
            query.max_pins += 1
            if query.is_over:
                continue
            query.hits[index] = job.loaded is not None
            self._pin(query, index)
            if query.num_waiting == 0:
                answered.append(query)
        return answered

    def _load_from_next(self, promotion: _Promotion) -> bool:
        """Load a block from the next tier that may have it; False if there is none, or no query waits for the block."""
        failed = promotion.job
        below = range(failed.tier + 1, len(self._tiers))
        tier = next((index for index in below if self._tiers[index].knows(failed.key) is not False), None)
        if tier is None or all(query.is_over for query, _ in promotion.waiters):
            return False
        promotion.job = LoadJob(tier, failed.key, failed.target)
        self._jobs.append(promotion.job)
        return True

    def _save(self, resident: Resident) -> bool:
        """Save a block in every tier that lacks it; return False if too many saves are in flight, or one of a dropped block."""
        save = self._saves.get(resident.key)
        if save is not None:
            return save.resident is resident
        takers = [index for index, tier in enumerate(self._tiers) if tier.knows(resident.key) is not True]
        if any(self._num_save_jobs[index] >= self._max_saves for index in takers):
            return False
        if not takers:
            self._memory.mark_clean(resident)
            return True
        self._memory.pin(resident)
        content = self._memory.content(resident).toreadonly()
        jobs = [SaveJob(index, resident.key, resident.seal, content) for index in takers]
        self._saves[resident.key] = _Save(resident, jobs, len(jobs))
        for index in takers:
            self._num_save_jobs[index] += 1
        self._jobs += jobs
        return True

    def _on_saved(self, job: SaveJob) -> None:
        self._num_save_jobs[job.tier] -= 1
        save = self._saves[job.key]
        save.num_jobs -= 1
        if save.num_jobs == 0:
            del self._saves[job.key]
            self._memory.mark_clean(save.resident)
            self._memory.unpin(save.resident)
            if self._write_back:
                self._demote()
            else:
                self._save_backlog()

    def _save_backlog(self) -> None:
        while self._backlog:
            key, resident = next(iter(self._backlog.items()))
            if not self._save(resident):
                return
            del self._backlog[key]

    def _on_forgotten(self, key: bytes) -> None:
        """Save a block no more that has left memory before its turn, or has been dropped as corrupt before its save."""
        save = self._saves.get(key)
        for job in save.jobs if save is not None else ():
            job.is_wanted = False
        if self._backlog.pop(key, None) is not None:
            self.num_dropped_saves += 1

    def _demote(self) -> None:
        """Write-back: save the next blocks to be evicted while too few slots are free or clean."""
        if not self._tiers:
            return
        num_slots = self._memory.arena.num_slots
        max_dirty = num_slots - math.ceil(CLEAN_SHARE * num_slots)
        num_wanted = self._memory.num_dirty - max_dirty - len(self._saves)
        for resident in self._memory.dirty():
            if num_wanted <= 0:
                return
            if resident.key not in self._saves:
                num_wanted -= 1
                if not self._save(resident):
                    return
