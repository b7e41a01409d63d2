"""The state shared by the parts of the scheduler: the requests, the queues, and one step in the making.

Holds; decides nothing. Written by the modules of ``core.sched``, on the engine thread only. The places of requests:

| place                | status                           | blocks                                 |
|----------------------|----------------------------------|----------------------------------------|
| `waiting`            | WAITING, PREEMPTED               | none                                   |
| `grammar_waiting`    | WAITING_FOR_GRAMMAR, also of     | none                                   |
|                      | requests that have run           |                                        |
| `early_pulls`        | WAITING_FOR_REMOTE_KVS; once     | yes, until others need them; it never  |
|                      | loaded WAITING                   | runs                                   |
| `kv_holding_waiting` | WAITING_FOR_REMOTE_KVS; once its | yes: loading, or loaded and waiting to |
|                      | load is seen WAITING, PREEMPTED  | run                                    |
| `running`            | RUNNING                          | yes                                    |
| `requests` only      | finished                         | yes: ``awaiting_recving`` or           |
|                      |                                  | ``awaiting_sending`` delays their free |
| nowhere              |                                  | ``quarantined``: held for no request   |
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from core.clock import Clock
from core.config_workers import SchedulerSection
from core.connector import KVConnectorScheduler
from core.kv.block import NULL_BLOCK_ID, KVCacheBlock
from core.kv.manager import KVCacheManager
from core.kv.stats import PrefixCacheStats
from core.request import CachedRequestData, NewRequestData, Request, SchedulerOutput
from core.sched.early_pulls import EarlyPulls
from core.sched.encoder_inputs import EncoderInputs
from core.sched.fair_queue import FairRequestQueue
from core.sched.queue import RequestQueue, create_request_queue
from core.sched.recompute_ownership import RecomputeOwnership
from core.wire.messages import LoadFailurePolicy, TransferUsage
from core.wire.sampling import StructuredOutput

_NOTHING_LOADED = TransferUsage()


class SchedulerState:
    """All requests of one engine and their places; see the table above.

    ``max_model_len`` is the smaller of the model's context and what the KV pool holds for one request: a request that
    outgrows the pool alone could never go on. ``inflight_prefills`` are the requests that hold blocks and need more before
    their first token, loads included.

    After a failed load: ``failed_recving_kv_req_ids`` hold blocks, wait, and have lost tokens that were to be loaded;
    ``rolled_back`` run, but the runner's copy of them is out of date; some of both wait for blocks (``recompute_ownership``).
    """

    def __init__(  # noqa: PLR0913
        self,
        config: SchedulerSection,
        kv_cache_manager: KVCacheManager,
        max_model_len: int,
        connector: KVConnectorScheduler | None,
        clock: Clock,
        kv_load_failure_policy: LoadFailurePolicy = "recompute",
        *,
        encoder: EncoderInputs | None = None,
    ) -> None:
        self.config = config
        self.kv_load_failure_policy = kv_load_failure_policy
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = min(max_model_len, kv_cache_manager.max_tokens_that_fit)
        self.connector = connector
        self.clock = clock
        self.encoder = encoder if encoder is not None else EncoderInputs(cache_size=0, max_embeds_per_step=0)

        self.async_scheduling = config.async_scheduling == "on"  # steps may be scheduled on tokens that are not known yet
        self.inflight_steps: deque[Step] = deque()  # scheduled and not yet processed, oldest first
        self.departures: list[Departure] = []  # of requests that were in these steps, or in the one being processed

        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: RequestQueue = FairRequestQueue(config.policy)
        self.kv_holding_waiting: RequestQueue = create_request_queue(config.policy)
        self.grammar_waiting: dict[str, Request] = {}
        self.lost_grammars: dict[tuple[StructuredOutput, str], None] = {}  # to be had anew; see ``core.sched.grammars``
        self.inflight_prefills: dict[str, Request] = {}
        self.early_pulls = EarlyPulls()
        self.announced: dict[str, Announced] = {}  # of prompts that report their progress, by request id

        self.finished_req_ids: set[str] = set()  # flushed into every SchedulerOutput
        self.put_back_req_ids: set[str] = set()  # have lost their blocks between two steps; flushed likewise
        self.finished_recving_kv_req_ids: set[str] = set()  # loaded, not promoted yet
        self.awaiting_recving: set[str] = set()  # finished while loading: blocks may still be written
        self.awaiting_sending: set[str] = set()  # finished, but the connector still reads the blocks
        self.failed_recving_kv_req_ids: set[str] = set()
        self.rolled_back: set[str] = set()
        self.recompute_ownership = RecomputeOwnership()
        self.quarantined: set[int] = set()  # blocks that a transfer may still write; each has a reference of its own
        self.transfer_usage: dict[str, TransferUsage] = {}  # sent with the next output of the request
        self.empty_handed: set[str] = set()  # lost everything they were to load, and wait to be admitted again
        self.connector_prefix_cache_stats = PrefixCacheStats()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_ignored_reports = 0
        self.num_load_fallbacks: Counter[tuple[str, LoadFailurePolicy]] = Counter()  # by reason and policy

    def keep_transfer_usage(self, usage: Mapping[str, TransferUsage]) -> None:
        """Keep the cost of loads until the next output of their requests."""
        for request_id, cost in usage.items():
            request = self.requests.get(request_id)
            if request is not None and not request.status.is_finished:
                known = self.transfer_usage.get(request_id, cost)
                self.transfer_usage[request_id] = msgspec.structs.replace(
                    cost,
                    early_tokens=known.early_tokens,
                    early_bytes=known.early_bytes,
                    recomputed_tokens=known.recomputed_tokens,
                    fallback_reason=known.fallback_reason,
                )

    def note_early(self, request: Request, num_tokens: int, num_bytes: int) -> None:
        """Record what was read for a request before it came."""
        usage = self.transfer_usage.get(request.request_id, _NOTHING_LOADED)
        self.transfer_usage[request.request_id] = msgspec.structs.replace(usage, early_tokens=num_tokens, early_bytes=num_bytes)

    def free_spare_blocks(self) -> bool:
        """Let the connector free what it keeps as a favour; return True if blocks have become free."""
        if self.connector is None:
            return False
        pool = self.kv_cache_manager.block_pool
        num_free = pool.num_free_blocks
        self.connector.free_spare_blocks()
        return pool.num_free_blocks > num_free

    def note_exposed(self, request: Request) -> None:
        """Record how long a request has waited until its KV was here, the first time that it is."""
        usage = self.transfer_usage.get(request.request_id, _NOTHING_LOADED)
        if request.kv_handoff is not None and request.first_scheduled_time is None and not usage.exposed_ms:
            exposed_ms = 1e3 * max(0.0, self.clock.now() - request.arrival_time)
            self.transfer_usage[request.request_id] = msgspec.structs.replace(usage, exposed_ms=exposed_ms)

    def add_recomputed(self, request: Request, num_tokens: int, reason: str) -> None:
        """Count tokens that should have been loaded and are computed here. Only the first reason is reported.

        It is sent with the request's first output; later fallbacks are only counted.
        """
        usage = self.transfer_usage.get(request.request_id, _NOTHING_LOADED)
        if not usage.fallback_reason:
            self.num_load_fallbacks[reason, "recompute"] += 1
        if request.prefill_stats is None:
            return
        self.transfer_usage[request.request_id] = msgspec.structs.replace(
            usage,
            recomputed_tokens=min(usage.recomputed_tokens + num_tokens, request.num_prompt_tokens),
            fallback_reason=usage.fallback_reason or reason,
        )

    def subtract_recomputed(self, request: Request, num_tokens: int) -> None:
        """Subtract lost tokens that were found in the prefix cache since."""
        usage = self.transfer_usage.get(request.request_id, _NOTHING_LOADED)
        if not usage.recomputed_tokens:
            return
        left = max(0, usage.recomputed_tokens - num_tokens)
        self.transfer_usage[request.request_id] = msgspec.structs.replace(usage, recomputed_tokens=left)


@dataclass(slots=True)
class Announced:
    """How many tokens of a prompt were announced since it was preempted for the last time."""

    num_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class Step:
    """One step in the making. ``scheduled`` holds the requests of ``output.num_scheduled_tokens``, in its order.

    ``lacks_blocks`` is set if a running request did not get its blocks at once: no request is admitted in this step.
    ``refuses_blocks`` is set if a waiting request lacks blocks or its load is held back: no later load or early pull begins.
    ``synchronous_loads`` start in the step and are hits once it has run. While the step is in flight
    (``core.sched.inflight_steps``), ``void`` holds requests whose results are discarded, and ``pinned`` blocks that only the
    step still references. ``holders`` hold blocks and wait to run, newest first; loads that began in this step are included.
    """

    token_budget: int
    lacks_blocks: bool = False
    refuses_blocks: bool = False
    output: SchedulerOutput = field(default_factory=SchedulerOutput)
    scheduled: list[Request] = field(default_factory=list)
    synchronous_loads: list[Request] = field(default_factory=list)
    void: set[str] = field(default_factory=set)
    pinned: list[KVCacheBlock] = field(default_factory=list)
    holders: deque[Request] = field(default_factory=deque)

    def add_new(self, request: Request, num_new_tokens: int, block_ids: tuple[list[int], ...]) -> None:
        """Schedule a request that the runner does not hold, or not as it is now."""
        self.output.scheduled_new_reqs.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=request.all_token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                choice_index=request.choice_index,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                stop_token_ids=request.stop_token_ids,
                grammar=request.grammar,
                mm_features=request.mm_features,
                media=request.media,
            )
        )
        self.output.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.scheduled.append(request)
        self.token_budget -= num_new_tokens

    def refund(self, request: Request) -> bool:
        """Remove a running request from the step; False if it was not in it."""
        num_tokens = self.output.num_scheduled_tokens.pop(request.request_id, 0)
        if not num_tokens:
            return False
        self.token_budget += num_tokens
        self.scheduled.remove(request)
        for index, new in enumerate(self.output.scheduled_new_reqs):
            if new.request_id == request.request_id:  # it was rolled back before
                del self.output.scheduled_new_reqs[index]
                return True
        cached: CachedRequestData = self.output.scheduled_cached_reqs
        index = cached.req_ids.index(request.request_id)
        del cached.req_ids[index], cached.new_block_ids[index], cached.num_computed_tokens[index]
        return True


@dataclass(frozen=True, slots=True)
class Departure:
    """A request that has left while a step computed its tokens [start, end).

    ``tables`` are its block tables, one per KV cache group, each block with its generation.
    """

    step: Step
    request: Request
    start: int
    end: int
    tables: tuple[list[tuple[KVCacheBlock, int]], ...]

    def live_block_ids(self) -> tuple[list[int], ...]:
        """Return the tables as block ids; the null block stands for one that was reused or rewritten since."""
        return tuple(
            [block.block_id if block.generation == generation else NULL_BLOCK_ID for block, generation in blocks]
            for blocks in self.tables
        )
