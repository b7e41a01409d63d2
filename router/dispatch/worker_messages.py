"""The messages of one request: builds ``Generate``, and applies ``PrefillDone`` and ``Tokens`` to the request's state."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec

from core.errors import ProtocolError
from core.wire.messages import ChoiceStart, ErrorInfo, Generate, PrefillDone, Tokens, TransferUsage, Usage
from core.wire.sampling import FORM_FIELD
from router.dispatch.members import GenerationWorker
from router.dispatch.request_state import LOCAL_PREFILL, RequestPhase, RequestState
from router.dispatch.timing import HandoffReport, RoutingReport, first_token_timing, second_token_timing
from router.dispatch.types import ChoiceUpdate, PromptReport, Submission, Update

_FEATURE = re.compile(r"images\[(\d{1,4})\]")


class TokensLost(ProtocolError):
    """A message with tokens was lost. Its worker has moved on, so the request must continue from the last token received."""


# ---- Generate ------------------------------------------------------------------------------------------------------


def new_generate(request: RequestState, now: float) -> Generate:
    """Return the message that starts a request on a prefill worker, or on a worker that serves it alone."""
    is_prefill = request.phase is RequestPhase.PREFILL
    announces = is_prefill and request.attempt.announces
    patience_ms = round(request.placed.patience_ms)
    return msgspec.structs.replace(_message(request, now), handoff=is_prefill, patience_ms=patience_ms, announces=announces)


def resuming_generate(request: RequestState, now: float) -> Generate:
    """Return the message that continues a request: from the handoff if there is one, else by recomputation."""
    choices = tuple(
        ChoiceStart(index=index, output_token_ids=tuple(request.output_token_ids[index])) for index in request.live_choices
    )
    message = msgspec.structs.replace(_message(request, now), kv_handoff=request.handoff, choices=choices)
    if not request.has_report:
        return message
    return msgspec.structs.replace(message, sampling=msgspec.structs.replace(message.sampling, prompt_logprobs=None))


def _message(request: RequestState, now: float) -> Generate:
    wanted = request.submission
    return Generate(
        request_id=request.wire_id,
        prompt_token_ids=wanted.prompt_token_ids,
        sampling=wanted.sampling,
        n=wanted.n,
        priority=wanted.priority,
        tenant=wanted.tenant,
        cache_salt=wanted.cache_salt,
        deadline_ms=max(1, round((request.deadline.at - now) * 1000)),
        kv_load_failure_policy=wanted.kv_load_failure_policy,
        kv_source=request.placed.source,
        mm_features=wanted.mm_features,
        media=wanted.media,
        ec_sources=tuple(request.ec_sources.values()),
        engine_request=wanted.engine_request,
    )


def name_image(submission: Submission, error: ErrorInfo, media_index: int | None = None) -> ErrorInfo:
    """Return a worker's error with the image named as in the client's body.

    An encode worker reports ``media_index``; a worker that computes prompts names a feature in the error, as ``images[0]``.
    """
    feature = _FEATURE.fullmatch(error.param or "")
    if feature is not None and int(feature[1]) < len(submission.mm_features):
        media_index = submission.mm_features[int(feature[1])].media_index
    if media_index is None or media_index >= len(submission.media_places):
        return error
    place = submission.media_places[media_index]
    reason = error.message.removeprefix(f"image {feature[1]} cannot be used: ") if feature else error.message
    return msgspec.structs.replace(error, message=f"{place}: the image cannot be used: {reason}", param=place)


def name_form(submission: Submission, error: ErrorInfo) -> ErrorInfo:
    """Return a worker's error with the form of the output named as in the client's body."""
    if error.param != FORM_FIELD or not submission.form_field:
        return error
    return msgspec.structs.replace(error, param=submission.form_field)


# ---- PrefillDone ---------------------------------------------------------------------------------------------------


def find_prefill_done_problem(message: PrefillDone, sender: GenerationWorker, request: RequestState) -> str | None:
    """Return why the message cannot be an answer to this request; None if it can."""
    is_left = sender.facts.leaves_first_token and not message.choices
    if sorted(choice.index for choice in message.choices) != list(range(request.submission.n)) and not is_left:
        return "first tokens do not cover every choice once"
    if any(choice.finish_reason in ("abort", "error") for choice in message.choices):
        return "it ended a choice by itself"
    handoff = message.kv_handoff
    if handoff is None:
        is_over = all(choice.finish_reason for choice in message.choices)
        has_none = not sender.facts.transports  # its connector stores KV where the decode worker finds it without a handoff
        return None if is_over or has_none else "a choice goes on, but there is no handoff"
    if (handoff.engine_id, handoff.incarnation) != sender.key:
        return f"its handoff names another worker, {handoff.engine_id}"
    return None


def apply_prefill_done(request: RequestState, message: PrefillDone, now: float) -> Update:
    """Record the first tokens, if there are any, and return the update for the client."""
    measured = request.measurements
    measured.hit_tokens = message.num_cached_tokens if message.tells_hits else None
    measured.pulled_tokens = message.kv_transfer.transferred_tokens if message.kv_transfer is not None else 0
    if message.choices:
        measured.first_token_at = now
        measured.first_token = first_token_timing(
            now - measured.arrival, message.queue_ms, message.prefill_ms, measured.encode_s
        )
    is_repeated, request.has_report = request.has_report, True  # the request began again without a token
    request.standing.was_admitted = True
    request.retries.on_token()
    updates = []
    for choice in message.choices:
        logprobs = (choice.logprobs,) if choice.logprobs is not None else None
        updates.append(ChoiceUpdate(choice.index, (choice.token_id,), logprobs, choice.finish_reason, choice.stop_reason))
        request.output_token_ids[choice.index].append(choice.token_id)
        request.finish_reasons[choice.index] = choice.finish_reason
    if message.fallback_reason:
        measured.prefill_loss = TransferUsage(
            recomputed_tokens=message.recomputed_tokens, fallback_reason=message.fallback_reason
        )
    report = PromptReport(
        message.num_cached_tokens,
        message.prompt_logprobs,
        measured.first_token,
        model_fingerprint=request.model_fingerprint,
    )
    return Update(choices=updates, prompt=None if is_repeated else report, handoff=_report(request))


# ---- Tokens --------------------------------------------------------------------------------------------------------


def apply_plain_token(request: RequestState, item: Tokens) -> bool:
    """Record a token in the midst of a decode leg of one choice, as most are; return False if ``apply_tokens`` has to."""
    is_bare = item.usage is None and item.finish_reason is None and item.logprobs is None and len(item.token_ids) == 1
    if not is_bare or item.index or request.phase is not RequestPhase.DECODE or request.submission.n != 1:
        return False
    output = request.output_token_ids[0]
    is_next = item.position == len(output) and item.position > 0
    if not is_next or not request.attempt.shown or request.retries.free or request.finish_reasons[0] is not None:
        return False
    output.append(item.token_ids[0])
    return True


def apply_tokens(request: RequestState, item: Tokens, update: Update, now: float) -> None:
    """Record one choice's tokens and add them to the request's update. An error changes nothing.

    Raises:
        TokensLost: there is a gap before these tokens.
        ProtocolError: the message is invalid.
    """
    _check(request, item)
    _note_shown(request, item.index)
    _apply_usage(request, item, update, now)
    if request.finish_reasons[item.index] is not None:
        return  # ended by a stop string; these tokens were in flight
    output = request.output_token_ids[item.index]
    num_known = len(output) - item.position  # tokens of a repeated message
    token_ids = item.token_ids[num_known:]
    logprobs = item.logprobs[num_known:] if item.logprobs is not None else None
    if token_ids and request.measurements.first_token_at is None:
        request.measurements.first_token_at = now
    output.extend(token_ids)
    request.finish_reasons[item.index] = item.finish_reason
    update.choices.append(ChoiceUpdate(item.index, token_ids, logprobs, item.finish_reason, item.stop_reason))


def _check(request: RequestState, item: Tokens) -> None:
    if item.index >= request.submission.n:
        raise ProtocolError(f"tokens of choice {item.index} of {request.submission.n}")
    if item.logprobs is not None and len(item.logprobs) != len(item.token_ids):
        raise ProtocolError("token_ids and logprobs differ in length")
    if item.finish_reason in ("abort", "error"):
        raise ProtocolError(f"the worker ended choice {item.index} by itself ({item.finish_reason})")
    num_known = len(request.output_token_ids[item.index])
    if item.position > num_known and request.finish_reasons[item.index] is None:
        raise TokensLost(f"tokens {num_known} to {item.position - 1} of choice {item.index} were lost on the way")


def _note_shown(request: RequestState, index: int) -> None:
    """Record a token of a choice. Once every live choice has one, the handoff is read and its lease need not be renewed."""
    request.retries.on_token()
    request.attempt.shown.add(index)
    request.has_decoded = True
    if request.attempt.shown.issuperset(request.live_choices):
        request.phase = RequestPhase.DECODE
        request.handoff = None


def _apply_usage(request: RequestState, item: Tokens, update: Update, now: float) -> None:
    if item.usage is None:
        return
    num_cached_tokens = min(item.usage.num_cached_tokens, len(request.submission.prompt_token_ids))
    if item.usage.is_late and item.index == 0 and request.alone_attempt == request.attempt.number:
        request.measurements.hit_tokens = num_cached_tokens
        earlier = update.prompt or PromptReport(0, model_fingerprint=request.model_fingerprint, is_first=False)
        update.prompt = replace(earlier, num_cached_tokens=num_cached_tokens, is_late=True)
    if not request.has_report:  # an aggregated worker reports the prompt here; of a pair, the prefill worker did
        request.has_report = True
        request.alone_attempt = request.attempt.number
        request.measurements.hit_tokens = num_cached_tokens
        if item.usage.kv_transfer is not None:
            request.measurements.pulled_tokens = item.usage.kv_transfer.transferred_tokens
        request.measurements.alone_ttft_ms = (now - request.measurements.arrival) * 1e3
        update.prompt = PromptReport(
            num_cached_tokens,
            item.usage.prompt_logprobs,
            model_fingerprint=request.model_fingerprint,
            is_late=item.usage.is_late and item.index == 0,
        )
    if request.is_degraded:
        _record_cost_alone(request, item.index, item.usage)
    elif item.usage.kv_transfer is not None:
        _record_cost(request, item.index, item.usage, item.usage.kv_transfer, now)
    update.handoff = _report(request)


def _record_cost(request: RequestState, index: int, usage: Usage, cost: TransferUsage, now: float) -> None:
    """Record the cost of a choice, unless an earlier attempt has reported one for it.

    Without a handoff, on an aggregated worker, the cost counts only if a tier lost blocks.
    """
    measurements = request.measurements
    has_handoff = measurements.first_token is not None
    if not has_handoff and not cost.fallback_reason:
        return
    if request.fallback_reason and not request.attempt.has_handoff:
        num_computed = max(0, len(request.submission.prompt_token_ids) - usage.num_cached_tokens)
        cost = msgspec.structs.replace(cost, recomputed_tokens=num_computed, fallback_reason=request.fallback_reason)
    if measurements.costs.get(index, (request.attempt.number,))[0] == request.attempt.number:
        measurements.costs[index] = (request.attempt.number, cost)
    if has_handoff and measurements.first_token_at is not None and measurements.second_token is None:
        measurements.second_token = second_token_timing(now - measurements.first_token_at, cost)


def _record_cost_alone(request: RequestState, index: int, usage: Usage) -> None:
    """Record, for the first choice that reports, that the decode worker computed the prompt instead of loading it."""
    if not request.measurements.costs:
        num_computed = max(0, len(request.submission.prompt_token_ids) - usage.num_cached_tokens)
        cost = TransferUsage(recomputed_tokens=num_computed, fallback_reason=request.fallback_reason)
        request.measurements.costs[index] = (request.attempt.number, cost)


def _report(request: RequestState) -> HandoffReport | None:
    """Return the report; None before the handoff has ended, or without one, unless a tier lost blocks."""
    measurements, cost = request.measurements, request.measurements.cost
    is_over = request.is_degraded or request.is_local or measurements.second_token is not None
    if not is_over and not cost.fallback_reason:
        return None
    success = LOCAL_PREFILL if request.is_local else "loaded"
    return HandoffReport(
        cost=cost,
        first_token=measurements.first_token,
        second_token=measurements.second_token,
        outcome=(measurements.handoff_cost.fallback_reason or success) if is_over else None,
        num_retries=len(request.retries.kinds),
        num_replays=request.retries.kinds.count("replay"),
        num_refusals=request.retries.num_refusals,
        routing=routing_report(request),
    )


def routing_report(request: RequestState) -> RoutingReport | None:
    """Return the prediction of the latest placement with what came true."""
    timing = request.measurements.first_token
    if request.placed.routing is None:
        return None
    alone_ms = request.measurements.alone_ttft_ms
    ttft_ms = timing.total_ms - (timing.encode_ms or 0.0) if timing is not None else alone_ms
    pulled_tokens = request.measurements.pulled_tokens if request.placed.routing.source else 0
    return msgspec.structs.replace(
        request.placed.routing, hit_tokens=request.measurements.hit_tokens, pulled_tokens=pulled_tokens, ttft_ms=ttft_ms
    )
