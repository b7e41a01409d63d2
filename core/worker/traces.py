"""Traces of requests at a worker: one span for each request below the router's leg, and below it one for each part of its time.

Owns the names and attributes of these spans. It sees only the messages that a worker receives and sends: the durations of the
parts come from the worker's own reports. How long a decode worker's parts took is measured, but not when they ran: they are
laid end to end before the first token, the wait first. Without a tracer every call returns at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from core.tracing import Attributes, TraceContext, Tracer
from core.wire.engine_calls import EngineCall
from core.wire.messages import (
    Abort,
    EncodeDone,
    EncodeFailed,
    EncodeRequest,
    Generate,
    PrefillDone,
    RequestFailed,
    RouterMessage,
    Tokens,
    TransferUsage,
    WorkerMessage,
)
from core.worker.role import split_choice_id

ENCODE = "kvferry.encode"
PREFILL = "kvferry.prefill"
DECODE = "kvferry.decode"
MAX_OPEN = 8192  # beyond it the oldest is forgotten: its end was not seen


@dataclass(slots=True)
class _Open:
    """A request whose last reply has not been sent: what its span tells of its message, which may be large."""

    name: str
    parent: TraceContext
    arrival: float
    attributes: dict[str, str | int]
    live_choices: set[int]
    source_engine_id: str = ""  # where a prefill worker may load the beginning of the prompt from
    num_refusals: int = 0  # on their way, of other requests with its id
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_at: float | None = None
    cost: TransferUsage | None = None


@dataclass(slots=True)
class WorkerTraces:
    """Spans of the requests of one worker. Times are those of the worker's clock."""

    tracer: Tracer | None
    engine_id: str
    _open: OrderedDict[str, _Open] = field(default_factory=OrderedDict)

    def on_message(self, message: RouterMessage, now: float, *, is_taken: bool) -> None:
        """Process a router's message. A request that is not taken is ignored by the worker: it gets no reply.

        One whose id is in use is refused by the worker at once.
        """
        if self.tracer is None:
            return
        match message:
            case Generate() | EncodeRequest() | EngineCall() if is_taken and message.request_id in self._open:
                self._open[message.request_id].num_refusals += 1
            case Generate() if is_taken and message.trace is not None:
                self._hold(message.request_id, _open_generate(message, message.trace, now))
            case EncodeRequest() if is_taken and message.trace is not None:
                self._hold(message.request_id, _Open(ENCODE, message.trace, now, {}, set()))
            case Abort():
                for name in message.request_ids:
                    self._abort(name, message.reason, now)

    def on_reply(self, message: WorkerMessage | Sequence[Tokens], now: float, unsendable: Container[str] = ()) -> None:
        """Process a message to a router. No frame holds what it says of the ``unsendable`` requests: their failures follow."""
        if not self._open:
            return
        match message:
            case PrefillDone() | EncodeDone() if message.request_id in unsendable:
                pass
            case PrefillDone():
                self._on_prefill_done(message, now)
            case EncodeDone():
                self._on_encode_done(message, now)
            case RequestFailed() if self._is_of_another(message.request_id):
                self._open[message.request_id].num_refusals -= 1
            case RequestFailed() | EncodeFailed():
                self._end(message.request_id, now, message.error.code)
            case list():
                for item in message:
                    if item.request_id not in unsendable:
                        self._on_tokens(item, now)

    def on_unanswered(self, request_ids: Sequence[str], outcome: str, now: float) -> None:
        """Process the end of requests that get no reply."""
        for request_id in request_ids:
            self._end(request_id, now, outcome)

    def _is_of_another(self, request_id: str) -> bool:
        """Return whether a failure is the refusal of another request with this id."""
        found = self._open.get(request_id)
        return found is not None and found.num_refusals > 0

    def _hold(self, request_id: str, begun: _Open) -> None:
        """Follow a request."""
        begun.attributes |= {"kvferry.engine_id": self.engine_id, "kvferry.wire_id": request_id}
        self._open[request_id] = begun
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def _on_encode_done(self, message: EncodeDone, now: float) -> None:
        found = self._open.pop(message.request_id, None)
        if found is not None:
            attributes = {
                **found.attributes,
                "kvferry.num_images": len(message.ec_sources),
                "kvferry.num_cached_images": message.num_cached,
            }
            self._record_computed(found, attributes, message.queue_ms, now)

    def _on_prefill_done(self, message: PrefillDone, now: float) -> None:
        found = self._open.pop(message.request_id, None)
        if found is None:
            return
        found.cost = TransferUsage(recomputed_tokens=message.recomputed_tokens, fallback_reason=message.fallback_reason)
        attributes = {
            **_attributes(found),
            "kvferry.cached_tokens": message.num_cached_tokens,
            "kvferry.num_blocks": sum(len(group.block_ids) for group in message.kv_handoff.groups) if message.kv_handoff else 0,
        }
        if found.source_engine_id:
            attributes["kvferry.source_engine_id"] = found.source_engine_id
        self._record_computed(found, attributes, message.queue_ms, now, message.kv_transfer)

    def _record_computed(
        self,
        found: _Open,
        attributes: Attributes,
        queue_ms: float,
        now: float,
        loaded: TransferUsage | None = None,
    ) -> None:
        """Record a request that first waits, perhaps loads a part, and then is computed."""
        assert self.tracer is not None, "nothing is open without one"
        span = self.tracer.start(found.name, found.arrival, found.parent, attributes, "server")
        computing = min(now, found.arrival + queue_ms / 1e3)
        self.tracer.record("kvferry.queue", found.arrival, computing, span.context, {})
        if loaded is not None:
            begin, computing = computing, min(now, computing + (loaded.transfer_ms + loaded.verify_ms) / 1e3)
            self.tracer.record("kvferry.kv_transfer", begin, computing, span.context, _transfer_attributes(loaded))
        self.tracer.record("kvferry.compute", computing, now, span.context, {})
        span.end(now)

    def _on_tokens(self, item: Tokens, now: float) -> None:
        found = self._open.get(item.request_id)
        if found is None:
            return
        if item.usage is not None:
            found.num_cached_tokens = max(found.num_cached_tokens, item.usage.num_cached_tokens)
            found.cost = found.cost or item.usage.kv_transfer
        if found.first_token_at is None and item.token_ids:
            found.first_token_at = now
        found.num_output_tokens += len(item.token_ids)
        if item.finish_reason is not None:
            self._end_choice(item.request_id, item.index, now)

    def _abort(self, name: str, reason: str, now: float) -> None:
        request_id, index = split_choice_id(name)
        if name not in self._open and request_id in self._open:
            self._end_choice(request_id, index, now)
        else:
            self._end(name, now, f"aborted:{reason}")

    def _end_choice(self, request_id: str, index: int, now: float) -> None:
        live = self._open[request_id].live_choices
        live.discard(index)
        if not live:
            self._end(request_id, now)

    def _end(self, request_id: str, now: float, error: str = "") -> None:
        found = self._open.pop(request_id, None)
        if found is None or self.tracer is None:
            return
        attributes = _attributes(found)
        if found.name != ENCODE:
            attributes["gen_ai.usage.output_tokens"] = found.num_output_tokens
            attributes["kvferry.cached_tokens"] = found.num_cached_tokens
        span = self.tracer.start(found.name, found.arrival, found.parent, attributes, "server")
        if found.cost is not None and found.first_token_at is not None:
            self._record_parts(found, found.cost, found.first_token_at, span.context)
        span.end(now, error)

    def _record_parts(self, found: _Open, cost: TransferUsage, first_token_at: float, parent: TraceContext | None) -> None:
        """Lay the parts of the time to the first token end to end, so that the last ends with it."""
        assert self.tracer is not None
        parts: list[tuple[str, float, Attributes]] = [("kvferry.first_step", cost.first_step_ms, {})]
        if cost.transport:
            parts.append(("kvferry.kv_verify", cost.verify_ms, {"kvferry.verified_blocks": cost.verified_blocks}))
            parts.append(("kvferry.kv_transfer", cost.transfer_ms, _transfer_attributes(cost)))
        end = first_token_at
        for name, duration_ms, attributes in parts:
            start = max(found.arrival, end - duration_ms / 1e3)
            self.tracer.record(name, start, end, parent, attributes)
            end = start
        self.tracer.record("kvferry.queue", found.arrival, end, parent, {})


def _open_generate(message: Generate, parent: TraceContext, now: float) -> _Open:
    attributes: dict[str, str | int] = {"gen_ai.usage.input_tokens": len(message.prompt_token_ids)}
    if message.kv_handoff is not None:
        attributes["kvferry.prefill_engine_id"] = message.kv_handoff.engine_id
    choices = {choice.index for choice in message.choices} or set(range(message.n))
    source = "" if message.kv_source is None else message.kv_source.engine_id
    return _Open(PREFILL if message.handoff else DECODE, parent, now, attributes, choices, source)


def _attributes(found: _Open) -> dict[str, str | int]:
    """Return what is known of a request, and of the transfer of its KV."""
    attributes, cost = dict(found.attributes), found.cost
    if cost is not None and cost.early_bytes:
        attributes["kvferry.early_tokens"] = cost.early_tokens
        attributes["kvferry.early_bytes"] = cost.early_bytes
        attributes["kvferry.exposed_us"] = round(1e3 * cost.exposed_ms)
    if cost is not None and cost.fallback_reason:
        attributes["kvferry.fallback_reason"] = cost.fallback_reason
        attributes["kvferry.recomputed_tokens"] = cost.recomputed_tokens
    return attributes


def _transfer_attributes(cost: TransferUsage) -> Attributes:
    return {
        "kvferry.transport": cost.transport,
        "kvferry.transferred_bytes": cost.transferred_bytes,
        "kvferry.transferred_tokens": cost.transferred_tokens,
    }
