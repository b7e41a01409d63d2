"""A vLLM server over HTTP: is it ready, what does it serve, how loaded is it, and generate.

Owns the connections. Errors come out as those of ``core.errors``.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
import msgspec

from agent.server_metrics import ServerLoad, has_plugin, has_stats, labels_of, read_load, read_start
from agent.vllm_protocol import (
    ABORT,
    GENERATE,
    MAX_LOGPROBS,
    RENDER,
    TOO_MANY_LOGPROBS,
    CompletionResponse,
    decode_answer,
    logprobs_limit,
)
from core.errors import ConfigError, EngineDead, InvalidRequest, KVFerryError, Overloaded
from core.tracing import TraceContext
from core.wire.engine_calls import release_body

CONNECT_TIMEOUT_S = 5.0
FACTS_TIMEOUT_S = 10.0
RENDER_TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
T = TypeVar("T")

MAX_EVENT_BYTES = 16 << 20
_UNUSABLE_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH})  # such as ::1 without IPv6
_EVENT, _EVENT_END, _LAST_EVENT = b"data: ", b"\n\n", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What a server says of itself. ``num_blocks`` and ``block_size`` are those of its KV cache; 0 blocks if it does not say.

    With decode-context parallelism a block is one over all ranks.
    """

    version: str
    model: str
    max_model_len: int
    num_blocks: int
    block_size: int
    splits_output: bool  # it separates reasoning from the text of every chat
    has_prefix_cache: bool
    has_plugin: bool  # it hands its KV over by our connector
    has_stats: bool  # see ``ServerLoad``
    root: str  # the repository or directory of the model
    started_at: float  # see ``ServerLoad``


class Health(Enum):
    """What a look at a server has shown. ``GONE``: nothing listens at its port, or it says that its engine is dead."""

    HEALTHY = "healthy"
    SILENT = "silent"
    GONE = "gone"


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


_PLAIN = {"Accept-Encoding": "identity"}  # parts of answers are passed on as they come


class VllmServer:
    """The server at ``url``. One event loop. ``max_logprobs`` is its limit, once it has told its facts."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.max_logprobs = MAX_LOGPROBS
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=_PLAIN | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # the server is on this machine: no proxy
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    # ---- the server itself -------------------------------------------------------------------------------------------

    async def health(self, timeout_s: float) -> Health:
        """Look whether it answers, and its engine is alive."""
        try:
            answer = await self._client.get("/health", timeout=timeout_s)
        except httpx.ConnectError as error:
            return Health.GONE if _is_refused(error) else Health.SILENT
        except httpx.HTTPError:
            return Health.SILENT
        match answer.status_code:
            case HTTPStatus.OK:
                return Health.HEALTHY
            case HTTPStatus.SERVICE_UNAVAILABLE:
                return Health.GONE
        return Health.SILENT

    async def compute(self, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """Let it compute a prompt and tokens of no meaning, and wait for them.

        Raises:
            KVFerryError: it refuses that, or is lost.
        """
        sampling = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": [1] * num_prompt_tokens, "sampling_params": sampling, "stream": False}
        async with self.generate(body) as answers:
            async for _ in answers:
                pass

    async def refuse(self, kv_transfer_params: dict[str, Any]) -> None:
        """Send a request that the server refuses: so it tells its connector that nothing will read this handoff.

        Raises:
            EngineDead: it does not answer.
        """
        await self._post(COMPLETIONS, release_body(kv_transfer_params))

    async def facts(self) -> VllmFacts:
        """Ask a healthy server what it serves, and whether it takes token ids.

        Raises:
            ConfigError: it refuses what the agent needs; the message names the flag.
            EngineDead: it does not answer.
        """
        await self._check_token_routes()
        self.max_logprobs = await self._ask_max_logprobs()
        models = await self._ask("/v1/models", _Models)
        version = await self._ask("/version", _Version)
        if not models.data or not models.data[0].max_model_len:
            raise ConfigError(f"agent.engine = {self.url}: it names no model with a max_model_len")
        metrics = await self._metrics()
        cache = labels_of(metrics, "vllm:cache_config_info")
        return VllmFacts(
            version=version.version,
            model=models.data[0].id,
            max_model_len=models.data[0].max_model_len,
            num_blocks=_number(cache.get("num_gpu_blocks"), 0),
            block_size=_number(cache.get("effective_attention_block_size"), _number(cache.get("block_size"), 1)),
            splits_output=await self._splits_output(),
            has_prefix_cache=cache.get("enable_prefix_caching", "True") == "True",
            has_plugin=has_plugin(metrics),
            has_stats=has_stats(metrics),
            root=models.data[0].root or "",
            started_at=read_start(metrics),
        )

    async def load(self, timeout_s: float) -> ServerLoad:
        """Return the load of all engines of the server.

        Raises:
            EngineDead: it does not answer in time.
        """
        return read_load(await self._metrics(timeout_s))

    async def _check_token_routes(self) -> None:
        answer = await self._post(ABORT, {"request_ids": []})
        if answer.status_code in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            raise ConfigError(
                f"agent.engine = {self.url}: it does not take token ids: start vllm serve with --enable-scale-out",
                param="agent.engine",
            )
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(
                f"agent.engine = {self.url}: it wants an API key: set agent.api_key or agent.api_key_file",
                param="agent.api_key_file",
            )

    async def _ask_max_logprobs(self) -> int:
        """Return the server's limit. A request above it could not be sent again: its refusal releases the handoff it brings."""
        sampling = {"max_tokens": 1, "logprobs": TOO_MANY_LOGPROBS}
        answer = await self._post(GENERATE, {"token_ids": [1], "sampling_params": sampling, "stream": False})
        return logprobs_limit(answer.content)

    async def _splits_output(self) -> bool:
        """Return whether the server has a parser of reasoning: then it renders a chat with that parser's settings.

        The chat wants JSON, so that the server loads what it needs for grammars now: that may stop it for seconds.
        """
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = await self._post(RENDER, chat | {"response_format": {"type": "json_object"}}, RENDER_TIMEOUT_S)
        if answer.status_code != HTTPStatus.OK:  # as of a model without a tokenizer
            answer = await self._post(RENDER, chat)
        if answer.status_code != HTTPStatus.OK:  # or without a chat template
            return False
        return bool(msgspec.json.decode(answer.content, type=dict[str, Any]).get("reasoning_parser_kwargs"))

    async def _ask(self, path: str, kind: type[T]) -> T:
        try:
            answer = await self._client.get(path, timeout=FACTS_TIMEOUT_S)
            return msgspec.json.decode(answer.raise_for_status().content, type=kind)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise EngineDead(f"{self.url}{path}: {error!r}") from None

    async def _metrics(self, timeout_s: float = FACTS_TIMEOUT_S) -> str:
        try:
            return (await self._client.get("/metrics", timeout=timeout_s)).raise_for_status().text
        except httpx.HTTPError as error:
            raise EngineDead(f"{self.url}/metrics: {error!r}") from None

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float = FACTS_TIMEOUT_S) -> httpx.Response:
        try:
            return await self._client.post(path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EngineDead(f"{self.url}{path}: {error!r}") from None

    # ---- requests ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self, body: dict[str, Any], trace: TraceContext | None = None
    ) -> AsyncIterator[AsyncIterator[CompletionResponse]]:
        """Send a request; yield its answers: one, or the parts of a stream. Leaving the context aborts it.

        A server with ``--otlp-traces-endpoint`` records its spans as children of ``trace``.

        Raises:
            KVFerryError: the server refuses it, or is lost.
        """
        try:
            content, headers = msgspec.json.encode(body), _headers(trace)
            async with self._client.stream("POST", GENERATE, content=content, headers=headers) as response:
                if response.status_code != HTTPStatus.OK:
                    raise _refusal(response.status_code, await response.aread())
                yield self._answers(response)
        except httpx.HTTPError as error:
            raise EngineDead(f"the server {self.url} was lost: {error!r}") from None

    @asynccontextmanager
    async def post(self, path: str, body: bytes, trace: TraceContext | None = None) -> AsyncIterator[httpx.Response]:
        """Post JSON to a route of the server; yield its answer, of any status, before its body is read.

        The server's spans are children of ``trace``.

        Raises:
            EngineDead: the server is lost.
        """
        try:
            async with self._client.stream("POST", path, content=body, headers=_headers(trace)) as response:
                yield response
        except httpx.HTTPError as error:
            raise EngineDead(f"the server {self.url} was lost: {error!r}") from None

    async def _answers(self, response: httpx.Response) -> AsyncIterator[CompletionResponse]:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            yield _checked(await response.aread())
            return
        rest = b""
        try:
            async for piece in response.aiter_bytes():
                *events, rest = (rest + piece).split(_EVENT_END)
                for event in events:
                    if event.startswith(_EVENT) and event != _LAST_EVENT:
                        yield _checked(event[len(_EVENT) :])
                if len(rest) > MAX_EVENT_BYTES:
                    raise EngineDead(f"the server {self.url} sends an event of more than {MAX_EVENT_BYTES} bytes")
        except httpx.HTTPError as error:
            raise EngineDead(f"the server {self.url} was lost: {error!r}") from None


def _is_refused(error: httpx.ConnectError) -> bool:
    """Return whether nothing listens at the server's port. A lack of descriptors or ports, say, tells nothing about that.

    Of several addresses, as ``localhost`` has them, those count that this machine can use.
    """
    found = _error_numbers(error)
    return errno.ECONNREFUSED in found and found <= _UNUSABLE_ADDRESS | {errno.ECONNREFUSED}


def _error_numbers(error: BaseException | None) -> set[int | None]:
    """Return why the server's addresses could not be connected to; None among them for what has no number."""
    if isinstance(error, ExceptionGroup):
        return {number for each in error.exceptions for number in _error_numbers(each)}
    if error is None:
        return {None}
    if isinstance(error, OSError) and error.errno is not None:
        return {error.errno}
    return _error_numbers(error.__cause__ or error.__context__)


def _headers(trace: TraceContext | None) -> dict[str, str]:
    return {"Content-Type": "application/json"} | (trace.headers if trace is not None else {})


def _checked(body: bytes) -> CompletionResponse:
    """Return an answer that is no error."""
    try:
        answer = decode_answer(body)
    except msgspec.MsgspecError as error:
        raise EngineDead(f"the server's answer cannot be understood: {error}") from None
    if answer.error is not None:
        raise _error(answer.error.code, answer.error.message)
    return answer


def _refusal(status: int, body: bytes) -> KVFerryError:
    try:
        error = decode_answer(body).error
    except msgspec.MsgspecError:
        error = None
    return _error(status, error.message if error is not None else body[:200].decode(errors="replace"))


def _error(code: int | str | None, message: str) -> KVFerryError:
    match _number(code, HTTPStatus.INTERNAL_SERVER_ERROR):
        case HTTPStatus.TOO_MANY_REQUESTS:
            return Overloaded(f"vLLM: {message}")
        case HTTPStatus.BAD_REQUEST | HTTPStatus.NOT_FOUND | HTTPStatus.UNPROCESSABLE_ENTITY:
            return InvalidRequest(f"vLLM: {message}")
        case _:
            return EngineDead(f"vLLM: {message}")


def _number(value: object, default: int) -> int:
    try:
        return int(str(value))
    except ValueError:
        return default
