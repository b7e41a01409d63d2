"""Sends one streaming request and times it. Knows the OpenAI completions API and server-sent events, nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from kvferry.bench.workload import BenchRequest
from kvferry.server_address import bearer


@dataclass(slots=True)
class RequestResult:
    """The result of one request; times in seconds from its arrival, which with bounded concurrency may precede its sending.

    ``itl_s`` are the gaps between successive chunks that carried a token: those with text, and those with empty text before
    the end (a token that ends within a character). Chunks of usage or of a finish reason alone do not count.
    ``num_output_tokens`` is the server's own count where it reports usage, else the number of chunks that count.
    """

    started_s: float  # its arrival, from the start of the run
    ttft_s: float | None = None
    e2e_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under load."""

    base_url: str  # up to and without /v1
    model: str
    api_key: str = ""
    ignore_eos: bool = True  # an extension of kvferry, vLLM and SGLang; off for servers that refuse it
    temperature: float = 0.0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        return bool(self.text) or (self.text == "" and self.finish_reason is None)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


async def send(
    client: httpx.AsyncClient, target: Target, request: BenchRequest, started_s: float, begin: float
) -> RequestResult:
    """Send one request, follow its stream to the end, and return the times. Failures are returned, not raised.

    ``begin`` is when the request arrived, by ``time.perf_counter``: where its times count from.
    """
    result = RequestResult(started_s=started_s)
    try:
        await _stream(client, target, request, result, begin)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.e2e_s = time.perf_counter() - begin
    return result


async def _stream(
    client: httpx.AsyncClient, target: Target, request: BenchRequest, result: RequestResult, begin: float
) -> None:
    headers = bearer(target.api_key)
    url = f"{target.base_url}/v1/completions"
    async with client.stream("POST", url, json=_body(target, request), headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode("utf-8", "replace")
            result.error = f"HTTP {response.status_code}: {text[:200]}"
            return
        last = begin
        is_done = has_reason = False
        async for chunk in _events(response):
            if chunk is None:
                is_done = True
                continue
            now = time.perf_counter()
            if chunk.error is not None:
                result.error = msgspec.json.encode(chunk.error).decode()[:200]
            if chunk.usage is not None:
                _take_usage(result, chunk.usage)
            choices = chunk.choices or []
            has_reason = has_reason or any(choice.finish_reason for choice in choices)
            if not any(choice.has_token for choice in choices):
                continue
            if result.ttft_s is None:
                result.ttft_s = now - begin
            else:
                result.itl_s.append(now - last)
            last = now
    if not is_done and not has_reason and not result.error:
        result.error = "the stream ended without [DONE] or a finish reason"
    if result.ttft_s is None and not has_reason and not result.error:  # an answer with a reason may be without text
        result.error = "the stream ended without a token"
    if result.num_output_tokens == 0 and result.ttft_s is not None:
        result.num_output_tokens = 1 + len(result.itl_s)


def _body(target: Target, request: BenchRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "model": target.model,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body


async def _events(response: httpx.Response) -> AsyncIterator[_Chunk | None]:
    """Yield the chunks, and None for the line that ends the stream."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            payload = line[5:].strip()
            if payload == "[DONE]":
                yield None
                return
            yield _CHUNK.decode(payload)


def _take_usage(result: RequestResult, usage: _Usage) -> None:
    result.num_prompt_tokens = usage.prompt_tokens or 0
    result.num_output_tokens = usage.completion_tokens or 0
    result.num_cached_tokens = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
