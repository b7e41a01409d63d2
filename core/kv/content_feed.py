"""What this worker reports of its prefix cache to each router: the changes since the last report, or everything.

Fed by the engine's thread with the pool's events, read by the event loop (``core.worker.content_reports``). Reports of one
router are numbered from 0 and hold net changes: a block that came and went in between is in none. The first report of a
registration is a snapshot, and so is the next one after a router asks for it. Memory is bounded: if more has changed than a
report holds, the next one is a snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.kv.events import BlockRemoved, BlockStored, KVCacheEvent
from core.kv.spec import FullAttentionSpec, KVCacheGroup
from core.wire.contents import KEY_BYTES, MAX_KEYS, ContentReport


@dataclass(slots=True)
class _Router:
    """What one router has not been told. ``is_behind`` = it needs a snapshot."""

    num_sent: int = 0
    is_behind: bool = True
    changed: dict[bytes, None] = field(default_factory=dict)  # keys, in order of their first change


class ContentFeed:
    """The contents of one KV cache group, and each router's share of the news. Any thread."""

    def __init__(self, engine_id: str, incarnation: int, group_id: int = 0) -> None:
        self._engine_id, self._incarnation, self._group_id = engine_id, incarnation, group_id
        self._lock = threading.Lock()
        self._held: dict[bytes, None] = {}
        self._routers: dict[str, _Router] = {}

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Take in what the pool did, in order. See ``KVEventFollower``."""
        if not events:
            return
        with self._lock:
            for happened in events:
                match happened:
                    case BlockStored(group_id=self._group_id):
                        self._change([key_of(value) for value in happened.block_hashes], is_held=True)
                    case BlockRemoved(group_id=self._group_id):
                        self._change([key_of(value) for value in happened.block_hashes], is_held=False)
                    case BlockStored() | BlockRemoved():
                        pass
                    case _:
                        self._change(list(self._held), is_held=False)

    def close(self) -> None:
        """See ``KVEventFollower``."""

    def start(self, router: str) -> None:
        """Begin anew with a router: report 0 is a snapshot."""
        with self._lock:
            self._routers[router] = _Router()

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

    def contents(self) -> set[bytes]:
        """Return the keys of all blocks. Slow; for checks."""
        with self._lock:
            return set(self._held)

    def take_reports(self, router: str) -> list[ContentReport]:
        """Return what this router has not been told, in order; nothing if there is no news."""
        with self._lock:
            state = self._routers.get(router)
            if state is None or not (state.is_behind or state.changed):
                return []
            stored = list(self._held) if state.is_behind else [key for key in state.changed if key in self._held]
            removed = [] if state.is_behind else [key for key in state.changed if key not in self._held]
            reports = self._write(state, stored, removed)
            state.is_behind = False
            state.changed = {}
            return reports

    def _write(self, state: _Router, stored: Sequence[bytes], removed: Sequence[bytes]) -> list[ContentReport]:
        """Return reports of at most ``MAX_KEYS`` keys each; of a snapshot only the first one says so."""
        # Removals first, so that the router never counts more blocks than the pool has.
        changes = [(key, False) for key in removed] + [(key, True) for key in stored]
        parts = [changes[start : start + MAX_KEYS] for start in range(0, len(changes), MAX_KEYS)] or [[]]
        reports = []
        for index, part in enumerate(parts):
            report = ContentReport(
                engine_id=self._engine_id,
                incarnation=self._incarnation,
                number=state.num_sent,
                is_snapshot=state.is_behind and index == 0,
                stored=b"".join([key for key, is_held in part if is_held]),
                removed=b"".join([key for key, is_held in part if not is_held]),
            )
            state.num_sent += 1
            reports.append(report)
        return reports

    def _change(self, keys: Sequence[bytes], *, is_held: bool) -> None:
        changed = [key for key in keys if (key in self._held) is not is_held]
        for key in changed:
            if is_held:
                self._held[key] = None
            else:
                del self._held[key]
        for state in self._routers.values():
            if not state.is_behind:
                state.changed.update(dict.fromkeys(changed))
                state.is_behind = len(state.changed) > max(MAX_KEYS, len(self._held))


def reported_group(groups: Sequence[KVCacheGroup]) -> int:
    """Return the group that a worker reports: the first one that keeps whole prefixes, else the first one."""
    return next((number for number, group in enumerate(groups) if isinstance(group.spec, FullAttentionSpec)), 0)


def key_of(block_hash: bytes) -> bytes:
    """Return the key of a block: the first bytes of its hash."""
    return block_hash[:KEY_BYTES]
