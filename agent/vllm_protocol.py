"""What the agent says to a vLLM server, and what it reads of the answers: tokens in, tokens out.

Facts of vLLM 0.32: ``/inference/v1/generate`` takes and gives token ids. Its answer without ``stream`` has the
``kv_transfer_params`` of a handoff, a stream has none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from core.request import NewRequest
from core.wire.messages import TokenLogprobs
from core.wire.sampling import StructuredOutput

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
RENDER = "/v1/chat/completions/render"
REMOTE_DECODE = {  # of a prompt whose KV another engine will load: what llm-d's side-car sends
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
MAX_LOGPROBS = 20  # a server's limit without --max-logprobs
TOO_MANY_LOGPROBS = 2**31 - 1  # for any server
_LOGPROBS_LIMIT = re.compile(rb"greater than max allowed: (\d+)")
_MAX_SEED = 2**63 - 1
_LATER_PART = 7919  # a prime: the random numbers of a part that another engine continues are not those of the first


class Logprob(msgspec.Struct, kw_only=True):
    """The log-probability of one candidate. ``rank`` begins at 1."""

    logprob: float
    rank: int | None = None


class Candidate(Logprob, kw_only=True):
    """A candidate by its token."""

    token_id: int


class Content(Candidate, kw_only=True):
    """A sampled token and the most likely ones, itself first."""

    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    """Of the tokens of one chunk, in order."""

    content: list[Content] | None = None


class Choice(msgspec.Struct):
    """New tokens of one choice. ``stop_reason`` is the token that ended it, None for the end of the text."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class CachedTokens(msgspec.Struct):
    """How many tokens of the prompt were not computed; None if the server does not say."""

    cached_tokens: int | None = None


class ServerUsage(msgspec.Struct):
    """The account of a request."""

    prompt_tokens_details: CachedTokens | None = None


class ServerError(msgspec.Struct):
    """Why the server does not serve a request."""

    message: str = ""
    code: int | str | None = None


class CompletionResponse(msgspec.Struct):
    """An answer, or a part of a streamed one."""

    choices: list[Choice] = []
    usage: ServerUsage | None = None
    error: ServerError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """How many tokens of the prompt were not computed; None if the server does not say."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens if details is not None else None


_decoder = msgspec.json.Decoder(CompletionResponse, strict=False)  # keys of prompt_logprobs are token ids as strings


def decode_answer(body: bytes) -> CompletionResponse:
    """Return an answer.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decoder.decode(body)


def logprobs_limit(refusal: bytes) -> int:
    """Return how many log-probabilities a server allows, by its answer to ``TOO_MANY_LOGPROBS``; it says so nowhere else."""
    found = _LOGPROBS_LIMIT.search(refusal)
    return int(found[1]) if found is not None else MAX_LOGPROBS


def generate_body(request: NewRequest, *, is_regenerated: bool = False, max_logprobs: int = MAX_LOGPROBS) -> dict[str, Any]:
    """Return the request of one choice. Output that other engines have generated becomes part of the prompt, or comes again.

    So penalties, ``min_tokens`` and random numbers of a request that continues are as if its output had been in the prompt.
    ``max_logprobs`` is the server's limit.
    """
    before = () if is_regenerated else request.output_token_ids
    params: dict[str, Any] | None = None
    if request.needs_handoff:
        params = REMOTE_DECODE
    elif request.kv_handoff is not None:
        params = msgspec.json.decode(request.kv_handoff.engine_params)
    is_stream = not request.needs_handoff and request.sampling.prompt_logprobs is None  # which a stream has no field for
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": [*request.prompt_token_ids, *before],
        "sampling_params": _sampling(request, len(before), max_logprobs),
        "stream": is_stream,
    }
    if request.priority:  # refused by a server that has no priorities
        body["priority"] = request.priority
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if params is not None:
        body["kv_transfer_params"] = params
    return _with_rendered(body, request) if request.engine_request else body


class Rendered(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a render route of the server has made of a client's body, without the prompt: see ``Generate.engine_request``.

    ``model`` is set for an adapter (LoRA). ``features`` are the media with their places in the prompt.
    """

    sampling_params: dict[str, Any] = {}
    features: dict[str, Any] | None = None
    model: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None

    @property
    def must_begin_anew(self) -> bool:
        """True if the output follows a grammar, or must not have some words: a server begins both at the first token only."""
        return self.sampling_params.get("structured_outputs") is not None or bool(self.sampling_params.get("bad_words"))


_OF_PREFILL = ("structured_outputs", "logprobs", "thinking_token_budget")  # of the output, which the decode engine samples


def rendered(request: NewRequest) -> Rendered | None:
    """Return what was rendered for a request; None if the router made its prompt."""
    return msgspec.json.decode(request.engine_request, type=Rendered) if request.engine_request else None


def _with_rendered(body: dict[str, Any], request: NewRequest) -> dict[str, Any]:
    """Add what was rendered. What the router has decided, such as limits and seeds, goes before what the server rendered."""
    extra = msgspec.json.decode(request.engine_request, type=Rendered)
    ours = body["sampling_params"]
    theirs = dict(extra.sampling_params)
    for name in _OF_PREFILL if request.needs_handoff else ():
        theirs.pop(name, None)
    stops = sorted({*ours["stop_token_ids"], *theirs.get("stop_token_ids", ())})
    merged = {**theirs, **ours, "stop_token_ids": stops, "stop": [], "n": 1}
    found = {**body, "sampling_params": merged}
    if extra.features is not None:
        found["features"] = extra.features
    if extra.model is not None:
        found["model"] = extra.model
    if not request.needs_handoff:
        found["reasoning_ended"] = extra.reasoning_ended
        found["reasoning_parser_kwargs"] = extra.reasoning_parser_kwargs
    return found


def _sampling(request: NewRequest, num_before: int, max_logprobs: int) -> dict[str, Any]:
    wanted = request.sampling
    seed = (wanted.seed + request.choice_index + _LATER_PART * num_before) & _MAX_SEED
    found: dict[str, Any] = {
        "max_tokens": 1 if request.needs_handoff else wanted.max_tokens - num_before,
        "min_tokens": 0 if request.needs_handoff else max(0, wanted.min_tokens - num_before),
        "temperature": wanted.temperature,
        "top_p": wanted.top_p or 1e-9,
        "top_k": wanted.top_k,
        "min_p": wanted.min_p,
        "seed": seed,
        "repetition_penalty": wanted.repetition_penalty,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "stop_token_ids": sorted(wanted.stop_token_ids),
        "ignore_eos": wanted.ignore_eos,
        "logprobs": None if request.needs_handoff else _num_logprobs(wanted.logprobs, max_logprobs),
        "prompt_logprobs": wanted.prompt_logprobs,
        "detokenize": False,
    }
    if wanted.logit_bias:
        found["logit_bias"] = wanted.logit_bias
    if wanted.allowed_token_ids:
        found["allowed_token_ids"] = wanted.allowed_token_ids
    if wanted.structured_output is not None and not request.needs_handoff:  # the decode engine samples
        found["structured_outputs"] = _structured_outputs(wanted.structured_output)
    return found


def _structured_outputs(output: StructuredOutput) -> dict[str, Any]:
    """Return the form of the output as vLLM spells it."""
    match output.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": output.value}
        case "choice":
            return {"choice": msgspec.json.decode(output.value)}
        case kind:
            return {kind: output.value}


def token_logprobs(choice: Choice, num_top: int) -> list[TokenLogprobs] | None:
    """Return the log-probabilities of a choice's new tokens: the sampled one, then the ``num_top`` most likely ones."""
    if choice.logprobs is None or choice.logprobs.content is None:
        return None
    return [_ranked(content.token_id, content, content.top_logprobs, num_top) for content in choice.logprobs.content]


def prompt_token_logprobs(answer: CompletionResponse, request: NewRequest) -> tuple[TokenLogprobs | None, ...] | None:
    """Return the log-probabilities of the prompt's tokens: each itself, then the most likely ones; None for the first."""
    if answer.prompt_logprobs is None or request.sampling.prompt_logprobs is None:
        return None
    found: list[TokenLogprobs | None] = []
    for token_id, row in zip(request.prompt_token_ids, answer.prompt_logprobs, strict=False):
        if row is None:
            found.append(None)
            continue
        candidates = [Candidate(token_id=other, logprob=entry.logprob, rank=entry.rank) for other, entry in row.items()]
        found.append(_ranked(token_id, row[token_id], candidates, request.sampling.prompt_logprobs))
    return tuple(found)


def _ranked(token_id: int, own: Logprob, candidates: Iterable[Candidate], num_top: int) -> TokenLogprobs:
    ranked = sorted((each for each in candidates if each.rank), key=lambda each: each.rank or 0)[:num_top]
    return TokenLogprobs(
        (token_id, *(each.token_id for each in ranked)),
        (own.logprob, *(each.logprob for each in ranked)),
        own.rank or 0,
    )


def _num_logprobs(num_top: int | None, limit: int) -> int | None:
    """Return how many to ask for: the server puts the sampled token first and drops the last candidate for it."""
    return num_top if not num_top or num_top >= limit else num_top + 1
