"""What is recorded of each request: metrics, spans, timelines, the traffic between workers, and log lines.

Owns which event is recorded where. ``router.dispatch.worker_gateway`` passes the events on; nothing here changes a request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.errors import Cancelled
from core.log import event
from core.tracing import TraceContext, Tracer
from core.wire.messages import EncodeRequest, ErrorInfo, Generate, RouterMessage, TransferUsage
from router.dispatch.core import RouterCore
from router.dispatch.members import Member
from router.dispatch.request_state import EncodeEnded, Moved, RequestPhase, RequestState, Retried
from router.dispatch.timing import HandoffReport
from router.dispatch.traces import RequestTraces
from router.dispatch.types import PromptReport, Submission, Update
from router.dispatch.worker_messages import routing_report
from router.metrics import BY_LOAD, RouterMetrics
from router.records.history import Gauges, History, PoolLoad
from router.records.timelines import OpenTimeline, Timelines
from router.records.traffic import Traffic

logger = logging.getLogger(__name__)

NOT_REPORTED = "not_reported"  # what became of a handoff, in its timeline


@dataclass(slots=True)
class ObservedRequest:
    """What is measured of a running request, in seconds of the router's clock."""

    timeline: OpenTimeline
    last_token_at: float | None = None
    has_handoff: bool = False


class RequestObserver:
    """Records what happens to the requests of one router. All methods belong to one event loop."""

    def __init__(self, core: RouterCore, model: str, clock: Clock, metrics: RouterMetrics) -> None:
        self._core = core
        self._model = model
        self._clock = clock
        self._metrics = metrics
        self.traces = RequestTraces(None, model)
        self.timelines = Timelines()
        self.traffic = Traffic()
        self.history = History(metrics.registry, self._read_gauges)
        self._num_ended_tokens = 0  # output tokens of ended requests

    def trace_with(self, tracer: Tracer) -> None:
        """Record spans of all requests from now on."""
        self.traces = RequestTraces(tracer, self._model)

    # ---- from arrival to end -----------------------------------------------------------------------------------------

    def on_arrival(self, submissions: Sequence[Submission], client_id: str, trace: TraceContext | None, now: float) -> None:
        """Record the prompts of an HTTP request; ``trace`` is the client's span."""
        self.traces.begin(submissions, trace, now)
        for submission in submissions:
            self.timelines.begin(submission, client_id, now)

    def on_placed(self, request_id: str) -> ObservedRequest:
        """Record that a request has been placed; return what its updates are recorded in."""
        timeline = self.timelines.get(request_id)
        assert timeline is not None, f"{request_id} has not arrived"
        timeline.request = self._core.dispatcher.requests.get(request_id)
        return ObservedRequest(timeline)

    def on_sent(self, message: RouterMessage, worker: Member) -> RouterMessage:
        """Record a leg that is sent to a worker; return its message with the span of the leg."""
        if not isinstance(message, Generate | EncodeRequest):
            return message
        now = self._clock.now()
        for request_id in self._core.dispatcher.find_requests([message.request_id]):
            self._count_placement(request_id)
            self.timelines.note_leg(request_id, message, worker.key.engine_id, now)
            if self.traces.is_on:
                return self.traces.begin_leg(request_id, message, worker.key, now)
        return message

    def _count_placement(self, request_id: str) -> None:
        """Count the placement of a request at its first leg, which comes later if it had to wait for room."""
        timeline = self.timelines.get(request_id)
        if timeline is None or timeline.request is None or timeline.is_placed:
            return
        timeline.is_placed = True
        routing = timeline.request.placed.routing
        self._metrics.count_placement(routing.reason if routing is not None else BY_LOAD)

    def on_update(self, observed: ObservedRequest, update: Update) -> None:
        """Record an update for the client."""
        if update.has_tokens:
            self.on_tokens(observed, self._clock.now())
        if update.prompt is not None:
            self._on_prompt(observed, update.prompt)
        if update.handoff is not None and not observed.has_handoff:
            self._on_handoff(observed, update.handoff)

    def on_tokens(self, observed: ObservedRequest, now: float) -> None:
        """Record that new tokens of a request have arrived."""
        last_token_at, observed.last_token_at = observed.last_token_at, now
        if last_token_at is not None:
            self._metrics.inter_token_s.observe(now - last_token_at)
        else:
            self._on_first_token(observed, now)

    def on_encoded(self, ended: EncodeEnded) -> None:
        """Record the end of an encode leg."""
        self._metrics.count_encodes(ended.outcome, ended.num_images, ended.num_cached)
        now = self._clock.now()
        self.traces.end_encode_leg(ended, now)
        self.timelines.note_encoded(ended, now)

    def on_retried(self, retried: Retried) -> None:
        """Record that a worker failed a request, which goes on."""
        now = self._clock.now()
        self._metrics.count_retry(retried.kind, retried.error.code)
        self.traces.note_retry(retried, now)
        self.timelines.note_retry(retried, now)
        logger.warning(
            event(
                "retried",
                request_id=retried.request_id,
                kind=retried.kind,
                code=retried.error.code,
                message=retried.error.message,
                failed=retried.failed.engine_id,
                successor=retried.successor.engine_id if retried.successor else "-",
            )
        )

    def on_moved(self, moved: Moved) -> None:
        """Record that a prompt has left a long queue for a worker that computes it sooner."""
        now = self._clock.now()
        self._metrics.count_move()
        self.traces.note_move(moved, now)
        self.timelines.note_move(moved, now)
        former, successor = moved.former.engine_id, moved.successor.engine_id
        logger.info(
            event("moved", request_id=moved.request_id, former=former, successor=successor, gain_ms=round(moved.gain_s * 1e3))
        )

    def on_ended(self, request: RequestState, now: float, client_id: str | None) -> None:
        """Record the end of a request; ``client_id`` is None if no client has been waiting for it."""
        timeline = self.timelines.get(request.request_id)
        arrival = timeline.arrival if timeline is not None else request.arrival  # it may have waited for a worker since
        self._num_ended_tokens += request.num_output_tokens
        self._metrics.count_tokens(len(request.submission.prompt_token_ids), request.num_output_tokens)
        if request.error is None:
            self._metrics.observe_success(now - arrival, [str(reason) for reason in request.finish_reasons])
        for kind in sorted(set(request.retries.kinds)):
            self._metrics.count_retried(kind, request.error.code if request.error else "served")
        trace_id = self.traces.end(request, now)
        self.timelines.end(request, now)
        if client_id is not None:
            _log_end(request, arrival, now, client_id, trace_id)

    def on_failed(self, request_id: str, error: ErrorInfo) -> None:
        """Record that a request was refused, or lost by the router core; does nothing after its end."""
        now = self._clock.now()
        self.traces.fail(request_id, error, now)
        self.timelines.fail(request_id, error, now)

    # ---- what updates tell -------------------------------------------------------------------------------------------

    def _on_first_token(self, observed: ObservedRequest, now: float) -> None:
        seconds = now - observed.timeline.arrival
        self._metrics.observe_first_token(seconds)
        self.history.on_first_token(seconds)
        self.traces.note_first_token(observed.timeline.submission.request_id, now)
        self.timelines.note_first_token(observed.timeline, now)
        self._on_unreported_handoff(observed, now)

    def _on_prompt(self, observed: ObservedRequest, report: PromptReport) -> None:
        num_tokens = len(observed.timeline.submission.prompt_token_ids)
        if report.timing is not None:
            self._metrics.observe_first_token_parts(report.timing)
        request = observed.timeline.request
        worker = (request.attempt.prefill or request.attempt.decode) if request is not None else None
        member = self._core.membership.get(worker)
        # The stream of a vLLM server tells what it found in its cache only at its end: 0 is no count.
        if report.timing is not None or report.is_late or member is None or not member.facts.takes_calls:
            self._metrics.count_hit(num_tokens, min(num_tokens, report.num_cached_tokens))
        if not report.is_first:
            return
        if worker is not None:
            self.traffic.on_prompt(worker.engine_id, self._clock.now())
        is_at_once = request is not None and not (request.retries.kinds or request.has_moved)
        routing = routing_report(request) if request is not None and is_at_once else None
        if routing is not None and routing.ttft_ms is not None:
            self._metrics.observe_prediction(routing.predicted_ttft_ms, routing.ttft_ms)

    def _on_handoff(self, observed: ObservedRequest, report: HandoffReport) -> None:
        if report.outcome is None:
            return
        observed.has_handoff = True
        self._metrics.observe_handoff(report.second_token, report.outcome)
        observed.timeline.outcome = report.outcome
        attempt = observed.timeline.request.attempt if observed.timeline.request is not None else None
        if attempt is not None and attempt.prefill is not None and attempt.decode is not None:
            names = attempt.prefill.engine_id, attempt.decode.engine_id
            self.traffic.on_handoff(*names, report.cost, self._clock.now())

    def _on_unreported_handoff(self, observed: ObservedRequest, now: float) -> None:
        """Record a handoff of which the decode worker reports nothing, as those of vLLM engines, by its first token."""
        request = observed.timeline.request
        if request is None or request.measurements.first_token is not None or not request.attempt.has_handoff:
            return
        observed.timeline.outcome = NOT_REPORTED
        if request.attempt.prefill is not None and request.attempt.decode is not None:
            names = request.attempt.prefill.engine_id, request.attempt.decode.engine_id
            self.traffic.on_handoff(*names, TransferUsage(), now)

    # ---- the history -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End the history's interval if it is over."""
        self.history.tick(self._clock.now())

    @property
    def num_output_tokens(self) -> int:
        """The output tokens of all requests, running ones included."""
        return self._num_ended_tokens + sum(request.num_output_tokens for request in self._core.dispatcher.requests.values())

    def _read_gauges(self) -> Gauges:
        requests = self._core.dispatcher.requests
        by_role: dict[str, list[float]] = {}
        for worker in self._core.membership.workers:
            by_role.setdefault(worker.role, []).append(worker.kv_cache_usage)
        return Gauges(
            num_output_tokens=self.num_output_tokens,
            num_requests=len(requests),
            kv_usage={role: PoolLoad(sum(used) / len(used), max(used)) for role, used in by_role.items()},
        )


def _log_end(request: RequestState, arrival: float, now: float, client_id: str, trace_id: str) -> None:
    attempt = request.attempt
    outcome = request.error.code if request.error else ",".join(sorted({str(reason) for reason in request.finish_reasons}))
    write = logger.info if request.error is None or request.error.code == Cancelled.code else logger.warning
    write(
        event(
            "finished",
            request_id=request.request_id,
            client_id=client_id,
            outcome=outcome,
            prompt_tokens=len(request.submission.prompt_token_ids),
            output_tokens=request.num_output_tokens,
            ttft_ms=-1.0 if request.first_token_at is None else (request.first_token_at - arrival) * 1e3,
            total_ms=(now - arrival) * 1e3,
            prefill=attempt.prefill.engine_id if attempt.prefill else "-",
            decode=attempt.decode.engine_id if attempt.decode and request.phase is not RequestPhase.PREFILL else "-",
            retries=len(request.retries.kinds),
            **_recomputed(request),
            **({"trace_id": trace_id} if trace_id else {}),
            **({"message": request.error.message} if request.error else {}),
        )
    )


def _recomputed(request: RequestState) -> dict[str, object]:
    """Return why blocks were not loaded and how many tokens that cost, for the log; {} if all were loaded."""
    cost = request.measurements.cost
    reason = cost.fallback_reason or request.fallback_reason
    return {"fallback_reason": reason, "recomputed_tokens": cost.recomputed_tokens} if reason else {}
