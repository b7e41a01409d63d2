"""The results of one step, request by request: new tokens, ends, and the handoffs and statistics sent with them.

Runs once per step and loops over the requests that the step computed, a hot path.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from core.request import (
    FINISH_REASONS,
    EngineCoreOutput,
    FirstTokenTimes,
    ModelRunnerOutput,
    Request,
    RequestStatus,
)
from core.sched.finish import finish_requests, free_request, remove_from_running
from core.sched.inflight_steps import evict_departed_blocks, evict_failed_departures
from core.sched.state import SchedulerState, Step
from core.sched.stop import append_output_tokens
from core.wire.messages import ErrorInfo


def process_sampled_tokens(
    state: SchedulerState, step: Step, model_output: ModelRunnerOutput, dropped: Container[str]
) -> list[EngineCoreOutput]:
    """Append the step's tokens and end the requests that stop; return one output per request with new tokens or an end.

    ``dropped`` requests (they end or are rolled back) and requests that left or were preempted since the step was scheduled
    get nothing: their tokens were computed from bad KV, or from KV that is no longer theirs.
    """
    outputs: list[EngineCoreOutput] = []
    stopped: list[Request] = []
    requests, sampled, running = state.requests, model_output.sampled_token_ids, RequestStatus.RUNNING
    max_model_len, has_extras = state.max_model_len, bool(model_output.logprobs or model_output.prompt_logprobs)
    for request_id, num_scheduled in step.output.num_scheduled_tokens.items():
        request = requests.get(request_id)
        if request is None or request_id in step.void:
            continue
        request.num_in_flight_tokens -= num_scheduled
        token_ids = sampled.get(request_id)
        if not token_ids or request.status is not running or request_id in dropped:
            continue
        if request.num_output_placeholders:
            request.num_output_placeholders -= len(token_ids)
        output = EngineCoreOutput(request_id, append_output_tokens(request, token_ids, max_model_len))
        if request.prefill_stats is not None:
            output.prefill_stats = request.take_prefill_stats()
            output.first_token_times = _first_token_times(state, request)
            output.transfer_usage = state.transfer_usage.pop(request_id, None)  # loads after a preemption are not reported
        if has_extras:
            _attach_logprobs(output, model_output)
        if request.status is not running:
            stopped.append(request)
            output.finish_reason = FINISH_REASONS[request.status]
            output.stop_reason = request.stop_reason
            output.kv_handoff = free_request(state, request)
        outputs.append(output)
    remove_from_running(state, stopped)
    return outputs


def _first_token_times(state: SchedulerState, request: Request) -> FirstTokenTimes:
    assert request.first_scheduled_time is not None, f"{request!r} has put out a token but was never scheduled"
    return FirstTokenTimes(
        wait_s=max(0.0, request.first_scheduled_time - request.arrival_time),
        compute_s=max(0.0, state.clock.now() - request.first_scheduled_time),
    )


def _attach_logprobs(output: EngineCoreOutput, model_output: ModelRunnerOutput) -> None:
    logprobs = model_output.logprobs.get(output.request_id)
    output.logprobs = None if logprobs is None else logprobs[: len(output.new_token_ids)]
    output.prompt_logprobs = model_output.prompt_logprobs.get(output.request_id)


def still_running(state: SchedulerState, step: Step, errors: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
    """Return the errors of the requests for which the step still counts.

    A rolled-back request computed on bad KV, so its error is dropped and it continues. A new request that has reused the id
    of a request of the step is not affected either.
    """
    running = RequestStatus.RUNNING
    found = {request_id: state.requests.get(request_id) for request_id in errors}
    return {
        request_id: errors[request_id]
        for request_id, request in found.items()
        if request is not None
        and request.status is running
        and request_id not in state.rolled_back
        and request_id not in step.void
    }


def unhash_failed(state: SchedulerState, step: Step, failed: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
    """Evict the KV of the failed requests, since it may be corrupt, and return those still running with their errors.

    Requests that are gone may have left blocks computed from it, so all cached blocks without a reference are evicted, and
    those that transfers of finished requests still read. A request that still runs on it gets no token either, and fails by
    itself.
    """
    found = still_running(state, step, failed)
    _evict_blocks_of(state, found)
    if evict_failed_departures(state, step, failed) or found:
        evict_departed_blocks(state)
        _evict_blocks_of(state, [name for name, request in state.requests.items() if request.status.is_finished])
    return found


def _evict_blocks_of(state: SchedulerState, request_ids: Iterable[str]) -> None:
    for request_id in request_ids:
        for block_ids in state.kv_cache_manager.get_block_ids(request_id):
            state.kv_cache_manager.evict_blocks(block_ids)


def fail_requests(state: SchedulerState, failed: Mapping[str, ErrorInfo]) -> list[EngineCoreOutput]:
    """End these requests with their errors; return their last outputs."""
    usage = {request_id: state.transfer_usage.get(request_id) for request_id in failed}
    return [
        EngineCoreOutput(
            request_id,
            [],
            finish_reason=FINISH_REASONS[RequestStatus.FINISHED_ERROR],
            transfer_usage=usage[request_id],
            error=failed[request_id],
        )
        for request_id in finish_requests(state, failed, RequestStatus.FINISHED_ERROR)
    ]


def cache_synchronous_loads(state: SchedulerState, step: Step, failed: Container[str]) -> None:
    """Make the blocks of synchronous loads hits and seal them, now that the step has run and the loads are known to be good.

    Of a rolled-back load these are the blocks that it keeps. Runs before the step's tokens are applied, because a request that
    they end frees its blocks.
    """
    for request in step.synchronous_loads:
        is_dropped = request.request_id in failed or request.request_id in step.void
        is_good = not is_dropped and not state.recompute_ownership.holds_back(request.request_id)
        if request.status is RequestStatus.RUNNING and is_good:
            num_later = request.num_in_flight_tokens - step.output.num_scheduled_tokens[request.request_id]
            num_computed_tokens = request.num_computed_tokens - num_later
            state.kv_cache_manager.cache_blocks(request, num_computed_tokens)
            state.kv_cache_manager.seal_blocks(request, num_computed_tokens)
