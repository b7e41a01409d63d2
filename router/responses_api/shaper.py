"""Builds the answer of ``POST /v1/responses``, whole or as events, from the output of the chat that the request means."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams
from router.openai.chat_output import ChatOutput
from router.openai.logprobs import TokenTexts
from router.openai.postprocess import Delta, RequestOutput
from router.openai.responses import Envelope, Shaper
from router.openai.sampling import OutputOptions
from router.responses_api.bodies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    ResponseStatusEvent,
    ResponseUsage,
)
from router.responses_api.items import ItemWriter
from router.responses_api.requests import ResponsesRequest


@dataclass(frozen=True, slots=True)
class ResponsesOutput:
    """How the output of a response is split, and the request that it answers."""

    request: ResponsesRequest
    splitting: ChatOutput


class ResponsesShaper(Shaper):
    """Bodies of the responses endpoint. ``sampling`` is what the request's defaults have become."""

    def __init__(
        self,
        envelope: Envelope,
        options: OutputOptions,
        output: RequestOutput,
        texts: TokenTexts,
        wanted: ResponsesOutput,
        sampling: SamplingParams,
    ) -> None:
        super().__init__(envelope, options, output, texts)
        self._wanted = wanted
        self._sampling = sampling
        self._items = ItemWriter(envelope["id"].removeprefix("resp_"))
        self._status: ResponseStatus = "in_progress"
        self._num_events = 0
        self._offsets: list[int] = []  # of the tokens, in characters of the text

    def gather(self, deltas: Sequence[Delta]) -> int:
        """Collect deltas for the whole answer; return 0, since it has no log-probabilities."""
        for delta in deltas:
            self._add(delta)
        return 0

    def whole(self) -> ResponseBody:
        """Return the answer."""
        return self._body()

    def chunks(self, deltas: Sequence[Delta]) -> list[ResponseEvent]:
        """Return the events for new deltas, none without any. The last one of the stream has the whole answer."""
        events: list[ResponseEvent] = []
        if not deltas:  # before any output, so that a failure still has its own status, or after the end
            return events
        if not self._num_events:
            events += [
                ResponseStatusEvent(type="response.created", response=self._body()),
                ResponseStatusEvent(type="response.in_progress", response=self._body()),
            ]
        for delta in deltas:
            events += self._add(delta)
        if self._status == "completed":
            events.append(ResponseStatusEvent(type="response.completed", response=self._body()))
        elif self._status == "incomplete":
            events.append(ResponseStatusEvent(type="response.incomplete", response=self._body()))
        return self._numbered(events)

    def differs_in_text_only(self, index: int) -> bool:
        """Return False: every event has a number."""
        return False

    def last_chunks(self) -> list[ResponseEvent]:
        """Return nothing: the event of the end has the usage."""
        return []

    def failure(self, info: ErrorInfo) -> list[ResponseEvent]:
        """Return the events that end a stream which has failed."""
        self._status = "failed"
        body = self._body()
        code: Literal["server_error", "rate_limit_exceeded"] = (
            "rate_limit_exceeded" if info.http_status == 429 else "server_error"
        )
        body.error = ResponseError(code=code, message=info.message, reason=info.code)
        return self._numbered([ResponseStatusEvent(type="response.failed", response=body)])

    def _numbered(self, events: list[ResponseEvent]) -> list[ResponseEvent]:
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
        return events

    def _add(self, delta: Delta) -> list[ResponseEvent]:
        part = self._wanted.splitting.part(delta)
        events = self._items.add(part)
        self._offsets += delta.offsets
        if part.finish_reason is not None:
            self._status = "incomplete" if part.finish_reason == "length" else "completed"
            is_whole = part.finish_reason != "length"
            has_whole_call = is_whole or self._wanted.splitting.ends_in_whole_call(0)
            events += self._items.finish(
                "completed" if is_whole else "incomplete", of_call="completed" if has_whole_call else "incomplete"
            )
        return events

    def _body(self) -> ResponseBody:
        request, is_over = self._wanted.request, self._status != "in_progress"
        return ResponseBody(
            id=self._envelope["id"],
            created_at=self._envelope["created"],
            model=self._envelope["model"],
            status=self._status,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if self._status == "incomplete" else None,
            output=self._items.items(),
            usage=self._usage() if is_over else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            temperature=self._sampling.temperature,
            text=self._text(),
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=request.tools or [],
            top_p=self._sampling.top_p,
            user=request.user,
        )

    def _text(self) -> dict[str, Any]:
        config = self._wanted.request.text
        found: dict[str, Any] = {} if config is None else msgspec.to_builtins(config)
        return found | {"format": found.get("format") or {"type": "text"}}

    def _usage(self) -> ResponseUsage:
        usage, end = self.usage(), self._wanted.splitting.num_reasoning_characters(0)
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=bisect_left(self._offsets, end)),
            total_tokens=usage.total_tokens,
            kv_transfer=usage.kv_transfer,
        )
