"""Output tokens of a chat as an engine's API splits them: text, reasoning, tool calls; whole, or part by part of a stream.

The engine keeps nothing between two parts: what it must know comes back with each answer, and goes out with the next part. A
part is asked for when the one before has been answered, so a stream of many tokens takes few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from core.wire.messages import ErrorInfo, TokenLogprobs
from router.openai.logprobs import ENCODED_AT_ONCE, in_pieces
from router.openai.postprocess import Delta
from router.openai.text_pool import TextPool
from router.rendered.bodies import EngineBody
from router.rendered.renderer import EngineRefusal, EngineRenderer, SplitOutput, SplitPart

T = TypeVar("T")


@dataclass(slots=True)
class OutputSplitter:
    """The answers of one request, until its ``deadline``, seconds of the router's clock, which may be extended."""

    renderer: EngineRenderer
    body: EngineBody
    prompt_token_ids: Sequence[int]
    model_fingerprint: bytes
    deadline: Callable[[], float]
    pool: TextPool
    _states: dict[int, dict[str, Any] | None] = field(default_factory=dict)  # of each choice of a stream
    _with_calls: set[int] = field(default_factory=set)  # choices of a stream that have had tool calls
    _chat_request: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._chat_request = self.body.for_engine()

    async def whole(self, choices: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the choices of a whole answer. Raises EngineRefusal."""
        written = await self._encoded(choices)
        readable = [choice for choice in written if choice["token_ids"]]
        split: dict[int, dict[str, Any]] = {}
        if readable:
            output = {"request_id": "output", "choices": readable, "prompt_token_ids": list(self.prompt_token_ids)}
            found = await self._ask({"generate_response": output}, SplitOutput)
            split = {choice["index"]: choice for choice in _checked(found.choices, "message")}
        return [self._finished(split.get(choice.index) or _empty(choice), choice.finish_reason) for choice in choices]

    async def part(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the next event of a stream, at most one. Raises EngineRefusal."""
        chunk = {"request_id": "output", "choices": await self._encoded([delta])}
        state = self._states.get(delta.index)
        found = await self._ask({"stream": True, "generate_chunk": chunk, "stream_state": state}, SplitPart)
        self._states[delta.index] = found.stream_state
        split = _checked(found.chunk.choices, "delta") or [{"index": delta.index, "delta": {}}]
        for choice in split:
            if calls := choice["delta"].get("tool_calls"):
                self._with_calls.add(delta.index)
                if self._has_one_call:
                    choice["delta"]["tool_calls"] = [call for call in calls if not call.get("index")]
            if choice.get("finish_reason") == "tool_calls" and (delta.finish_reason != "stop" or self._is_named):
                choice["finish_reason"] = delta.finish_reason
            if choice.get("finish_reason") is None:
                choice["finish_reason"] = self._reason(delta.finish_reason, has_calls=delta.index in self._with_calls)
        return [choice for choice in split if _says_something(choice)]

    async def _ask(self, output: dict[str, Any], kind: type[T]) -> T:
        request = {
            **output,
            "chat_request": self._chat_request,
            "prompt_tokens": len(self.prompt_token_ids),
            "prompt_token_ids": list(self.prompt_token_ids),
        }
        return await self.renderer.derender(request, self.deadline, self.model_fingerprint, kind)

    @property
    def _tool_choice(self) -> object:
        return self.body.fields.get("tool_choice") or "auto"

    @property
    def _is_named(self) -> bool:
        """True if the client has named the tool to call; then the end of the call is an ordinary one."""
        return isinstance(self._tool_choice, dict)

    @property
    def _has_one_call(self) -> bool:
        """True if calls after the first are dropped."""
        return self.body.fields.get("parallel_tool_calls") is False

    @property
    def _shows_reasoning(self) -> bool:
        """True unless the client wants no reasoning."""
        return self.body.fields.get("include_reasoning") is not False

    def _reason(self, reason: str | None, *, has_calls: bool) -> str | None:
        """Return the reason of the end: tool calls, unless the output was cut or the client has named the tool."""
        is_by_calls = reason == "stop" and (self._tool_choice == "required" or (self._tool_choice == "auto" and has_calls))
        return "tool_calls" if is_by_calls else reason

    def _finished(self, choice: dict[str, Any], reason: str | None) -> dict[str, Any]:
        """Set the reason of the end, and drop calls that the client does not want."""
        calls = choice["message"].get("tool_calls")
        choice["finish_reason"] = self._reason(reason, has_calls=bool(calls))
        if calls and self._has_one_call:
            choice["message"]["tool_calls"] = calls[:1]
        return choice

    async def _encoded(self, choices: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return choices as an engine writes them; many log-probabilities are written on a thread."""
        has_many = sum(len(choice.logprobs) for choice in choices) > ENCODED_AT_ONCE
        return await self.pool.run(lambda: self._written(choices)) if has_many else self._written(choices)

    def _written(self, choices: Sequence[Delta]) -> list[dict[str, Any]]:
        return [self._choice(choice) for choice in choices]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """Return new tokens as an engine writes them, without the token that ends the text, which a parser would show."""
        is_end = delta.finish_reason == "stop"  # by a token: bodies with stop strings go whole
        found: dict[str, Any] = {
            "index": delta.index,
            "token_ids": delta.token_ids[:-1] if is_end else delta.token_ids,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.logprobs and self._shows_reasoning:  # as vLLM does: those of all tokens would show it
            found["logprobs"] = {"content": in_pieces(delta.logprobs, lambda entries: [_content(entry) for entry in entries])}
        return found


def _checked(found: list[dict[str, msgspec.Raw]], part: str) -> list[dict[str, Any]]:
    """Return choices that have a number and what they say. Raises EngineRefusal for others."""
    choices = [{name: _read(name, value) for name, value in choice.items()} for choice in found]
    for choice in choices:
        if not isinstance(choice.get("index"), int) or not isinstance(choice.get(part), dict):
            message = f"vLLM: a choice of its answer has no index or no {part}"
            raise EngineRefusal(ErrorInfo(code="engine_error", message=message, http_status=502))
    return choices


def _read(name: str, value: msgspec.Raw) -> Any:  # noqa: ANN401 - decoded JSON
    return value if name == "logprobs" else msgspec.json.decode(value)


def _empty(delta: Delta) -> dict[str, Any]:
    """Return a choice without text."""
    message = {"role": "assistant", "content": ""}
    return {"index": delta.index, "message": message, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _content(entry: TokenLogprobs) -> dict[str, Any]:
    """Return a token's log-probability with its candidates, the sampled token first, as an engine writes them."""
    own = {"token_id": entry.token_ids[0], "logprob": entry.logprobs[0], "rank": entry.rank}
    pairs = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
    top = [{"token_id": token, "logprob": logprob, "rank": rank} for rank, (token, logprob) in enumerate(pairs, 1)]
    others = [candidate for candidate in top if candidate["token_id"] != own["token_id"]]
    return {**own, "top_logprobs": [own, *others] if top else []}


def _says_something(choice: dict[str, Any]) -> bool:
    return choice.get("finish_reason") is not None or any(value not in (None, "", []) for value in choice["delta"].values())
