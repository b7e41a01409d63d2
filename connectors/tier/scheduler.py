"""The scheduler side of a tier connector: finds prefixes in the tier, and chooses the blocks to save.

It looks up blocks in a ``BlockStore`` without waiting for the answer, reports the tokens that extend the local hits, and orders
their loads. In eager mode every complete block is saved, in lazy mode only a block that the pool is about to reuse. Runs on the
engine thread; moves no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from connectors.tier.contents import TierContents
from connectors.tier.messages import TierConnectorMetadata, TierConnectorWorkerMetadata, TierLoad
from connectors.tier.prefix_lookup import PrefixLookup
from connectors.tier.save_planner import SavePlanner
from core.clock import Clock
from core.connector import KVConnectorScheduler
from core.errors import ConfigError
from core.kv.block import NULL_BLOCK_ID
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.spec import KVCacheSizes
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, SchedulerOutput
from core.wire.kv import KVLayoutInfo
from kvstore.base import BlockStore, LookupTicket
from kvstore.key import StoreKey, layout_key
from kvstore.messages import MAX_KEYS

LAZY_STEPS = 4  # blocks are saved so many steps before they would be reused
ANSWER_LASTS_S = 1.0  # after that the question is repeated: the tier may have changed
MAX_PINNED_SHARE = 0.25  # of the pool, for copies in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Settings of a tier. ``name`` is that of the connector; ``load_timeout_s`` bounds a load, with all its parts."""

    name: str
    load_timeout_s: float = 30.0
    is_lazy: bool = False
    saves_output: bool = True  # blocks of generated tokens too


@dataclass(slots=True)
class _Question:
    """The lookup of a request: the blocks of the tokens [start, end).

    An answer expires some time after ``used_at``, its first use, because a step may take longer than an answer is valid.
    """

    start: int
    end: int
    ticket: LookupTicket
    used_at: float | None = None


@dataclass(slots=True)
class _Known:
    """A request, and how many of its tokens were offered to the tier or loaded from it."""

    request: Request
    num_offered: int = 0


class TierConnectorScheduler(KVConnectorScheduler):
    """Hits, loads and saves of one tier.

    ``store`` returns the tier, once the connector has started. ``watch`` wakes the engine when a ticket is done.
    """

    def __init__(
        self,
        settings: TierSettings,
        layout: KVLayoutInfo,
        clock: Clock,
        store: Callable[[], BlockStore],
        watch: Callable[[LookupTicket], None],
        contents: TierContents | None = None,
    ) -> None:
        self._settings = settings
        self._contents = contents or TierContents()
        self._layout = layout
        self._clock = clock
        self._store = store
        self._watch = watch
        self._coordinator: PrefixLookup | None = None
        self._planner: SavePlanner | None = None
        self._requests: dict[str, _Known] = {}
        self._questions: dict[str, _Question] = {}
        self._open_lookups: dict[tuple[StoreKey, StoreKey], LookupTicket] = {}
        self._loading: dict[str, TierLoad] = {}
        self._loading_keys: Counter[StoreKey] = Counter()
        self._are_saves_slow = False
        self._in_step: Mapping[str, int] = {}  # tokens computed in the last step
        self._next = TierConnectorMetadata()

    @property
    def num_saving_blocks(self) -> int:
        """Number of blocks pinned for saves."""
        return self._planner.num_pinned if self._planner is not None else 0

    def saving_block_ids(self) -> list[int]:
        """Return the blocks pinned for saves. Any thread: the list is made in one step of the interpreter."""
        return list(self._planner.pinned_block_ids) if self._planner is not None else []

    @property
    def num_missed_saves(self) -> int:
        """Number of blocks that were reused, or incomplete, before they could be saved."""
        return self._planner.num_missed if self._planner is not None else 0

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Set the groups and sizes of the KV cache.

        Raises:
            ConfigError: prefix caching or seals are off; a tier needs both.
        """
        name = self._settings.name
        if not manager.enable_caching:
            raise ConfigError(
                f"connector {name}: it prolongs prefix hits, and cache.enable_prefix_caching is off",
                param="cache.enable_prefix_caching",
            )
        pool = manager.block_pool
        if pool.seals is None:
            raise ConfigError(
                f"connector {name}: the engine makes no seals, and nothing is stored without", param="connector.name"
            )
        sizes = KVCacheSizes(
            scheduler_block_size=manager.coordinator.scheduler_block_size,
            hash_block_size=manager.hash_block_size,
            max_in_flight_tokens=manager.max_in_flight_tokens,
            max_model_len=manager.max_model_len,
        )
        specs = [group.spec for group in manager.kv_cache_config.groups]
        self._contents.bind(specs)
        self._coordinator = PrefixLookup(specs, sizes, layout_key(self._layout))
        max_pinned = max(1, int(MAX_PINNED_SHARE * pool.num_usable_blocks))
        self._planner = SavePlanner(pool, self._coordinator, min(max_pinned, MAX_KEYS))

    # ---- hits and loads ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Track the request for the blocks that it will compute."""
        self._requests[request.request_id] = _Known(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tier's tokens after the local hits; None until it answers, or while another request loads them."""
        coordinator = self._bound
        end = coordinator.floor(request.num_tokens - 1)  # the last token is computed here in any case
        end = min(end, num_computed_tokens + coordinator.max_tokens_of(MAX_KEYS))
        if end <= num_computed_tokens:
            self._questions.pop(request.request_id, None)
            return 0, False
        question = self._questions.get(request.request_id)
        if question is None or self._is_outdated(question, num_computed_tokens, end):
            question = self._ask(request, num_computed_tokens, end)
        if not question.ticket.is_done:
            return None, False
        if question.used_at is None:
            question.used_at = self._clock.now()
            self._contents.answer(question.ticket.keys, question.ticket.hits)
        length = coordinator.find_hit(_hits(question.ticket), num_computed_tokens, end)
        if length <= num_computed_tokens:
            return 0, False
        if any(key in self._loading_keys for key, _, _ in self._blocks_of(request, num_computed_tokens, length)):
            return None, False  # they will be local hits
        return length - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Order the load of the blocks from the tier."""
        question = self._questions.pop(request.request_id, None)
        if not num_external_tokens:
            return
        assert question is not None, f"{request!r} loads what was not offered"
        start, end = question.start, question.start + num_external_tokens
        tables = blocks.get_block_ids()
        wanted = [(key, tables[group_id][index]) for key, group_id, index in self._blocks_of(request, start, end)]
        assert all(block_id != NULL_BLOCK_ID for _, block_id in wanted), f"{request!r} has no block for what it needs"
        deadline = self._clock.now() + self._settings.load_timeout_s
        job = TierLoad(request.request_id, *_columns(wanted), num_tokens=num_external_tokens, deadline=deadline)
        self._loading[request.request_id] = job
        self._loading_keys.update(job.keys)
        self._next.loads.append(job)
        known = self._requests.get(request.request_id)
        if known is not None:
            known.num_offered = max(known.num_offered, end)  # blocks loaded from the tier need not be saved there

    def _ask(self, request: Request, start: int, end: int) -> _Question:
        keys = self._bound.keys_between(request.block_hashes, start, end)
        self._open_lookups = {name: ticket for name, ticket in self._open_lookups.items() if not ticket.is_done}
        name = (keys[0], keys[-1])  # the first and last key identify the chain
        ticket = self._open_lookups.get(name)
        if ticket is None:
            ticket = self._store().lookup(keys)
            if not ticket.is_done:
                self._open_lookups[name] = ticket
                self._watch(ticket)
        question = self._questions[request.request_id] = _Question(start, end, ticket)
        return question

    def _is_outdated(self, question: _Question, start: int, end: int) -> bool:
        if (question.start, question.end) != (start, end):
            return True
        return question.used_at is not None and self._clock.now() - question.used_at > ANSWER_LASTS_S

    def _blocks_of(self, request: Request, start: int, end: int) -> list[tuple[StoreKey, int, int]]:
        """Return key, group and index of every block that a load of the tokens [start, end) fills."""
        coordinator = self._bound
        return [
            (coordinator.key(request.block_hashes, group_id, index), group_id, index)
            for group_id, indices in coordinator.needed(start, end)
            for index in indices
        ]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the orders since the last step and the saves that can start now."""
        if self._settings.is_lazy:
            if self._in_step:
                self._next.saves += self._bound_planner.take_before_eviction(LAZY_STEPS * self._bound.num_blocks_in_flight)
        else:
            for request_id in self._in_step:
                known = self._requests.get(request_id)
                if known is not None:
                    self._offer(known)
            self._next.saves += self._bound_planner.take()
        self._in_step = scheduler_output.num_scheduled_tokens
        metadata, self._next = self._next, TierConnectorMetadata()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Forget ended loads and unpin saved blocks."""
        for request_id in sorted(output.finished_recving):
            job = self._loading.pop(request_id, None)
            if job is not None:
                self._loading_keys -= Counter(job.keys)
            if request_id in self._requests and request_id in output.failed_recving | output.load_errors:
                self._requests[request_id].num_offered = 0  # missing or corrupt blocks are saved again
        if output.worker_meta is not None:
            assert isinstance(output.worker_meta, TierConnectorWorkerMetadata)
            self._bound_planner.end(output.worker_meta.saved_block_ids)
            self._are_saves_slow = output.worker_meta.is_slow

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """End the request's load, and offer and pin the rest of its blocks now, because they are freed after this call.

        The free is not delayed: blocks that are being saved have their own references.
        """
        request_id = request.request_id
        self._questions.pop(request_id, None)
        known = self._requests.pop(request_id, None)
        if request_id in self._loading:
            self._next.aborts.append(request_id)
        elif known is not None and not self._settings.is_lazy:
            self._offer(known)
            self._next.saves += self._bound_planner.take()
        return False, None

    def has_pending_push_work(self) -> bool:
        """True while orders wait for the next step."""
        return not self._next.is_empty() or self._bound_planner.can_save

    def has_pending_block_frees(self) -> bool:
        """True while the end of a save will soon free a block; False if saves are slow."""
        return self._planner is not None and not self._are_saves_slow and self._planner.will_free_blocks

    def soon_released_blocks(self) -> Collection[int]:
        """Return the blocks that are being saved; none if saves are slow."""
        return () if self._planner is None or self._are_saves_slow else self._planner.pinned_block_ids

    def _offer(self, known: _Known) -> None:
        """Offer newly completed blocks. A hot path: usually there are none."""
        request = known.request
        num_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        if num_tokens - known.num_offered < self._bound.sizes.scheduler_block_size:
            return
        if not self._settings.saves_output:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        end = self._bound.floor(num_tokens)
        if end > known.num_offered:
            self._bound_planner.offer(self._bound.keys_between(request.block_hashes, known.num_offered, end))
            known.num_offered = end

    @property
    def _bound(self) -> PrefixLookup:
        assert self._coordinator is not None, "bind_kv_cache_manager comes first"
        return self._coordinator

    @property
    def _bound_planner(self) -> SavePlanner:
        assert self._planner is not None, "bind_kv_cache_manager comes first"
        return self._planner


def _hits(ticket: LookupTicket) -> Sequence[bool]:
    """Return the answer; without one, there are no hits."""
    return ticket.hits if len(ticket.hits) == len(ticket.keys) else [False] * len(ticket.keys)


def _columns(wanted: Sequence[tuple[StoreKey, int]]) -> tuple[tuple[StoreKey, ...], tuple[int, ...]]:
    return tuple(key for key, _ in wanted), tuple(block_id for _, block_id in wanted)
