"""What this worker reports of its prefix cache to each router: the changes since the last report, or everything.

Fed by the engine's thread with the pool's events, and by a tier below the pool with its own; read by the event loop
(``core.worker.content_reports``). Reports of one router are numbered from 0 and hold net changes: a block that came and went in
between is in none. The first report of a registration is a snapshot, and so is the next one after a router asks for it. Memory
is bounded: if more has changed than a report holds, the next one is a snapshot.

The blocks of each kind of layer are a *part* (``core.wire.contents.ContentPart``). Several groups of layers of one kind keep
the same blocks; a block counts while all of them have it. Blocks of a tier are a part of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.kv.events import BlockRemoved, BlockStored, KVCacheEvent
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheGroup, KVCacheSpec, SlidingWindowSpec
from core.wire.contents import DEVICE, KEY_BYTES, MAX_KEYS, ContentPart, ContentReport

POOL = ContentPart()  # of a model with full attention


@dataclass(frozen=True, slots=True)
class FeedPart:
    """A part, and the KV cache groups whose blocks it has; none for a tier."""

    part: ContentPart
    group_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Held:
    """The keys of one part, each with the groups that have it as bits; it counts if all do."""

    part: FeedPart
    groups_of: dict[bytes, int] = field(default_factory=dict)
    num_held: int = 0

    @property
    def all_groups(self) -> int:
        return (1 << max(1, len(self.part.group_ids))) - 1

    def has(self, key: bytes) -> bool:
        return self.groups_of.get(key, 0) == self.all_groups

    def keys(self) -> list[bytes]:
        everything = self.all_groups
        return [key for key, groups in self.groups_of.items() if groups == everything]

    def set(self, key: bytes, groups: int) -> bool:
        """Set the groups that have a key; return True if it counts now and did not, or the other way round."""
        before, everything = self.groups_of.get(key, 0), self.all_groups
        if groups:
            self.groups_of[key] = groups
        elif before:
            del self.groups_of[key]
        change = (groups == everything) - (before == everything)
        self.num_held += change
        return change != 0


@dataclass(slots=True)
class _Router:
    """What one router has not been told. ``is_behind`` = it needs a snapshot. ``num_parts`` = as many as it understands."""

    num_parts: int
    num_sent: int = 0
    is_behind: bool = True
    changed: dict[tuple[int, bytes], None] = field(default_factory=dict)  # part and key, in order of their first change


class ContentFeed:
    """The contents of one worker, and each router's share of the news. Any thread."""

    def __init__(self, engine_id: str, incarnation: int, parts: Sequence[FeedPart] = (FeedPart(POOL, (0,)),)) -> None:
        self._engine_id, self._incarnation = engine_id, incarnation
        self._lock = threading.Lock()
        self._parts = [_Held(part) for part in parts]
        self._routers: dict[str, _Router] = {}

    @property
    def parts(self) -> tuple[ContentPart, ...]:
        """The parts, as a registration has them."""
        return tuple(held.part.part for held in self._parts)

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Take in what the pool did, in order. See ``KVEventFollower``."""
        if not events:
            return
        with self._lock:
            for happened in events:
                match happened:
                    case BlockStored() | BlockRemoved():
                        self._follow(happened)
                    case _:
                        self._clear_pool()

    def publish_tier(self, medium: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Take in block hashes that a tier has now, or has no more; ignored without a part of this medium.

        Beyond the part's ``num_blocks`` the oldest are taken to be evicted.
        """
        with self._lock:
            number = next((number for number, held in enumerate(self._parts) if held.part.part.medium == medium), None)
            if number is None or medium == DEVICE:
                return
            held = self._parts[number]
            self._set(number, [(key_of(value), 0) for value in removed])
            keys = [key_of(value) for value in stored]
            for key in keys:
                held.groups_of[key] = held.groups_of.pop(key, 0)  # the newest is last
            self._set(number, [(key, 1) for key in keys])
            excess = len(held.groups_of) - held.part.part.num_blocks
            if held.part.part.num_blocks and excess > 0:
                self._set(number, [(key, 0) for key, _ in zip(held.groups_of, range(excess), strict=False)])

    def close(self) -> None:
        """See ``KVEventFollower``."""

    def start(self, router: str, *, takes_parts: bool = True) -> None:
        """Begin anew with a router: report 0 is a snapshot. Without ``takes_parts`` its reports cover the first part only."""
        with self._lock:
            self._routers[router] = _Router(len(self._parts) if takes_parts else 1)

    def stop(self, router: str) -> None:
        """Report no more to this router. Idempotent."""
        with self._lock:
            self._routers.pop(router, None)

    def request_snapshot(self, router: str) -> None:
        """Make the next report of this router a snapshot; the numbers go on."""
        with self._lock:
            if router in self._routers:
                self._routers[router].is_behind = True

    def num_sent(self, router: str) -> int:
        """Return how many reports this router should have."""
        with self._lock:
            return self._routers[router].num_sent if router in self._routers else 0

    def has_news(self, router: str) -> bool:
        """Return True if ``take_reports`` has something for this router."""
        with self._lock:
            state = self._routers.get(router)
            return state is not None and (state.is_behind or bool(state.changed))

    def contents(self, part: int = 0) -> set[bytes]:
        """Return the keys of all blocks of a part. Slow; for checks."""
        with self._lock:
            return set(self._parts[part].keys())

    def take_reports(self, router: str) -> list[ContentReport]:
        """Return what this router has not been told, in order; nothing if there is no news."""
        with self._lock:
            state = self._routers.get(router)
            if state is None or not (state.is_behind or state.changed):
                return []
            reports: list[ContentReport] = []
            for number in range(state.num_parts):
                held = self._parts[number]
                if state.is_behind:
                    stored, removed = held.keys(), []
                else:
                    changed = [key for part, key in state.changed if part == number]
                    stored = [key for key in changed if held.has(key)]
                    removed = [key for key in changed if not held.has(key)]
                if stored or removed or (state.is_behind and not number):
                    reports += self._write(state, number, stored, removed)
            state.is_behind = False
            state.changed = {}
            return reports

    def _write(self, state: _Router, part: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> list[ContentReport]:
        """Return reports of at most ``MAX_KEYS`` keys each; of a snapshot only the first one says so."""
        # Removals first, so that the router never counts more blocks than the pool has.
        changes = [(key, False) for key in removed] + [(key, True) for key in stored]
        pieces = [changes[start : start + MAX_KEYS] for start in range(0, len(changes), MAX_KEYS)] or [[]]
        reports = []
        for index, piece in enumerate(pieces):
            report = ContentReport(
                engine_id=self._engine_id,
                incarnation=self._incarnation,
                number=state.num_sent,
                part=part,
                is_snapshot=state.is_behind and index == 0 and part == 0,
                stored=b"".join([key for key, is_held in piece if is_held]),
                removed=b"".join([key for key, is_held in piece if not is_held]),
            )
            state.num_sent += 1
            reports.append(report)
        return reports

    def _follow(self, happened: BlockStored | BlockRemoved) -> None:
        for number, held in enumerate(self._parts):
            if happened.group_id not in held.part.group_ids:
                continue
            bit = 1 << held.part.group_ids.index(happened.group_id)
            keys = [key_of(value) for value in happened.block_hashes]
            if isinstance(happened, BlockStored):
                self._set(number, [(key, held.groups_of.get(key, 0) | bit) for key in keys])
            else:
                self._set(number, [(key, held.groups_of.get(key, 0) & ~bit) for key in keys])

    def _clear_pool(self) -> None:
        for number, held in enumerate(self._parts):
            if held.part.group_ids:
                self._set(number, [(key, 0) for key in held.groups_of])

    def _set(self, number: int, groups_of: Sequence[tuple[bytes, int]]) -> None:
        held = self._parts[number]
        changed = [(number, key) for key, groups in groups_of if held.set(key, groups)]
        for state in self._routers.values():
            if changed and not state.is_behind and number < state.num_parts:
                state.changed.update(dict.fromkeys(changed))
                state.is_behind = len(state.changed) > max(MAX_KEYS, sum(part.num_held for part in self._parts))


def pool_parts(groups: Sequence[KVCacheGroup]) -> list[FeedPart]:
    """Return the parts of a pool, one for each kind of layer, full attention first."""
    group_ids: dict[KVCacheSpec, list[int]] = {}
    for number, group in enumerate(groups):
        group_ids.setdefault(group.spec, []).append(number)
    specs = sorted(group_ids, key=lambda spec: spec.recycles)
    return [FeedPart(_part_of(spec), tuple(group_ids[spec])) for spec in specs]


def _part_of(spec: KVCacheSpec) -> ContentPart:
    match spec:
        case SlidingWindowSpec():
            return ContentPart(window=spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return ContentPart(window=spec.attention_chunk_size, is_chunked=True)
        case FullAttentionSpec():
            return POOL
        case _:
            raise ValueError(f"which blocks a prefix of {type(spec).__name__} needs is not known")


def key_of(block_hash: bytes) -> bytes:
    """Return the key of a block: the first bytes of its hash."""
    return block_hash[:KEY_BYTES]
