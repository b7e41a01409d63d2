"""What the router knows of each worker's prefix cache: the worker's own reports, and the prompts that were sent there since.

Of a worker that has never reported, this router's own placements count instead. A hit that is not true costs time only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from core.kv.hashing import MAX_FINGERPRINT_BYTES, BlockHasher, ExtraKey
from core.wire.contents import ContentReport
from router.contents.keys import chain_keys, prompt_chain
from router.contents.placed import PendingPrefixes, PlacedPrefixes
from router.contents.reports import ContentGroup, ReportedContents
from router.dispatch.members import GenerationWorker, WorkerKey


class TierHit(NamedTuple):
    """Prompt tokens that a worker can load from a tier, after those in its pool."""

    medium: str
    connector: str
    tokens: int


class Hit(NamedTuple):
    """Prompt tokens in a worker's cache: those expected, and those of them that the worker, or its placements, vouch for.

    ``tiers`` has those that follow in each tier.
    """

    tokens: int = 0
    claimed_tokens: int = 0
    tiers: tuple[TierHit, ...] = ()


class _Holders(NamedTuple):
    """How many leading blocks of a prompt each worker has: by its reports or its placements, and by prompts under way."""

    claimed: dict[WorkerKey, int]
    pending: dict[WorkerKey, int]
    tiers: dict[WorkerKey, tuple[TierHit, ...]]  # after the claimed ones


class KnownContents:
    """The contents of all workers."""

    def __init__(self) -> None:
        self.reports = ReportedContents()
        self._pending: PendingPrefixes[WorkerKey] = PendingPrefixes()
        self._placed: PlacedPrefixes[WorkerKey] = PlacedPrefixes()
        self._prompt = _Prompt((), ())

    @property
    def num_pending(self) -> int:
        """How many prompts count at their workers without a report."""
        return len(self._pending)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def join(self, worker: GenerationWorker) -> None:
        """Begin with a worker of which nothing is known."""
        self.leave(worker.key)
        self.reports.join(worker.key, group_of(worker), worker.facts.num_blocks, worker.facts.content_parts)

    def leave(self, worker: WorkerKey) -> None:
        """Forget a worker."""
        self.reports.leave(worker)
        self._pending.forget(worker)
        self._placed.forget(worker)
        self._prompt.held.clear()

    def distrust(self, worker: WorkerKey) -> None:
        """Drop the contents of a worker whose claims do not hold, until its next snapshot."""
        self.reports.distrust(worker)
        self._prompt.held.clear()

    def on_report(self, worker: WorkerKey, report: ContentReport) -> None:
        """Apply a report of this worker; one in the name of another is ignored."""
        if (report.engine_id, report.incarnation) == worker:
            self.reports.on_report(report)
            self._pending.on_reported(worker)
            self._placed.forget(worker)
            self._prompt.held.clear()

    def needs_snapshot(self, worker: WorkerKey, num_reports: int) -> bool:
        """Return True if a worker whose heartbeat counts so many reports must send everything."""
        if num_reports:
            self._pending.on_reported(worker)  # a worker reports all news before a heartbeat
        self._prompt.held.clear()
        return self.reports.needs_snapshot(worker, num_reports)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def hits(
        self, workers: Iterable[GenerationWorker], token_ids: Sequence[int], extra_keys: Sequence[ExtraKey]
    ) -> dict[WorkerKey, Hit]:
        """Return what each of these workers has of a prompt; those without anything may be missing."""
        found: dict[WorkerKey, Hit] = {}
        by_group: dict[ContentGroup, list[WorkerKey]] = {}
        for worker in workers:
            group = group_of(worker)
            if group in by_group:
                by_group[group].append(worker.key)
            else:
                by_group[group] = [worker.key]
        for group, members in by_group.items():
            claimed, pending, tiers = self._held(group, token_ids, extra_keys)
            for member in members:
                num_claimed, num_pending = claimed.get(member, 0), pending.get(member, 0)
                below = tiers.get(member, ()) if num_claimed >= num_pending else ()
                if num_claimed or num_pending or below:
                    found[member] = Hit(max(num_claimed, num_pending) * group[1], num_claimed * group[1], below)
        return found

    def on_placed(
        self, request_id: str, worker: GenerationWorker, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey]
    ) -> None:
        """Record that a prompt was sent to a worker."""
        keys = self._keys(group_of(worker), token_ids, extra_keys)
        if self.reports.has_reported(worker.key):
            self._pending.add(request_id, worker.key, keys)
        else:
            self._placed.add(worker.key, keys, worker.facts.num_blocks)
        self._prompt.held.clear()

    def on_computed(self, request_id: str) -> None:
        """Record that a prompt is computed. Unknown ids are ignored."""
        self._pending.on_computed(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a prompt that was not computed. Unknown ids are ignored."""
        self._pending.drop(request_id)
        self._prompt.held.clear()

    def _held(self, group: ContentGroup, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey]) -> _Holders:
        """Return which workers hold which part of a prompt in a group."""
        keys = self._keys(group, token_ids, extra_keys)
        if group not in self._prompt.held:
            claimed = self.reports.num_blocks_held(group, keys) | self._placed.num_blocks_held(keys)
            tiers: dict[WorkerKey, tuple[TierHit, ...]] = {}
            for tier in self.reports.num_blocks_in_tiers(group, keys, claimed):
                for worker, num_blocks in tier.num_blocks.items():
                    found = TierHit(tier.medium, tier.connector, num_blocks * group[1])
                    tiers[worker] = (*tiers.get(worker, ()), found)
            self._prompt.held[group] = _Holders(claimed, self._pending.num_blocks_held(keys), tiers)
        return self._prompt.held[group]

    def _keys(self, group: ContentGroup, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey]) -> array[int]:
        """Return a prompt's keys; those of the last one are kept, since it is placed right after it was looked up."""
        if token_ids is not self._prompt.token_ids or extra_keys != self._prompt.extra_keys:
            self._prompt = _Prompt(token_ids, extra_keys)
        fingerprint, block_size = group
        if group not in self._prompt.keys:
            chain = self._prompt.chains.get(fingerprint)
            if chain is None and not 0 < len(fingerprint) <= MAX_FINGERPRINT_BYTES:
                chain = self._prompt.chains[fingerprint] = []  # no worker of ours
            elif chain is None:
                chain = self._prompt.chains[fingerprint] = prompt_chain(BlockHasher(fingerprint), token_ids, extra_keys)
            self._prompt.keys[group] = chain_keys(chain, block_size)
        return self._prompt.keys[group]


class _Prompt:
    """The prompt that was looked up last: its hash chain by model, its keys by group, and who holds what until that changes."""

    def __init__(self, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey]) -> None:
        self.token_ids, self.extra_keys = token_ids, extra_keys
        self.chains: dict[bytes, list[bytes]] = {}
        self.keys: dict[ContentGroup, array[int]] = {}
        self.held: dict[ContentGroup, _Holders] = {}


def group_of(worker: GenerationWorker) -> ContentGroup:
    """Return what workers with the same names for the same blocks have in common."""
    return worker.facts.model_fingerprint, worker.facts.layout.block_size
