"""The timelines of the last requests: what happened to each, when, on which worker, and how true the predictions were.

Owns the table and the shape of a timeline. It holds ids of requests and workers, times, counts and error codes: neither
prompts nor outputs, and no text of an error. Its memory is bounded by ``NUM_KEPT`` ended requests and ``MAX_EVENTS`` each;
running ones are bounded by the router's own limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain, islice

import msgspec

from core.wire.messages import EncodeRequest, ErrorInfo, Generate
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import EncodeEnded, Moved, RequestState, Retried
from router.dispatch.timing import FirstTokenTiming, RoutingReport, SecondTokenTiming
from router.dispatch.types import Submission
from router.dispatch.worker_messages import routing_report
from router.metrics import CLIENT_ERRORS

NUM_KEPT = 512
MAX_EVENTS = 48  # of one request; later ones are counted
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # of the answers' ids
_FIRST_STEPS = ("encode", "queue", "prefill", "relay")
_SECOND_STEPS = ("relay", "queue", "transfer", "verify", "first_step")


class TimelineEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that happened ``at_ms`` after the request's arrival.

    ``name`` is the leg that was sent to ``worker`` (encode, prefill, decode, or ``alone``: the worker serves it by itself),
    ``encoded``, ``first_token``, ``retry`` (the worker failed it with ``code``),
    ``move`` (its prompt left the queue of ``worker``) or ``ended``.
    """

    at_ms: float
    name: str
    worker: str = ""
    code: str = ""
    kind: str = ""  # of a retry


class TimelineStep(msgspec.Struct, kw_only=True):
    """A measured part of the time to the first or to the second token, or the tokens after that (``decode``).

    The durations are measured by the workers and the positions are not: the parts are laid end to end.
    """

    leg: str  # "first_token", "second_token" or "output"
    name: str
    start_ms: float  # after the arrival
    ms: float


class TimelineHandoff(msgspec.Struct, kw_only=True):
    """What became of the handoff, and what loading it cost."""

    outcome: str
    transport: str
    num_bytes: int
    num_tokens: int
    verified_blocks: int
    recomputed_tokens: int


class RequestSummary(msgspec.Struct, kw_only=True):
    """One line about a request. ``state`` is running, finished, failed, or refused: by a client's error, or its leaving."""

    request_id: str
    state: str
    outcome: str  # reasons of the end, or the code of the error; empty while it runs
    age_s: float  # since its arrival
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: float | None
    total_ms: float  # so far
    num_retries: int


class Timeline(RequestSummary, kw_only=True):
    """All that is known of one request."""

    num_choices: int
    prefill: str  # the workers of its latest attempt; empty if it had none
    decode: str
    routing: RoutingReport | None  # of its latest placement; None if it was placed by load
    num_cached_tokens: int | None  # of the prompt, as the worker that computed it reported
    handoff: TimelineHandoff | None
    mean_itl_ms: float | None
    num_refusals: int  # by decode workers
    steps: list[TimelineStep]
    events: list[TimelineEvent]
    num_more_events: int


@dataclass(slots=True)
class OpenTimeline:
    """A request that runs. ``request`` is None until it is placed."""

    submission: Submission
    client_id: str
    arrival: float
    request: RequestState | None = None
    is_placed: bool = False  # its first leg was sent
    outcome: str = ""  # of its handoff
    events: list[TimelineEvent] = field(default_factory=list)
    num_more_events: int = 0

    def note(self, event: TimelineEvent) -> None:
        """Add an event, or count it if there are many."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.num_more_events += 1

    def at_ms(self, now: float) -> float:
        """Return a time of the router's clock as ms after the arrival."""
        return round((now - self.arrival) * 1e3, 3)


@dataclass(frozen=True, slots=True)
class _Ended:
    client_id: str
    arrival: float
    timeline: Timeline


class Timelines:
    """The running and the last ended requests of one router. Times are seconds of its clock."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._open: dict[str, OpenTimeline] = {}
        self._ended: deque[_Ended] = deque(maxlen=num_kept)

    def begin(self, submission: Submission, client_id: str, now: float) -> OpenTimeline:
        """Open the timeline of a request that has arrived."""
        opened = self._open[submission.request_id] = OpenTimeline(submission, client_id, now)
        return opened

    def get(self, request_id: str) -> OpenTimeline | None:
        """Return the timeline of a running request."""
        return self._open.get(request_id)

    def note_leg(self, request_id: str, message: Generate | EncodeRequest, worker: str, now: float) -> None:
        """Record that a leg was sent to a worker. Unknown ids are ignored, here and below."""
        if (found := self._open.get(request_id)) is not None:
            found.note(TimelineEvent(at_ms=found.at_ms(now), name=_leg_of(message), worker=worker))

    @staticmethod
    def note_first_token(found: OpenTimeline, now: float) -> None:
        """Record when the client got its first token."""
        found.note(TimelineEvent(at_ms=found.at_ms(now), name="first_token"))

    def note_encoded(self, ended: EncodeEnded, now: float) -> None:
        """Record the end of an encode leg."""
        if (found := self._open.get(ended.request_id)) is not None:
            at_ms, worker = found.at_ms(now), ended.worker.engine_id
            found.note(TimelineEvent(at_ms=at_ms, name="encoded", worker=worker, code=ended.outcome))

    def note_retry(self, retried: Retried, now: float) -> None:
        """Record that a worker failed the request, which goes on."""
        if (found := self._open.get(retried.request_id)) is not None:
            at_ms, worker = found.at_ms(now), retried.failed.engine_id
            found.note(TimelineEvent(at_ms=at_ms, name="retry", worker=worker, code=retried.error.code, kind=retried.kind))

    def note_move(self, moved: Moved, now: float) -> None:
        """Record that the prompt has left the queue of a worker for another one."""
        if (found := self._open.get(moved.request_id)) is not None:
            found.note(TimelineEvent(at_ms=found.at_ms(now), name="move", worker=moved.former.engine_id))

    def end(self, request: RequestState, now: float) -> None:
        """Close the timeline of a request that has ended."""
        found = self._open.pop(request.request_id, None)
        if found is not None:
            found.request = request
            self._close(found, request.error, now)

    def fail(self, request_id: str, error: ErrorInfo, now: float) -> None:
        """Close the timeline of a request that was refused, or lost by the router core."""
        found = self._open.pop(request_id, None)
        if found is not None:
            self._close(found, error, now)

    def _close(self, found: OpenTimeline, error: ErrorInfo | None, now: float) -> None:
        code = error.code if error else ""
        found.note(TimelineEvent(at_ms=found.at_ms(now), name="ended", code=code))
        self._ended.append(_Ended(found.client_id, found.arrival, _timeline(found, now, error, is_over=True)))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def find(self, name: str, now: float, limit: int = 32) -> list[Timeline]:
        """Return the timelines of a request id: the router's, that of an answer, or the client's ``X-Request-Id``.

        A client's id has one timeline per prompt, and may have been used before; the latest is the first.
        """
        own = next((name.removeprefix(prefix) for prefix in _ID_PREFIXES if name.startswith(prefix)), name)
        running = (
            _timeline(found, now, None)
            for request_id, found in reversed(self._open.items())
            if request_id == own or found.client_id == name
        )
        ended = (
            self._aged(found, now)
            for found in reversed(self._ended)
            if found.timeline.request_id == own or found.client_id == name
        )
        return list(islice(chain(running, ended), limit))

    def latest(self, count: int, now: float) -> list[RequestSummary]:
        """Return one line about each of the latest requests, running ones first."""
        running = (_timeline(found, now, None) for found in reversed(self._open.values()))
        ended = (self._aged(found, now) for found in reversed(self._ended))
        return [_summary(timeline) for timeline in islice(chain(running, ended), count)]

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    @staticmethod
    def _aged(ended: _Ended, now: float) -> Timeline:
        return msgspec.structs.replace(ended.timeline, age_s=round(now - ended.arrival, 1))


def _summary(timeline: Timeline) -> RequestSummary:
    return RequestSummary(**{name: getattr(timeline, name) for name in RequestSummary.__struct_fields__})


def _timeline(found: OpenTimeline, now: float, error: ErrorInfo | None, *, is_over: bool = False) -> Timeline:
    request, wanted = found.request, found.submission
    first_token_at = request.first_token_at if request else None
    num_output_tokens = request.num_output_tokens if request else 0
    total_ms = found.at_ms(now)
    ttft_ms = None if first_token_at is None else found.at_ms(first_token_at)
    return Timeline(
        request_id=wanted.request_id,
        state=_state(error, is_over=is_over),
        outcome=_outcome(request, error) if is_over else "",
        age_s=round(now - found.arrival, 1),
        num_prompt_tokens=len(wanted.prompt_token_ids),
        num_output_tokens=num_output_tokens,
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        num_retries=len(request.retries.kinds) if request else 0,
        num_choices=wanted.n,
        prefill=_name(request.attempt.prefill) if request else "",
        decode=_name(request.attempt.decode) if request else "",
        routing=routing_report(request) if request else None,
        num_cached_tokens=request.measurements.hit_tokens if request else None,
        handoff=_handoff(found.outcome, request) if request else None,
        mean_itl_ms=_mean_itl_ms(ttft_ms, total_ms, (num_output_tokens - wanted.n) / wanted.n),
        num_refusals=request.retries.num_refusals if request else 0,
        steps=_steps(request, ttft_ms, total_ms) if request else [],
        events=list(found.events),
        num_more_events=found.num_more_events,
    )


def _name(worker: WorkerKey | None) -> str:
    return worker.engine_id if worker is not None else ""


def _state(error: ErrorInfo | None, *, is_over: bool) -> str:
    if error is not None:
        return "refused" if error.code in CLIENT_ERRORS else "failed"
    return "finished" if is_over else "running"


def _outcome(request: RequestState | None, error: ErrorInfo | None) -> str:
    if error is not None:
        return error.code
    return ",".join(sorted({str(reason) for reason in request.finish_reasons})) if request else ""


def _mean_itl_ms(ttft_ms: float | None, total_ms: float, num_later_tokens: float) -> float | None:
    return None if ttft_ms is None or num_later_tokens <= 0 else round((total_ms - ttft_ms) / num_later_tokens, 3)


def _handoff(outcome: str, request: RequestState) -> TimelineHandoff | None:
    if not outcome:
        return None
    cost = request.measurements.handoff_cost
    return TimelineHandoff(
        outcome=outcome,
        transport=cost.transport,
        num_bytes=cost.transferred_bytes,
        num_tokens=cost.transferred_tokens,
        verified_blocks=cost.verified_blocks,
        recomputed_tokens=cost.recomputed_tokens,
    )


def _steps(request: RequestState, ttft_ms: float | None, total_ms: float) -> list[TimelineStep]:
    """Return the measured parts, end to end, and the output after them."""
    if ttft_ms is None:
        return []
    first, second = request.measurements.first_token, request.measurements.second_token
    steps = _laid_out("first_token", _FIRST_STEPS, first, 0.0) if first else []
    steps = steps or [TimelineStep(leg="first_token", name="first_token", start_ms=0.0, ms=ttft_ms)]
    if second:
        steps += _laid_out("second_token", _SECOND_STEPS, second, ttft_ms)
    start = ttft_ms + (second.total_ms if second else 0.0)
    if request.num_output_tokens > request.submission.n and total_ms > start:
        steps.append(TimelineStep(leg="output", name="decode", start_ms=round(start, 3), ms=round(total_ms - start, 3)))
    return steps


def _laid_out(
    leg: str, names: tuple[str, ...], timing: FirstTokenTiming | SecondTokenTiming, start_ms: float
) -> list[TimelineStep]:
    steps = []
    for name in names:
        ms = getattr(timing, f"{name}_ms")
        if ms is not None:
            steps.append(TimelineStep(leg=leg, name=name, start_ms=round(start_ms, 3), ms=round(ms, 3)))
            start_ms += ms
    return steps


def _leg_of(message: Generate | EncodeRequest) -> str:
    if isinstance(message, EncodeRequest):
        return "encode"
    if message.handoff:
        return "prefill"
    return "decode" if message.choices else "alone"
