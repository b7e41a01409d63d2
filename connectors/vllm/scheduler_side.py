"""The scheduler side: producer and consumer of one engine behind vLLM's hooks, and the quarantine of its blocks.

Runs on the engine core's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from connectors.vllm.consumer import Consumer
from connectors.vllm.counts import SchedulerCounts
from connectors.vllm.handoff_params import brings_handoff, wants_handoff
from connectors.vllm.orders import RankOrders, RankReports
from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.producer import EngineIdentity, Producer, Table
from connectors.vllm.prompt_hashes import VllmRequest
from core.ids import IdSource
from core.kv.hashing import BlockHasher
from core.log import event
from core.rate_limit import LimitedLog

_log = logging.getLogger(__name__)


class VllmBlockPool(Protocol):
    """What is used of ``vllm.v1.core.block_pool.BlockPool``."""

    blocks: Sequence[Any]

    def get_num_free_blocks(self) -> int:
        """Return how many blocks nothing uses. The null block is always used."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop a reference to each block."""


@dataclass(frozen=True, slots=True)
class TransferGroups:
    """The KV cache groups that take part, by their ids, and the sliding window of each in tokens; None for full attention."""

    ids: tuple[int, ...]
    windows: tuple[int | None, ...]


class SchedulerSide:
    """Both halves; ``is_producer`` and ``is_consumer`` say which handoffs are made and read. Each role releases them."""

    def __init__(
        self,
        engine: EngineIdentity,
        rules: PeerRules,
        ids: IdSource,
        groups: TransferGroups,
        *,
        is_producer: bool = True,
        is_consumer: bool = True,
    ) -> None:
        self._engine = engine
        hasher = BlockHasher(engine.model.fingerprint)
        self.producer = Producer(engine, hasher, ids, groups.windows)
        self.consumer = Consumer(engine, hasher, rules, groups.windows)
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._group_ids = groups.ids
        self._block_pool: VllmBlockPool | None = None
        self.num_quarantined_blocks = 0
        self._told_refusals: Counter[str] = Counter()
        self._told_held_blocks = 0
        self._limited_log = LimitedLog(_log, time.monotonic)

    def bind_block_pool(self, block_pool: VllmBlockPool) -> None:
        """Keep the pool: blocks that a late read may still write get a reference of their own."""
        self._block_pool = block_pool

    # ---- requests ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: VllmRequest) -> None:
        """Note what the request wants: its KV handed off, or loaded. One that vLLM has rejected ends the handoff it brings."""
        if request.abort_immediately and self.producer.end_own(request.kv_transfer_params):
            return
        params = request.kv_transfer_params
        if self._is_producer:
            self.producer.on_new_request(request)
        elif wants_handoff(params):
            self._limited_log.warning("handoff_not_made", hint="this engine has kv_role kv_consumer")
        if self._is_consumer or request.abort_immediately:
            self.consumer.on_new_request(request)
        elif brings_handoff(params):
            self._limited_log.warning("handoff_not_read", hint="this engine has kv_role kv_producer, and computes the prompt")

    def num_loadable_tokens(self, request: VllmRequest, num_local_tokens: int) -> int:
        """Return how many tokens after the local hit can be loaded. Changes nothing."""
        return self.consumer.num_loadable_tokens(request, num_local_tokens)

    def start_load(self, request: VllmRequest, table: Table, num_tokens: int) -> None:
        """Load the last tokens of a handoff into the request's blocks; 0 tokens = nothing is needed."""
        self.consumer.start_load(request, self._transferred(table), num_tokens)

    def request_finished(self, request: VllmRequest, table: Table) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` of a published handoff, whose blocks must be kept; else None."""
        self.consumer.request_finished(request.request_id)
        return self.producer.request_finished(request, self._transferred(table)) if self._is_producer else None

    # ---- steps -------------------------------------------------------------------------------------------------------

    def build_orders(self, num_scheduled_tokens: dict[str, int], table_of: Callable[[str], Table | None]) -> RankOrders:
        """Return the orders for the ranks since the last step."""

        def transferred_table_of(request_id: str) -> Table | None:
            table = table_of(request_id)
            return None if table is None else self._transferred(table)

        self.producer.build_orders(num_scheduled_tokens, transferred_table_of)
        sent, received = self.producer.orders, self.consumer.orders
        self.producer.orders, self.consumer.orders = RankOrders(), RankOrders()
        return RankOrders(
            cancelled=sent.cancelled,
            published=sent.published,
            ended=sent.ended,
            seals=sent.seals,
            holds=received.holds,
            loads=received.loads,
            aborts=received.aborts,
            releases=received.releases,
        )

    def needs_steps(self) -> bool:
        """True while orders, or the ends of loads and quarantines, wait for a step: without requests vLLM makes none by itself.

        In a pause it does not count those whose blocks are being loaded.
        """
        awaits_ranks = bool(self.consumer.num_loading or self.num_quarantined_blocks)
        return awaits_ranks or not (self.producer.orders.is_empty() and self.consumer.orders.is_empty())

    def on_step_ended(self, finished_sending: set[str], finished_recving: set[str], reports: RankReports | None) -> None:
        """Apply what all ranks have reported. vLLM frees the blocks of these requests after this call."""
        for news in reports.quarantine if reports is not None else ():
            self._quarantine(news.added, news.ended)
        self.producer.on_sending_ended(finished_sending)
        self.consumer.on_loads_ended(finished_recving)

    def reset(self) -> bool:
        """End all handoffs, and count up the epoch of the weights: engines of another epoch refuse handoffs of this one.

        vLLM calls this right after it has tried to reset its own caches, also in vain, because blocks are in use; then its
        prefix cache still has KV of the old weights. Return False in that case: no epoch is counted, and nothing is handed off
        or loaded until a reset succeeds.
        """
        pool = self._block_pool
        assert pool is not None, "vLLM binds its block pool before any request"
        num_used = len(pool.blocks) - pool.get_num_free_blocks() - 1  # without the null block, as vLLM counts them
        if num_used:
            self.producer.suspend()
            self.consumer.suspend()
            hint = "nothing is handed off or loaded until a reset succeeds: repeat it"
            _log.warning(event("kvferry_reset_failed", used_blocks=num_used, hint=hint))
            return False
        model = msgspec.structs.replace(self._engine.model, weights_epoch=self._engine.model.weights_epoch + 1)
        self._engine = replace(self._engine, model=model)
        hasher = BlockHasher(model.fingerprint)
        self.producer.reset(self._engine, hasher)
        self.consumer.reset(self._engine, hasher)
        _log.info(event("kvferry_reset", weights_epoch=model.weights_epoch))
        return True

    def take_counts(self, *, ranks_have_counted: bool = False) -> SchedulerCounts:
        """Return the counts since the last call. The held blocks are told with all other counts, those of the ranks too."""
        refused, num_held = self.consumer.refused.copy(), self.producer.num_held_blocks + self.num_quarantined_blocks
        refusals, has_changed = refused - self._told_refusals, num_held != self._told_held_blocks
        self._told_refusals, self._told_held_blocks = refused, num_held
        return SchedulerCounts(refusals, num_held if has_changed or refusals or ranks_have_counted else None)

    def _quarantine(self, added: Sequence[int], ended: Sequence[int]) -> None:
        pool = self._block_pool
        assert pool is not None, "vLLM binds its block pool before any request"
        if added:
            pool.touch([pool.blocks[block_id] for block_id in added])
        if ended:
            pool.free_blocks([pool.blocks[block_id] for block_id in ended])
        self.num_quarantined_blocks += len(added) - len(ended)

    def _transferred(self, table: Table) -> Table:
        return tuple(table[group_id] for group_id in self._group_ids)
