"""Traces of requests at the router: a span for each prompt from its arrival to its end, with a child span for each leg.

Owns the names and attributes of these spans. A leg's span context travels with its ``Generate``, so that the worker's own spans
become its children. A retry is a new leg. Without a tracer every call returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from core.tracing import Attributes, Span, TraceContext, Tracer
from core.wire.messages import EncodeRequest, ErrorInfo, Generate
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import EncodeEnded, Moved, RequestState, Retried
from router.dispatch.types import Submission

REQUEST = "kvferry.request"
ENCODE_LEG = "kvferry.leg.encode"
PREFILL_LEG = "kvferry.leg.prefill"
DECODE_LEG = "kvferry.leg.decode"
WHOLE_LEG = "kvferry.leg.aggregated"


@dataclass(slots=True)
class _OpenSpans:
    """The open spans of one request."""

    span: Span
    leg: Span | None = None
    encodes: dict[WorkerKey, Span] = field(default_factory=dict)  # concurrent legs


class RequestTraces:
    """Spans of the requests of one router. Times are seconds of the router's clock."""

    def __init__(self, tracer: Tracer | None, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._open: dict[str, _OpenSpans] = {}

    def begin(self, submissions: Sequence[Submission], parent: TraceContext | None, now: float) -> None:
        """Open the spans of an HTTP request's prompts as children of the client's span, else in one new trace."""
        if self._tracer is None:
            return
        for submission in submissions:
            attributes: Attributes = {
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": len(submission.prompt_token_ids),
                "gen_ai.request.max_tokens": submission.sampling.max_tokens,
                "gen_ai.request.choice.count": submission.n,
                "kvferry.request_id": submission.request_id,
            }
            span = self._tracer.start(REQUEST, now, parent, attributes, "server")
            parent = parent or span.context
            self._open[submission.request_id] = _OpenSpans(span)

    @property
    def is_on(self) -> bool:
        """True if spans are recorded."""
        return self._tracer is not None

    def begin_leg(
        self, request_id: str, message: Generate | EncodeRequest, worker: WorkerKey, now: float
    ) -> Generate | EncodeRequest:
        """Open the span of a leg and return its message with the span's context. A ``Generate`` ends the legs before it."""
        found = self._open.get(request_id)
        if self._tracer is None or found is None or found.span.context is None:
            return message
        attributes: dict[str, str | int] = {"kvferry.engine_id": worker.engine_id, "kvferry.wire_id": message.request_id}
        if isinstance(message, Generate):
            self._end_legs(found, now)
            attributes["kvferry.has_handoff"] = message.kv_handoff is not None
        leg = self._tracer.start(_leg_name(message), now, found.span.context, attributes, "client")
        if isinstance(message, Generate):
            found.leg = leg
        else:
            found.encodes[worker] = leg
        return msgspec.structs.replace(message, trace=leg.context)

    def end_encode_leg(self, ended: EncodeEnded, now: float) -> None:
        """Close the span of an encode leg with its outcome."""
        found = self._open.get(ended.request_id)
        leg = found.encodes.pop(ended.worker, None) if found is not None else None
        if leg is not None:
            leg.add({"kvferry.num_images": ended.num_images, "kvferry.num_cached_images": ended.num_cached})
            leg.end(now, "" if ended.outcome == "done" else ended.outcome)

    def note_first_token(self, request_id: str, now: float) -> None:
        """Record when the client got its first token."""
        found = self._open.get(request_id)
        if found is not None:
            found.span.note("first_token", now)

    def note_retry(self, retried: Retried, now: float) -> None:
        """End the failed leg and record the retry in the request's span."""
        found = self._open.get(retried.request_id)
        if found is None:
            return
        self._end_legs(found, now, retried.error.code)
        attributes = {
            "kvferry.retry.kind": retried.kind,
            "kvferry.retry.code": retried.error.code,
            "kvferry.retry.failed": retried.failed.engine_id,
            "kvferry.retry.successor": retried.successor.engine_id if retried.successor else "",
        }
        found.span.note("retry", now, attributes)

    def note_move(self, moved: Moved, now: float) -> None:
        """End the leg that only waited, and record the move in the request's span."""
        found = self._open.get(moved.request_id)
        if found is not None:
            self._end_legs(found, now)
            names = {"kvferry.move.former": moved.former.engine_id, "kvferry.move.successor": moved.successor.engine_id}
            found.span.note("move", now, names)

    def end(self, request: RequestState, now: float) -> str:
        """Close the spans of a request with its outcome; return its trace id, empty if nothing was recorded."""
        found = self._open.pop(request.request_id, None)
        if found is None:
            return ""
        error = request.error.code if request.error else ""
        self._end_legs(found, now, error)
        found.span.add(
            {
                "gen_ai.usage.output_tokens": request.num_output_tokens,
                "kvferry.num_retries": len(request.retries.kinds),
                "kvferry.outcome": error or ",".join(sorted({str(reason) for reason in request.finish_reasons})),
            }
        )
        found.span.end(now, f"{error}: {request.error.message}" if request.error else "")
        return found.span.context.trace_id if found.span.context is not None else ""

    def fail(self, request_id: str, error: ErrorInfo, now: float) -> None:
        """Close the spans of a request that was refused or lost by the router core."""
        found = self._open.pop(request_id, None)
        if found is not None:
            self._end_legs(found, now, error.code)
            found.span.add({"kvferry.outcome": error.code})
            found.span.end(now, f"{error.code}: {error.message}")

    def _end_legs(self, found: _OpenSpans, now: float, error: str = "") -> None:
        for leg in (found.leg, *found.encodes.values()):
            if leg is not None:
                leg.end(now, error)
        found.leg = None
        found.encodes.clear()


def _leg_name(message: Generate | EncodeRequest) -> str:
    if isinstance(message, EncodeRequest):
        return ENCODE_LEG
    if message.handoff:
        return PREFILL_LEG
    return DECODE_LEG if message.choices else WHOLE_LEG
