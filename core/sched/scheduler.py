"""The scheduler: which tokens of which requests one step computes.

Continuous batching with one token budget. There is no prefill or decode phase: each request has ``num_computed_tokens`` and
``num_tokens``, and every step closes part of the gap. The engine calls ``schedule``, runs the step, and hands the result to
``update_from_output``; that is one turn of its loop. Knows no tensors, sockets or threads.

Each rule has a module of its own in this package. Names and behaviour follow vLLM V1.

- before a step: ``running`` (tokens for running requests, preemption), ``admission`` (waiting requests, from ``queue``),
  ``encoder_inputs`` (images) over ``encoder_cache``, ``inflight_steps`` (steps that are not processed yet), ``early_loading``
  (prompts that are still computed elsewhere, in ``early_pulls``)
- after it: ``outputs`` and ``stop`` (new tokens), ``sealing`` (blocks that peers may read), ``announcements`` (of prompts that
  are not computed yet), ``finish`` (ends of requests),
  ``remote_kv`` (ends of transfers), ``stats`` (gauges and counters)
- beside both: ``grammars`` (requests that wait for their grammar, at first or again)
- after failures: ``load_failures`` with ``invalid_blocks`` (affected requests) and ``recompute_ownership`` (which request
  recomputes which block), ``encoder_failures``, ``quarantine`` (blocks that late bytes may still overwrite)

``state`` holds the data that they share.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from core.clock import Clock
from core.config_workers import SchedulerSection
from core.connector import KVConnectorScheduler
from core.ec_connector import ECConnectorScheduler
from core.errors import ContextTooLong, InvalidRequest, NoWorker
from core.kv.events import KVCacheEvent
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.request import (
    EngineCoreOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    NewRequest,
    Request,
    RequestStatus,
    SchedulerOutput,
)
from core.sched.admission import reserved_blocks, schedule_waiting
from core.sched.announcements import announce_prefixes
from core.sched.early_loading import begin_rounds, claim_early, end_early, settle_rounds, take_early
from core.sched.encoder_cache import EncoderCacheManager
from core.sched.encoder_failures import handle_failed_embeddings
from core.sched.encoder_inputs import EncoderInputs
from core.sched.finish import finish_requests
from core.sched.grammars import await_grammar, fail_grammar, put_back_broken, take_grammar
from core.sched.inflight_steps import end_step, seal_departed_blocks
from core.sched.load_failures import handle_load_failures, reassign_orphans, release_recomputed
from core.sched.outputs import cache_synchronous_loads, fail_requests, process_sampled_tokens, still_running, unhash_failed
from core.sched.quarantine import quarantine_blocks, release_quarantined
from core.sched.queue import RequestQueue
from core.sched.remote_kv import update_from_kv_xfer_finished
from core.sched.running import schedule_running
from core.sched.sealing import seal_computed_blocks
from core.sched.state import Announced, SchedulerState, Step
from core.sched.stats import EngineStats, make_stats
from core.wire.messages import ErrorInfo, LoadFailurePolicy
from core.wire.sampling import StructuredOutput

if TYPE_CHECKING:
    from core.grammar.compiled import CompiledGrammar


class Scheduler:
    """Owns every request of one engine from ``add_request`` until its blocks are free. One thread only.

    ``max_model_len`` in tokens, prompt and output; lowered to what the KV pool holds for one request.
    ``kv_load_failure_policy`` is for requests that bring none of their own. Without an ``encoder`` no request may have media.
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
        self.state = SchedulerState(
            config, kv_cache_manager, max_model_len, connector, clock, kv_load_failure_policy, encoder=encoder
        )
        self.kv_cache_manager = kv_cache_manager
        self.connector = connector
        self.max_model_len = self.state.max_model_len
        if connector is not None:
            connector.bind_kv_cache_manager(kv_cache_manager)

    # ---- one turn of the engine's loop -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide what the next step computes.

        The result must be run even if it schedules nothing: it carries the ids of ended requests and the connector's message.
        """
        state = self.state
        if state.recompute_ownership:
            reassign_orphans(state)
        step = Step(token_budget=state.config.step_tokens)
        state.encoder.begin_step()
        if state.early_pulls:
            settle_rounds(state)
        schedule_running(state, step)
        if not step.lacks_blocks:
            schedule_waiting(state, step)
        if state.early_pulls and not step.lacks_blocks and not step.refuses_blocks:
            begin_rounds(state, reserved_blocks(state))
        self._complete_output(step)
        self._update_after_schedule(step)
        return step.output

    def _complete_output(self, step: Step) -> None:
        """Add the totals, the requests that ended since the last step, and last the connectors' messages."""
        state, output = self.state, step.output
        output.total_num_scheduled_tokens = state.config.step_tokens - step.token_budget
        output.finished_req_ids, state.finished_req_ids = state.finished_req_ids, set()
        if state.put_back_req_ids:
            output.preempted_req_ids |= state.put_back_req_ids
            state.put_back_req_ids.clear()
        if state.connector is not None:
            output.awaits_blocks = not output.total_num_scheduled_tokens and state.connector.has_pending_block_frees()
            output.kv_connector_metadata = state.connector.build_connector_meta(output)
        state.encoder.complete_output(output)

    def _update_after_schedule(self, step: Step) -> None:
        """Advance the counters as if the step had run."""
        state = self.state
        async_scheduling = state.async_scheduling
        for request, num_tokens in zip(step.scheduled, step.output.num_scheduled_tokens.values(), strict=True):
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens
            if async_scheduling and request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
        state.inflight_steps.append(step)
        prefills = state.inflight_prefills
        for request in list(prefills.values()):
            if request.num_computed_tokens >= request.num_tokens:
                del prefills[request.request_id]

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Apply what a step produced, the oldest in flight; return the outputs of requests with new tokens or an end.

        Failures first: dropped requests get neither seals nor tokens. Seals before tokens: a request that a token ends
        describes its blocks to readers at once. Ends of transfers last: they free blocks, and a failure concerns all holders.
        """
        state, kv_output = self.state, model_output.kv_connector_output
        step = state.inflight_steps.popleft()
        assert step.output is scheduler_output, "steps are processed in the order in which they were scheduled"
        state.encoder.update_from_output(model_output)
        if kv_output is not None:
            self._take_kv_report(kv_output)
        failed, dropped = self._collect_failures(step, model_output)
        self._seal_computed(step, failed, dropped)
        outputs = process_sampled_tokens(state, step, model_output, dropped)
        if state.announced:
            outputs += announce_prefixes(state, step, dropped)
        state.encoder.release_computed(state.requests)
        failed = state.encoder.take_unavailable(state.requests) | failed
        if model_output.refused:  # after sealing: the KV that the step computed for them is good
            refused = still_running(state, step, model_output.refused)
            refused = {name: error for name, error in refused.items() if name not in failed}
            failed = put_back_broken(state, refused) | failed
        if failed:
            outputs += fail_requests(state, failed)
        if kv_output is not None:
            update_from_kv_xfer_finished(state, kv_output)
            release_quarantined(state, kv_output.unquarantined_block_ids)
        end_step(state, step)
        state.num_steps += 1
        return outputs

    def _take_kv_report(self, kv_output: KVConnectorOutput) -> None:
        """Pass the report of the connector's worker side to its scheduler side, and quarantine the blocks that it names."""
        if self.connector is not None:
            self.connector.update_connector_output(kv_output)
        self.state.keep_transfer_usage(kv_output.transfer_usage)
        quarantine_blocks(self.state, kv_output.quarantined_block_ids)

    def _collect_failures(self, step: Step, model_output: ModelRunnerOutput) -> tuple[dict[str, ErrorInfo], Container[str]]:
        """Apply every failure of a step; return the errors of the requests that end, and all whose results are dropped.

        The order is loaded KV, then embeddings, then sampled tokens, because a later failure may only be a consequence of an
        earlier one. The rules:

        - A request that ends gets the earliest of its errors, hence ``later | failed``.
        - A failure does not affect requests that an earlier one has rolled back: they go on and compute this again.
        - Dropped are requests that end, requests that are rolled back, and requests that have left the step (``step.void``).
        """
        state = self.state
        failed: dict[str, ErrorInfo] = {}
        if model_output.kv_connector_output is not None:
            failed = handle_load_failures(state, model_output.kv_connector_output)
        if model_output.failed_embeddings:
            failed = handle_failed_embeddings(state, step, model_output.failed_embeddings) | failed
        if model_output.failed:
            failed = unhash_failed(state, step, model_output.failed) | failed
        if state.rolled_back or step.void:
            return failed, failed.keys() | state.rolled_back | step.void
        return failed, failed

    def _seal_computed(self, step: Step, failed: Container[str], dropped: Container[str]) -> None:
        """Seal the blocks that a step has loaded and computed, and release the requests that waited for them."""
        state = self.state
        if step.synchronous_loads:
            cache_synchronous_loads(state, step, failed)
        if state.recompute_ownership:
            release_recomputed(state, step.output, dropped)
        seal_computed_blocks(state, step.output, dropped)
        if state.departures:
            seal_departed_blocks(state, step)

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextTooLong: it can never run here; the message names its length and the limit.
            InvalidRequest: it has no tokens, no token left to sample, an id that is in use, or images without room for them.
            NoWorker: its id was in use until now, and a transfer still reads or writes the blocks.
        """
        state = self.state
        self._check_can_run(request)
        if request.arrival_time == 0.0:
            request.arrival_time = state.clock.now()
        if request.mm_features:
            state.encoder.check_can_run(request)
        claim_early(state, request)
        if state.connector is not None:
            state.connector.on_new_request(request)
        state.requests[request.request_id] = request
        if request.announces:
            state.announced[request.request_id] = Announced()
        if request.sampling.structured_output is not None and request.grammar is None:
            await_grammar(state, request)
        else:
            state.waiting.add_request(request)

    def pull_early(self, new: NewRequest, hasher: BlockHasher) -> None:
        """Begin or continue an early pull. Nothing depends on it: it may never load anything, and end at any time."""
        if len(new.prompt_token_ids) < self.max_model_len:
            take_early(self.state, new, hasher)

    def take_grammar(self, output: StructuredOutput, grammar: CompiledGrammar, owner: str = "") -> None:
        """Let the requests that wait for this grammar be admitted; with ``owner``, this request alone."""
        take_grammar(self.state, output, grammar, owner)

    def fail_grammar(self, output: StructuredOutput, error: ErrorInfo, owner: str = "") -> list[EngineCoreOutput]:
        """End the requests that wait for this grammar, which cannot be had; return their last outputs."""
        return fail_grammar(self.state, output, error, owner)

    def take_lost_grammars(self) -> list[tuple[StructuredOutput, str]]:
        """Return the grammars that requests have lost since the last call, each with its only owner, if it is to have one."""
        lost = list(self.state.lost_grammars)
        self.state.lost_grammars.clear()
        return lost

    def check_length(self, num_tokens: int) -> None:
        """Refuse a request of ``num_tokens`` known tokens, prompt and output, that can never run here.

        Raises:
            ContextTooLong: there is no room for one more token; the message names the length and the limit.
        """
        if num_tokens >= self.max_model_len:
            raise ContextTooLong(
                f"the request has {num_tokens} tokens; prompt and at least one more token must fit the context length of "
                f"{self.max_model_len} tokens, what the model and the KV cache of this worker allow",
                param="prompt",
            )

    def _check_can_run(self, request: Request) -> None:
        known = self.state.requests.get(request.request_id)
        if known is not None and known.status.is_finished:
            raise NoWorker(f"request {request.request_id} has ended, but a transfer still uses its blocks: try again later")
        if known is not None:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        if request.num_tokens == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.num_output_tokens >= request.max_tokens:
            raise InvalidRequest(
                f"{request.num_output_tokens} tokens are there already, max_tokens is {request.max_tokens}", param="max_tokens"
            )
        self.check_length(request.num_tokens)

    def finish_requests(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[str]:
        """Abort or fail requests in any state, all of them for None; return the ids of those that had not ended yet.

        Unknown and finished ids are ignored. Blocks that a transfer still touches are freed when it has ended. The name of an
        early pull ends it.
        """
        ids = None if request_ids is None else list(request_ids)
        if self.state.early_pulls:
            end_early(self.state, [pull.name for pull in self.state.early_pulls] if ids is None else ids)
        return finish_requests(self.state, ids, status)

    @property
    def async_scheduling(self) -> bool:
        """True if steps may be scheduled on tokens that are not known yet: placeholders stand for them, nothing is guessed."""
        return self.state.async_scheduling

    def can_schedule_ahead(self) -> bool:
        """True if the next step may be scheduled and launched before the newest one is processed.

        Not while embeddings are computed or loaded: a step's report about them decides what the next one may compute.
        """
        state = self.state
        return state.async_scheduling and state.encoder.connector is None and not state.encoder.cache.holder_ids

    def has_unfinished_requests(self) -> bool:
        """True if a request waits, loads or runs, or one is loaded early."""
        state = self.state
        waits = state.waiting or state.kv_holding_waiting or state.grammar_waiting or state.early_pulls
        return bool(state.running or waits)

    def has_finished_requests(self) -> bool:
        """True if ends are not flushed to the runner yet, or blocks of no living request wait for a transfer."""
        state = self.state
        return bool(state.finished_req_ids or state.awaiting_sending or state.awaiting_recving or state.quarantined)

    def has_requests(self) -> bool:
        """True if the engine must continue stepping, if only to learn the end of a transfer."""
        return self.has_unfinished_requests() or self.has_finished_requests() or self.has_pending_push_work()

    def has_pending_push_work(self) -> bool:
        """True if a connector needs steps, requests or not."""
        if self.connector is not None and self.connector.has_pending_push_work():
            return True
        return self.ec_connector is not None and self.ec_connector.has_pending_push_work()

    # ---- read access ------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """Every request known, by id; finished ones as long as their blocks are not free."""
        return self.state.requests

    @property
    def running(self) -> list[Request]:
        """Running requests in order of admission."""
        return self.state.running

    @property
    def waiting(self) -> RequestQueue:
        """Requests that wait without holding blocks."""
        return self.state.waiting

    @property
    def kv_holding_waiting(self) -> RequestQueue:
        """Requests that hold blocks while they load, or have loaded and wait to run."""
        return self.state.kv_holding_waiting

    @property
    def ec_connector(self) -> ECConnectorScheduler | None:
        """The scheduler side of the EC connector, None without one."""
        return self.state.encoder.connector

    @property
    def encoder_cache(self) -> EncoderCacheManager:
        """The embeddings that the worker holds, and the requests that refer to them."""
        return self.state.encoder.cache

    @property
    def quarantined(self) -> Set[int]:
        """Blocks that belong to no request, because an abandoned transfer may still write them."""
        return self.state.quarantined

    @property
    def pinned(self) -> list[int]:
        """Blocks that steps in flight keep for requests that have left or were rolled back, once for each reference."""
        return [block.block_id for step in self.state.inflight_steps for block in step.pinned]

    def make_stats(self) -> EngineStats:
        """Return the readings for gauges and counters."""
        return make_stats(self.state)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the KV events since the last call: the prefix cache's, then the connector's."""
        events: list[KVCacheEvent] = self.kv_cache_manager.take_events()
        if self.connector is not None:
            events += self.connector.take_events()
        return events
