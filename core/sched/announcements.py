"""The sealed prefixes of prompts that decode workers may read before they are computed to their end.

Runs after the blocks of a step are sealed. A prompt of one chunk is never announced: its handoff says the same.
"""

from __future__ import annotations

from collections.abc import Container

from core.request import EngineCoreOutput, Request, RequestStatus, SealedPrefix
from core.sched.state import SchedulerState, Step


def announce_prefixes(state: SchedulerState, step: Step, dropped: Container[str]) -> list[EngineCoreOutput]:
    """Return an output for each prompt of which the step has sealed more blocks, and which is not computed yet.

    After a preemption, or if what a step computed for it was ``dropped``, a prompt is announced from its beginning again.
    """
    outputs = []
    for request_id, announced in list(state.announced.items()):
        request = state.requests.get(request_id)
        if request is None or request.status.is_finished:
            del state.announced[request_id]
            continue
        if announced.num_preemptions < request.num_preemptions or request_id in dropped:
            announced.num_tokens, announced.num_preemptions = 0, request.num_preemptions
        is_in_step = request_id in step.output.num_scheduled_tokens and request_id not in dropped
        if is_in_step and request.status is RequestStatus.RUNNING:
            prefix = _sealed_prefix(state, request, announced.num_tokens)
            if prefix is not None:
                announced.num_tokens = prefix.handoff.num_tokens
                outputs.append(EngineCoreOutput(request_id, [], sealed_prefix=prefix))
    return outputs


def _sealed_prefix(state: SchedulerState, request: Request, num_announced: int) -> SealedPrefix | None:
    """Return what is sealed of a prompt beyond what was announced; None if that is nothing, or the whole prompt."""
    num_computed = request.num_computed_tokens - request.num_in_flight_tokens
    end = state.kv_cache_manager.floor_to_boundary(num_computed)
    if num_computed >= request.num_prompt_tokens or end <= num_announced or state.connector is None:
        return None
    handoff = state.connector.describe_prefix(request, num_announced, end)
    return None if handoff is None else SealedPrefix(handoff, num_announced, _ready_s(state, request, num_computed))


def _ready_s(state: SchedulerState, request: Request, num_computed: int) -> float:
    """Predict, from the pace so far, in how many seconds the rest of a prompt is computed."""
    num_cached = request.prefill_stats.num_cached_tokens if request.prefill_stats is not None else 0
    if request.first_scheduled_time is None or num_computed <= num_cached:
        return 0.0
    elapsed_s = max(0.0, state.clock.now() - request.first_scheduled_time)
    return elapsed_s * (request.num_prompt_tokens - num_computed) / (num_computed - num_cached)
