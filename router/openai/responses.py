"""The response bodies of the OpenAI API, as typed structs, and how they are built from a request's output.

Owns the exact shapes, whole and streamed. Fields that OpenAI does not have (``stop_reason``, ``token_ids``,
``prompt_logprobs``, ``usage.kv_transfer``) use vLLM's names if it has them, and are omitted unless requested or non-empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from router.dispatch.timing import FirstTokenTiming, HandoffReport, RoutingReport, SecondTokenTiming, total_cost
from router.openai.chat_output import ChatOutput, ChatPart, ToolCall
from router.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    in_pieces,
    prompt_logprobs,
)
from router.openai.postprocess import Delta, PromptState, RequestOutput
from router.openai.sampling import OutputOptions

_LOGPROBS_AT_ONCE = 4096  # of an answer; takes some ten milliseconds
_LOGPROB_BYTES = 128  # of memory for each, until the answer is sent
_SPLIT_AT_ONCE = 16 << 10  # characters; takes some ten milliseconds


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """How many tokens of the prompt were loaded from a cache."""

    cached_tokens: int


class KVTransferTiming(msgspec.Struct, kw_only=True):
    """The parts of the time to the first token, and from there to the second. Absent if a decode worker served alone."""

    first_token: FirstTokenTiming
    second_token: SecondTokenTiming


class KVTransferUsage(msgspec.Struct, kw_only=True):
    """What loading the request's KV cost, from a prefill worker or a tier; for several prompts, sums and slowest times.

    ``retries`` counts failures of workers, ``replays`` those of them after decode tokens, and ``refusals`` those of decode
    workers that were full or draining, or could not compile the grammar then.
    """

    transport: str
    transferred_tokens: int
    transferred_bytes: int
    transfer_ms: float
    verified_blocks: int
    early_tokens: int  # loaded while the prompt was still being computed; not among the transferred ones
    early_bytes: int
    exposed_ms: float  # from the end of the prompt's computation, less the way by the router, until all was verified
    recomputed_tokens: int
    fallback_reason: str  # empty if nothing had to be recomputed
    retries: int
    replays: int
    refusals: int
    timing: KVTransferTiming | UnsetType = UNSET
    routing: list[RoutingReport] | UnsetType = UNSET  # of each prompt


class UsageBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Token counts. ``kv_transfer`` is present if a pair of workers served the request, or a tier lost some of its KV."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kv_transfer: KVTransferUsage | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/completions``, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The message of a chat choice."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """The new output of a chat choice in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Envelope(TypedDict):
    """The fields that every body of one answer repeats. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class _Gathered:
    """A choice in progress, for answers that are not streamed."""

    deltas: list[Delta] = field(default_factory=list)

    def merged(self, index: int) -> Delta:
        whole = Delta(index)
        whole.text = "".join(delta.text for delta in self.deltas)
        for delta in self.deltas:
            whole.token_ids += delta.token_ids
            whole.logprobs += delta.logprobs
            whole.offsets += delta.offsets
        whole.finish_reason, whole.stop_reason = self.deltas[-1].finish_reason, self.deltas[-1].stop_reason
        return whole


class Shaper:
    """Base of the two endpoints' shapes: gathers deltas for a whole answer, or turns them into chunks."""

    def __init__(self, envelope: Envelope, options: OutputOptions, output: RequestOutput, texts: TokenTexts) -> None:
        self._envelope = envelope
        self._options = options
        self._output = output
        self._texts = texts
        self._gathered: dict[int, _Gathered] = {}
        self._num_gathered = 0  # characters
        self._num_logprobs = 0  # gathered, with those of other tokens at the same position
        self._started: set[int] = set()

    @property
    def is_heavy(self) -> bool:
        """True if the answer takes long to build: it has log-probabilities of a prompt, or many, or much text to split."""
        options = self._options
        if self._num_logprobs > _LOGPROBS_AT_ONCE:
            return True
        return options.prompt_logprobs is not None or (options.echo and options.logprobs is not None)

    def gather(self, deltas: Sequence[Delta]) -> int:
        """Collect deltas for the whole answer; return how much memory their log-probabilities take, in bytes."""
        before = self._num_logprobs
        for delta in deltas:
            self._num_gathered += len(delta.text)
            self._num_logprobs += len(delta.logprobs) * (1 + (self._options.logprobs or 0))
            self._gathered.setdefault(delta.index, _Gathered()).deltas.append(delta)
        return _LOGPROB_BYTES * (self._num_logprobs - before)

    def usage(self) -> UsageBody:
        """Return the counts so far."""
        output = self._output
        return UsageBody(
            prompt_tokens=output.num_prompt_tokens,
            completion_tokens=output.num_completion_tokens,
            total_tokens=output.num_prompt_tokens + output.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=output.num_cached_tokens),
            kv_transfer=_kv_transfer(output.prompts),
        )

    def _system_fingerprint(self) -> str | None:
        """Return a name of the weights that serve the request; several are joined by +. None = unknown."""
        reports = [state.report for state in self._output.prompts if state.report is not None]
        names = [f"fp_{report.model_fingerprint.hex()[:12]}" for report in reports if report.model_fingerprint]
        return "+".join(dict.fromkeys(names)) or None

    def merged(self) -> list[Delta]:
        """Return the gathered output of each choice."""
        return [self._gathered[index].merged(index) for index in sorted(self._gathered)]

    def differs_in_text_only(self, index: int) -> bool:
        """Return True if the next event of a choice differs from its last one in nothing but text, until it ends."""
        options = self._options
        shows_more = options.logprobs is not None or options.return_token_ids or options.continuous_usage
        return index in self._started and not shows_more and len(self._output.prompts) == 1

    def _is_worth_a_chunk(self, delta: Delta) -> bool:
        return bool(delta.text or delta.finish_reason) or self._shows_tokens(delta)

    def _shows_tokens(self, delta: Delta) -> bool:
        return bool(delta.token_ids) and (self._options.return_token_ids or self._options.logprobs is not None)

    def _chunk_usage(self) -> UsageBody | UnsetType | None:
        """Return ``usage`` of an ordinary chunk: null if the last chunk will have it."""
        if not self._options.include_usage:
            return UNSET
        return self.usage() if self._options.continuous_usage else None

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return delta.token_ids if self._options.return_token_ids else UNSET

    def _prompt_token_ids(self, state: PromptState) -> list[int] | UnsetType:
        return list(state.prompt.token_ids) if self._options.return_token_ids else UNSET

    def _prompt_logprobs(self, state: PromptState) -> list[dict[str, dict[str, Any]] | None] | UnsetType:
        if self._options.prompt_logprobs is None or state.report is None or state.report.prompt_logprobs is None:
            return UNSET
        return in_pieces(state.report.prompt_logprobs, lambda entries: prompt_logprobs(self._texts, entries))


class CompletionShaper(Shaper):
    """Bodies of the completions endpoint."""

    def whole(self) -> Completion:
        """Return the answer."""
        return self._body([self._choice(delta, is_whole=True) for delta in self.merged()], self.usage())

    def chunks(self, deltas: Sequence[Delta]) -> list[Completion]:
        """Return the events for new deltas."""
        choices = [self._choice(delta) for delta in deltas if self._is_first_echo(delta) or self._is_worth_a_chunk(delta)]
        return [self._body([choice], self._chunk_usage()) for choice in choices]

    def last_chunks(self) -> list[Completion]:
        """Return the event of a stream that reports usage."""
        return [self._body([], self.usage())] if self._options.include_usage else []

    def _is_first_echo(self, delta: Delta) -> bool:
        return self._options.echo and delta.index not in self._started

    def _choice(self, delta: Delta, *, is_whole: bool = False) -> CompletionChoice:
        state = self._output.prompt_of(delta.index)
        is_first = delta.index not in self._started
        self._started.add(delta.index)
        has_echo = is_first and self._options.echo
        return CompletionChoice(
            index=delta.index,
            text=state.prompt.text + delta.text if has_echo else delta.text,
            logprobs=self._logprobs(delta, state, has_echo=has_echo),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._token_ids(delta),
            prompt_token_ids=self._prompt_token_ids(state) if is_first else UNSET,
            prompt_logprobs=self._prompt_logprobs(state) if is_whole else UNSET,
        )

    def _logprobs(self, delta: Delta, state: PromptState, *, has_echo: bool) -> CompletionLogprobs | None:
        if self._options.logprobs is None:
            return None
        start = len(state.prompt.text) if self._options.echo else 0
        offsets = [start + offset for offset in delta.offsets]
        prompt_entries = state.report.prompt_logprobs if state.report else None
        if not has_echo or prompt_entries is None:
            return completion_logprobs(self._texts, delta.logprobs, delta.token_ids, offsets)
        prompt = state.prompt
        offsets = [*self._texts.offsets_of(prompt.text, prompt.token_ids), *offsets]
        return completion_logprobs(
            self._texts, [*prompt_entries, *delta.logprobs], [*prompt.token_ids, *delta.token_ids], offsets
        )

    def _body(self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None) -> Completion:
        return Completion(**self._envelope, system_fingerprint=self._system_fingerprint(), choices=choices, usage=usage)


class ChatShaper(Shaper):
    """Bodies of the chat endpoint. ``splitting`` separates reasoning and tool calls; None = all is text."""

    def __init__(
        self,
        envelope: Envelope,
        options: OutputOptions,
        output: RequestOutput,
        texts: TokenTexts,
        splitting: ChatOutput | None = None,
    ) -> None:
        super().__init__(envelope, options, output, texts)
        self._splitting = splitting

    @property
    def is_heavy(self) -> bool:
        """As of every shaper; a letter takes about a microsecond to split."""
        return super().is_heavy or (self._splitting is not None and self._num_gathered > _SPLIT_AT_ONCE)

    def whole(self) -> ChatCompletion:
        """Return the answer."""
        parts = [(delta, self._part(delta)) for delta in self.merged()]
        return self.body(
            [
                ChatChoice(
                    index=delta.index,
                    message=_message(part),
                    logprobs=self._logprobs(delta),
                    finish_reason=part.finish_reason,
                    stop_reason=delta.stop_reason,
                    token_ids=self._token_ids(delta),
                )
                for delta, part in parts
            ]
        )

    def body(self, choices: list[ChatChoice]) -> ChatCompletion:
        """Return the answer with these choices."""
        state = self._output.prompts[0]
        return ChatCompletion(
            **self._envelope,
            system_fingerprint=self._system_fingerprint(),
            choices=choices,
            usage=self.usage(),
            prompt_token_ids=self._prompt_token_ids(state),
            prompt_logprobs=self._prompt_logprobs(state),
        )

    def differs_in_text_only(self, index: int) -> bool:
        """See ``Shaper``."""
        splits = self._splitting is not None and self._splitting.splits
        return not splits and super().differs_in_text_only(index)

    def chunks(self, deltas: Sequence[Delta]) -> list[ChatChunk]:
        """Return the events for new deltas; each choice's first event holds its role and no text."""
        events = []
        for delta in deltas:
            if delta.index not in self._started:
                is_first = not self._started
                self._started.add(delta.index)
                events.append(self._role_chunk(delta.index, is_first=is_first))
            part = self._part(delta)
            if part or self._shows_tokens(delta):
                events.append(self._chunk([self._chunk_choice(delta, part)], self._chunk_usage()))
        return events

    def last_chunks(self) -> list[ChatChunk]:
        """Return the event of a stream that reports usage."""
        return [self._chunk([], self.usage())] if self._options.include_usage else []

    def empty_chunk(self) -> ChatChunk:
        """Return an event without choices."""
        return self._chunk([], self._chunk_usage())

    def _role_chunk(self, index: int, *, is_first: bool) -> ChatChunk:
        chunk = self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))], self._chunk_usage())
        if is_first:
            chunk.prompt_token_ids = self._prompt_token_ids(self._output.prompts[0])
        return chunk

    def _part(self, delta: Delta) -> ChatPart:
        if self._splitting is not None:
            return self._splitting.part(delta)
        return ChatPart(text=delta.text, finish_reason=delta.finish_reason)

    def _chunk_choice(self, delta: Delta, part: ChatPart) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(
                content=part.text or UNSET, reasoning_content=part.reasoning or UNSET, tool_calls=part.calls or UNSET
            ),
            logprobs=self._logprobs(delta) if delta.logprobs else None,
            finish_reason=part.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=self._token_ids(delta),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        num_top = self._options.logprobs
        if num_top is None:
            return None
        return ChatLogprobs(
            content=in_pieces(delta.logprobs, lambda entries: chat_logprobs(self._texts, entries, num_top).content)
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        return ChatChunk(**self._envelope, system_fingerprint=self._system_fingerprint(), choices=choices, usage=usage)


def _message(part: ChatPart) -> AssistantMessage:
    for call in part.calls:
        call.index = UNSET
    return AssistantMessage(
        content=part.text or None if part.calls else part.text,
        reasoning_content=part.reasoning or UNSET,
        tool_calls=part.calls or UNSET,
    )


def _kv_transfer(prompts: Sequence[PromptState]) -> KVTransferUsage | UnsetType:
    reports = [state.handoff for state in prompts if state.handoff is not None]
    if not reports:
        return UNSET
    cost = total_cost(report.cost for report in reports)
    return KVTransferUsage(
        transport=cost.transport,
        transferred_tokens=cost.transferred_tokens,
        transferred_bytes=cost.transferred_bytes,
        transfer_ms=cost.transfer_ms,
        verified_blocks=cost.verified_blocks,
        early_tokens=cost.early_tokens,
        early_bytes=cost.early_bytes,
        exposed_ms=cost.exposed_ms,
        recomputed_tokens=cost.recomputed_tokens,
        fallback_reason=cost.fallback_reason,
        retries=sum(report.num_retries for report in reports),
        replays=sum(report.num_replays for report in reports),
        refusals=sum(report.num_refusals for report in reports),
        timing=_slowest(reports),
        routing=[report.routing for report in reports if report.routing is not None] or UNSET,
    )


def _slowest(reports: Sequence[HandoffReport]) -> KVTransferTiming | UnsetType:
    first = [report.first_token for report in reports if report.first_token is not None]
    second = [report.second_token for report in reports if report.second_token is not None]
    if not first or not second:
        return UNSET
    return KVTransferTiming(
        first_token=max(first, key=lambda timing: timing.total_ms),
        second_token=max(second, key=lambda timing: timing.total_ms),
    )
