"""Has an engine render bodies, count their tokens, and split finished output into text, reasoning and tool calls.

All are done by any engine of the cluster, again by another one if one fails: they change nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from core.errors import DeadlineExceeded, NoWorker
from core.ids import IdSource, new_hex_id
from core.wire.engine_calls import EngineCall
from core.wire.messages import ErrorInfo
from router.dispatch.engine_api import CallFailed, EngineApi, deadline_ms
from router.dispatch.members import GenerationWorker, WorkerKey
from router.rendered.bodies import EngineBody

MAX_TRIES = 3  # of one request: so many engines are asked, one after another, before the last refusal is its answer
_NOT_RETRIED = frozenset({"invalid_request", "cancelled"})
_ROUNDING_S = 0.01  # of deadlines on the wire
REFUSES_AGENT = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})  # not the client, whose key the router has checked

T = TypeVar("T")


class EngineRefusal(Exception):
    """What an engine has against a request, as an error for the client."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class SplitOutput(msgspec.Struct):
    """The choices of a whole answer as an engine splits them. Their fields are still JSON: long ones are only passed on."""

    choices: list[dict[str, msgspec.Raw]]


class SplitPart(msgspec.Struct):
    """The choices of the next event, and what the engine must be told with the part after it."""

    chunk: SplitOutput
    stream_state: dict[str, Any] | None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    features: dict[str, Any] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, and what the engine needs beside it: see ``Generate.engine_request``."""

    token_ids: tuple[int, ...]
    engine_request: bytes


@dataclass(frozen=True, slots=True)
class RenderedBody:
    """The prompts of a body. Only workers of ``model_fingerprint`` serve them."""

    prompts: list[RenderedPrompt]
    model_fingerprint: bytes


class EngineRenderer:
    """Calls the engines' routes for one request after another.

    ``deadline`` returns when a request ends, seconds of the router's clock; a pause of the router may extend it meanwhile.
    """

    def __init__(self, api: EngineApi, ids: IdSource) -> None:
        self._api = api
        self._ids = ids

    async def render(self, body: EngineBody, deadline: Callable[[], float]) -> RenderedBody:
        """Return the prompts of a body.

        Raises:
            EngineRefusal: the engine refuses it, or no engine could render it.
        """
        fields = body.for_engine(stream=False, stream_options=None)
        found, model_fingerprint = await self._ask(f"{body.path}/render", fields, deadline, _read_rendered)
        prompts = [_prompt(item, body.adapter) for item in found]
        return RenderedBody(prompts, model_fingerprint)

    async def count_tokens(self, body: EngineBody, deadline: Callable[[], float]) -> dict[str, Any]:
        """Return what an engine answers to the path of a body that only asks for a number of tokens.

        Raises:
            EngineRefusal: the engine refuses it, or no engine could answer.
        """
        answer, _ = await self._ask(body.path, body.for_engine(), deadline, msgspec.json.Decoder(dict[str, Any]).decode)
        return answer

    async def derender(
        self, body: Mapping[str, Any], deadline: Callable[[], float], model_fingerprint: bytes, kind: type[T]
    ) -> T:
        """Return what an engine makes of output tokens, a ``SplitOutput`` or, of a stream, a ``SplitPart``.

        Raises:
            EngineRefusal: no engine could read them.
        """
        read = msgspec.json.Decoder(kind).decode
        answer, _ = await self._ask("/v1/chat/completions/derender", body, deadline, read, model_fingerprint)
        return answer

    async def _ask(
        self,
        path: str,
        body: Mapping[str, Any],
        deadline: Callable[[], float],
        read: Callable[[bytes], T],
        model_fingerprint: bytes = b"",
    ) -> tuple[T, bytes]:
        """Return the answer of an engine, and its worker's model fingerprint."""
        avoid: set[WorkerKey] = set()
        encoded = msgspec.json.encode(body)
        last = ErrorInfo.of(NoWorker("no engine answers"))
        for _ in range(MAX_TRIES):
            worker, left_s = await self._choose(frozenset(avoid), model_fingerprint, deadline)
            try:
                status, content = await self._call(worker, path, encoded, left_s)
                if status == HTTPStatus.OK:
                    return read(content), worker.facts.model_fingerprint
                last = refusal(status, content)
                is_final = last.http_status < HTTPStatus.INTERNAL_SERVER_ERROR
            except CallFailed as failed:
                last, is_final = failed.info, ends_tries(failed.info, deadline() - self._api.now())
            except msgspec.MsgspecError as error:
                last, is_final = _engine_error(f"its answer to {path} cannot be read: {error}"), False
            if is_final:
                break
            avoid.add(worker.key)
        raise EngineRefusal(last)

    async def _choose(
        self, avoid: frozenset[WorkerKey], model_fingerprint: bytes, deadline: Callable[[], float]
    ) -> tuple[GenerationWorker, float]:
        """Return whose engine is asked, and how many seconds are left. After a pause of the router it may have to reconnect."""
        while (left_s := deadline() - self._api.now()) > 0:
            try:
                return self._api.choose(avoid, model_fingerprint), left_s
            except NoWorker as error:
                if not self._api.is_settling:
                    raise EngineRefusal(ErrorInfo.of(error)) from None
            await self._api.wait_for_change()
        raise EngineRefusal(ErrorInfo.of(DeadlineExceeded("the engines did not answer in the time of the request")))

    async def _call(self, worker: GenerationWorker, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the content of an engine's answer."""
        call_id, limit = new_hex_id(self._ids, "call-"), deadline_ms(timeout_s)
        call = EngineCall(request_id=call_id, path=path, body=body, deadline_ms=limit)
        async with self._api.call(worker, call) as answer:
            content = await answer.whole()
        return answer.status, content


def ends_tries(failure: ErrorInfo, left_s: float) -> bool:
    """Return True if no other try can help. After a deadline there is time left if a pause of the router has extended it."""
    is_late = failure.code == DeadlineExceeded.code and left_s <= _ROUNDING_S
    return is_late or failure.code in _NOT_RETRIED


def refusal(status: int, content: bytes) -> ErrorInfo:
    """Return an engine's error as ours."""
    if status in REFUSES_AGENT:
        return _engine_error(f"it refuses its agent with HTTP {status}: set agent.api_key_file to the server's key")
    try:
        error = msgspec.json.decode(content)["error"]
        message, param = str(error["message"]), error.get("param")
    except (msgspec.DecodeError, TypeError, KeyError):
        message, param = content[:200].decode(errors="replace"), None
    is_by_client = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    code = {404: "model_not_found", 429: "overloaded"}.get(status, "invalid_request" if is_by_client else "engine_error")
    return ErrorInfo(
        code=code,
        message=f"vLLM: {message}",
        http_status=status if status >= HTTPStatus.BAD_REQUEST else HTTPStatus.BAD_GATEWAY,
        param=param if isinstance(param, str) else None,
    )


def _engine_error(what: str) -> ErrorInfo:
    return ErrorInfo(code="engine_error", message=f"vLLM: {what}", http_status=HTTPStatus.BAD_GATEWAY)


def _read_rendered(content: bytes) -> list[_Rendered]:
    """Return the prompts of a rendered body; a body with one prompt may be rendered without a list."""
    found = msgspec.json.decode(content, type=_Rendered | list[_Rendered])
    prompts = found if isinstance(found, list) else [found]
    if not prompts:
        raise msgspec.ValidationError("there is no prompt in it")
    return prompts


def _prompt(found: _Rendered, adapter: str) -> RenderedPrompt:
    rest = {
        "sampling_params": {name: value for name, value in found.sampling_params.items() if name != "stop"},
        "features": found.features,
        "model": adapter or None,
        "reasoning_ended": found.reasoning_ended,
        "reasoning_parser_kwargs": found.reasoning_parser_kwargs,
    }
    return RenderedPrompt(tuple(found.token_ids), msgspec.json.encode(rest))
