"""Missing embeddings: the KV that a step computed without them is discarded.

The worker reports them by identifier; by then the KV of the step was computed from placeholders. If the encoder failed on the
item itself (a bad image), the requests that needed it end, each with an error that names its own feature. If the embeddings
were lost in transfer, the requests compute that part again, with embeddings computed here. Runs after failed KV loads are
handled.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from core.errors import EncoderInputMissing
from core.request import Request, RequestStatus, SchedulerOutput
from core.sched.load_failures import discard_computed
from core.sched.state import SchedulerState, Step
from core.wire.messages import ErrorInfo


def handle_failed_embeddings(state: SchedulerState, step: Step, failed: Mapping[bytes, ErrorInfo]) -> dict[str, ErrorInfo]:
    """Discard the step of every request that needed one of these embeddings; return the errors of those that end.

    A request that was already rolled back because of its KV is skipped.
    """
    computed = _computed_identifiers(state, step.output)
    errors: dict[str, ErrorInfo] = {}
    concerned: list[Request] = []
    for request_id, num_scheduled in step.output.num_scheduled_tokens.items():
        request = state.requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING or request_id in state.rolled_back | step.void:
            continue
        start = request.num_computed_tokens - request.num_in_flight_tokens
        index = _first_missing(request, start, start + num_scheduled, failed)
        if index is None:
            continue
        concerned.append(request)
        request.has_failed_embedding = True
        missing = request.mm_features[index].identifier
        if missing in computed:
            errors[request_id] = _bad_image(index, failed[missing])
    if concerned:
        error = EncoderInputMissing(next(iter(failed.values())).message)
        discard_computed(state, step, concerned, ErrorInfo.of(error))
    return errors


def _computed_identifiers(state: SchedulerState, scheduler_output: SchedulerOutput) -> set[bytes]:
    """Return the items that the step was to compute here."""
    return {
        state.requests[request_id].mm_features[index].identifier
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items()
        if request_id in state.requests
        for index in indices
    }


def _first_missing(request: Request, start: int, end: int, failed: Container[bytes]) -> int | None:
    """Return the first of the failed items that the request's tokens [start, end) needed, by the index of its feature."""
    for index, feature in enumerate(request.mm_features):
        is_in_step = feature.end > start and feature.offset < end
        if is_in_step and feature.identifier in failed:
            return index
    return None


def _bad_image(index: int, error: ErrorInfo) -> ErrorInfo:
    """Return the encoder's error of an item, for a request that shows it as its feature ``index``."""
    message = f"image {index} cannot be used: {error.message}"
    return msgspec.structs.replace(error, message=message, param=f"images[{index}]")
