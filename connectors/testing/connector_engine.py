"""The smallest engine that can drive a KV connector: real blocks, real memory, no model.

Owns a KV cache manager, a pool of host memory and both sides of a connector, and calls them in the order of the scheduler and
the runner. "Computing" a block fills it with bytes derived from its content hash, so that any wrong block shows.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connectors.testing.memory_pool import DTYPE_BYTES, HEAD_DIM, MemoryPool
from connectors.testing.stepping import call_if_open, step_until
from core.connector import KVConnectorScheduler, KVConnectorWorker
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.pool_region import KVPoolRegion
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, ceil_div
from core.request import KVConnectorOutput, NewRequest, Request, RequestStatus, SchedulerOutput
from core.wire.kv import KVHandoff, KVLayoutInfo, KVSource
from core.wire.messages import ErrorInfo, TransferUsage
from core.wire.sampling import SamplingParams


@dataclass(slots=True)
class LoadOutcome:
    """The outcome of a request's load. ``loaded`` are the positions of its blocks, ``bad`` those that must not be used."""

    loaded: range
    is_ended: bool = False
    error: ErrorInfo | None = None
    bad: set[int] = field(default_factory=set)
    usage: TransferUsage | None = None


class ConnectorEngine:
    """Blocks, memory and a connector. All calls come from one thread, as in a worker; make it inside an event loop.

    ``parked`` holds finished requests whose blocks are kept for a reader, ``loads`` the outcome of every load, ``quarantined``
    the blocks that a transfer may still write although its load is over. A request whose load has failed, in whole or in part,
    is aborted; with ``recomputes`` it frees its blocks and waits to be admitted again. Every report is checked against the
    contract of ``KVConnectorOutput``; with ``checks_content`` also every block of a load that was not reported bad. With a
    ``show_pool`` the connector sees the pool that it returns.
    """

    def __init__(  # noqa: PLR0913
        self,
        scheduler: KVConnectorScheduler,
        worker: KVConnectorWorker,
        model_fingerprint: bytes,
        layout: KVLayoutInfo,
        num_blocks: int = 64,
        incarnation: int = 0,
        *,
        show_pool: Callable[[KVPoolRegion], KVPoolRegion] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.layout = layout
        self.parked: dict[str, Request] = {}
        self.loads: dict[str, LoadOutcome] = {}
        self.quarantined: set[int] = set()
        self.recomputes = False
        self.checks_content = False
        self._requests: dict[str, Request] = {}
        self._aborted: set[str] = set()
        self._wake = asyncio.Event()
        spec = FullAttentionSpec(block_size=self.layout.block_size, num_kv_heads=1, head_dim=HEAD_DIM, dtype_bytes=DTYPE_BYTES)
        config = KVCacheConfig(num_blocks, (KVCacheGroup(tuple(range(self.layout.num_layers)), spec),))
        self.hasher = BlockHasher(model_fingerprint)
        self.pool = MemoryPool(num_blocks, layout, incarnation)
        self.manager = KVCacheManager(
            config,
            max_model_len=num_blocks * layout.block_size,
            scheduler_block_size=self.layout.block_size,
            hash_block_size=self.hasher.hash_block_size,
            seals=self.pool.seals,
        )
        self.scheduler.bind_kv_cache_manager(self.manager)
        self.worker.register_kv_caches(show_pool(self.pool.region) if show_pool is not None else self.pool.region)
        loop = asyncio.get_running_loop()
        self.worker.set_wakeup(lambda: call_if_open(loop, self._wake.set))

    # ---- producer ----------------------------------------------------------------------------------------------------

    def prefill(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
    ) -> KVHandoff | None:
        """Compute a prompt, sample one token, finish the request, and return its handoff."""
        request = self.begin_prefill(request_id, prompt_token_ids, len(prompt_token_ids))
        return self.end_prefill(request, status)

    def begin_prefill(self, request_id: str, prompt_token_ids: list[int], num_tokens: int) -> Request:
        """Compute the first ``num_tokens`` tokens of a prompt, and seal their full blocks."""
        request = self._new_request(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=SamplingParams(max_tokens=1),
                needs_handoff=True,
            )
        )
        hits, num_hits = self.manager.get_computed_blocks(request)
        assert self.scheduler.get_num_new_matched_tokens(request, num_hits) == (0, False)
        blocks = self.manager.allocate_slots(request, max(0, num_tokens - num_hits), num_hits, hits)
        assert blocks is not None, "the pool of the test is too small"
        self.scheduler.update_state_after_alloc(request, self.manager.get_blocks(request_id), 0)
        self._fill(request, max(num_tokens, num_hits))
        return request

    def continue_prefill(self, request: Request, num_tokens: int) -> None:
        """Compute a prompt up to its first ``num_tokens`` tokens."""
        blocks = self.manager.allocate_slots(request, num_tokens - request.num_computed_tokens)
        assert blocks is not None, "the pool of the test is too small"
        self._fill(request, num_tokens)

    def _fill(self, request: Request, num_tokens: int) -> None:
        """Write and seal the blocks up to a token."""
        block_ids = self.manager.get_block_ids(request.request_id)[0]
        for position in range(request.num_computed_tokens // self.layout.block_size, len(block_ids)):
            self.pool.rows[block_ids[position]] = self.content(request, position)
        request.num_computed_tokens = num_tokens
        self.manager.seal_blocks(request, num_tokens)

    def end_prefill(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> KVHandoff | None:
        """Sample one token, finish a request whose prompt is computed, and return its handoff."""
        request_id = request.request_id
        request.append_output_token(7)
        request.status = status
        block_ids = self.manager.get_block_ids_for_computed_tokens(request_id, request.num_computed_tokens)
        is_kept, handoff = self.scheduler.request_finished(request, block_ids)
        if is_kept:
            self.parked[request_id] = request
        else:
            self._free(request)
        return handoff

    def content(self, request: Request, position: int) -> npt.NDArray[np.uint8]:
        """Return the expected KV of the block at ``position`` of the request's prompt."""
        end = min((position + 1) * self.layout.block_size, request.num_prompt_tokens)
        name = self.hasher.prefix_hash(request.block_hashes, request.all_token_ids, end, request.extra_keys)
        seed = hashlib.blake2b(name, digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(seed, "little")).integers(0, 256, self.layout.block_bytes, np.uint8)

    # ---- consumer ----------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        handoff: KVHandoff | None = None,
        cache_salt: str = "",
        kv_source: KVSource | None = None,
    ) -> Request:
        """Add a request that continues a handoff after its first token, or may load the beginning of its prompt."""
        return self._new_request(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=SamplingParams(max_tokens=8),
                output_token_ids=(7,),
                kv_handoff=handoff,
                cache_salt=cache_salt,
                kv_source=kv_source,
            )
        )

    def add_early(self, request_id: str, prompt_token_ids: list[int], handoff: KVHandoff) -> Request:
        """Add a request that loads the computed part of a prompt and never runs."""
        return self._new_request(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids[: handoff.num_tokens + 1],
                sampling=SamplingParams(max_tokens=1),
                kv_handoff=handoff,
                is_early=True,
            )
        )

    def admit(self, request: Request) -> int:
        """Allocate the request's blocks and start its load; return how many tokens the connector loads."""
        hits, num_hits = self.manager.get_computed_blocks(request)
        num_external, is_async = self._ask(request, num_hits)
        assert num_external is not None, "a handoff is known at once; a tier or a source has been asked before"
        assert is_async == (num_external > 0)
        num_new = 0 if is_async else request.num_tokens - num_hits
        allocated = self.manager.allocate_slots(
            request,
            num_new,
            num_hits,
            hits,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=is_async,
        )
        assert allocated is not None, "the pool of the test is too small"
        self.scheduler.update_state_after_alloc(request, self.manager.get_blocks(request.request_id), num_external)
        if is_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = num_hits + num_external
            num_blocks = ceil_div(request.num_computed_tokens, self.layout.block_size)
            self.loads[request.request_id] = LoadOutcome(range(num_hits // self.layout.block_size, num_blocks))
        else:
            request.num_computed_tokens = num_hits
        return num_external

    def offered_tokens(self, request: Request) -> int | None:
        """Return how many tokens the connector would load for a waiting request; None if it does not know yet."""
        _, num_hits = self.manager.get_computed_blocks(request)
        return self._ask(request, num_hits)[0]

    def _ask(self, request: Request, num_hits: int) -> tuple[int | None, bool]:
        """Ask the connector, as the scheduler does: not for a request that loads nothing."""
        if request.skip_reading_prefix_cache or request.has_failed_load:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_hits)

    def compute_rest(self, request: Request) -> None:
        """Compute the rest of an admitted request's prompt, as the steps of a prefill do."""
        num_computed = request.num_computed_tokens
        if request.num_tokens > num_computed:
            blocks = self.manager.allocate_slots(request, request.num_tokens - num_computed)
            assert blocks is not None, "the pool of the test is too small"
        block_ids = self.manager.get_block_ids(request.request_id)[0]
        for position in range(num_computed // self.layout.block_size, len(block_ids)):
            self.pool.rows[block_ids[position]] = self.content(request, position)
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        self.manager.cache_blocks(request, request.num_tokens)
        self.manager.seal_blocks(request, request.num_tokens)

    def abort(self, request: Request) -> None:
        """Abort a request in any state."""
        is_loading = request.request_id in self.loads and not self.loads[request.request_id].is_ended
        request.status = RequestStatus.FINISHED_ABORTED
        block_ids = self.manager.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
        is_kept, _ = self.scheduler.request_finished(request, block_ids)
        assert not is_kept, "an aborted request keeps nothing for readers"
        if is_loading:
            self._aborted.add(request.request_id)
        else:
            self._free(request)

    def finish(self, request: Request) -> None:
        """End a request successfully."""
        request.status = RequestStatus.FINISHED_STOPPED
        block_ids = self.manager.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
        assert self.scheduler.request_finished(request, block_ids) == (False, None)
        self._free(request)

    def has_content(self, request: Request) -> bool:
        """True if every block of the request's prompt has its expected content."""
        block_ids = self.manager.get_block_ids(request.request_id)[0]
        num_blocks = ceil_div(request.num_prompt_tokens, self.layout.block_size)
        return all(self._holds(request, position, block_ids[position]) for position in range(num_blocks))

    def _holds(self, request: Request, position: int, block_id: int) -> bool:
        return np.array_equal(self.pool.rows[block_id], self.content(request, position))

    # ---- both --------------------------------------------------------------------------------------------------------

    @property
    def num_used_blocks(self) -> int:
        """Blocks with references."""
        return self.manager.block_pool.num_usable_blocks - self.manager.block_pool.num_free_blocks

    def step(self) -> KVConnectorOutput:
        """Run one empty step and apply the connector's report, as the scheduler does."""
        metadata = self.scheduler.build_connector_meta(SchedulerOutput())
        self.worker.handle_preemptions(metadata)
        self.worker.start_load_kv(metadata)
        self.worker.wait_for_save()
        output = self.worker.get_transfer_results(set())
        output.invalid_block_ids |= self.worker.get_block_ids_with_load_errors()
        self.scheduler.update_connector_output(output)
        self._apply(output)
        return output

    def _apply(self, output: KVConnectorOutput) -> None:
        pool = self.manager.block_pool
        self._note_bad_blocks(output)
        assert not self.quarantined & output.quarantined_block_ids, "a block is in quarantine already"
        self.quarantined |= output.quarantined_block_ids
        pool.touch(pool.blocks[block_id] for block_id in output.quarantined_block_ids)
        for request_id in output.finished_recving:
            self._end_load(request_id, output)
        for request_id in output.finished_sending:
            self._free(self.parked.pop(request_id))
        assert self.quarantined >= output.unquarantined_block_ids, "a block leaves the quarantine that was never in it"
        self.quarantined -= output.unquarantined_block_ids
        pool.free_blocks(pool.blocks[block_id] for block_id in output.unquarantined_block_ids)

    def _note_bad_blocks(self, output: KVConnectorOutput) -> None:
        """Attribute a report to blocks and loads: only to such that have not ended before, or end with it."""
        unknown = output.invalid_block_ids | output.quarantined_block_ids
        for request_id, outcome in self.loads.items():
            if outcome.is_ended:
                continue
            block_ids = self.manager.get_block_ids(request_id)[0]
            bad = {position for position in outcome.loaded if block_ids[position] in unknown}
            outcome.bad |= bad
            unknown -= {block_ids[position] for position in bad}
            is_explained = request_id in output.failed_recving or request_id in output.load_errors
            assert is_explained or not bad or request_id in self._aborted, f"blocks of {request_id} are bad without a reason"
        assert not unknown, f"no load has the blocks {unknown}"
        for request_id, error in (output.failed_recving | output.load_errors).items():
            assert not self.loads[request_id].is_ended, "a failure is reported before the end of the load, or with it"
            self.loads[request_id].error = error

    @property
    def is_woken(self) -> bool:
        """True once the connector has something to report; the owner sets it back before a step of its own."""
        return self._wake.is_set()

    @is_woken.setter
    def is_woken(self, is_woken: bool) -> None:
        (self._wake.set if is_woken else self._wake.clear)()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Step until the condition holds; sleep while the connector reports nothing.

        Raises:
            TimeoutError: it does not hold after ``timeout_s``. The message names what the connector has not reported.
        """
        try:
            await step_until(condition, self.step, self._wake, self.scheduler.has_pending_push_work, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"after {timeout_s:g} s {self._unreported()}") from None

    def _unreported(self) -> str:
        """Say what the connector still owes a report, and where its author may look for the reason."""
        loading = [request_id for request_id, outcome in self.loads.items() if not outcome.is_ended]
        owed = [
            *(f"the load of {request_id!r} has not ended (LoadEnded)" for request_id in loading),
            *(f"blocks of {request_id!r} are kept (SendingEnded)" for request_id in self.parked),
            *([f"blocks {sorted(self.quarantined)} are in quarantine"] if self.quarantined else []),
        ]
        where = "does Connector.start start what does the work, and what has the connector written to the log?"
        return f"{'; '.join(owed) or 'the connector has not done what the test waits for'}: {where}"

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()

    def _new_request(self, new: NewRequest) -> Request:
        request = Request(new, self.hasher)
        self._requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        return request

    def _end_load(self, request_id: str, output: KVConnectorOutput) -> None:
        outcome = self.loads[request_id]
        assert not outcome.is_ended, f"the end of {request_id} is reported twice"
        outcome.is_ended = True
        outcome.usage = output.transfer_usage.get(request_id)
        request = self._requests[request_id]
        if request_id in self._aborted:
            self._free(request)
            return
        if self.checks_content and request_id not in output.failed_recving:
            self._check_good_blocks(request, outcome)
        if outcome.error is None:
            request.status = RequestStatus.RUNNING
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self.manager.seal_blocks(request, request.num_computed_tokens)
        elif self.recomputes:
            self.manager.free(request)
            request.num_computed_tokens = 0
            request.has_failed_load = True
            request.status = RequestStatus.WAITING
        else:
            self.abort(request)

    def _check_good_blocks(self, request: Request, outcome: LoadOutcome) -> None:
        block_ids = self.manager.get_block_ids(request.request_id)[0]
        for position in set(outcome.loaded) - outcome.bad:
            assert self._holds(request, position, block_ids[position]), f"block {position} of {request.request_id} is wrong"

    def _free(self, request: Request) -> None:
        self.manager.free(request)
        self._requests.pop(request.request_id, None)
        self._aborted.discard(request.request_id)
