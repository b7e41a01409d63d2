"""Turns the fields of an OpenAI body into sampling parameters and output options: unsupported fields, ranges, defaults.

Owns the meaning of request fields. Every refusal is an ``InvalidRequest`` that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from core.errors import ContextTooLong, InvalidRequest
from core.wire.messages import LoadFailurePolicy
from core.wire.sampling import SamplingParams, check_tokens_left
from router.openai.requests import NEUTRAL, ChatCompletionRequest, CommonRequest, CompletionRequest, is_one_of
from router.openai.served_model import NEUTRAL_SAMPLING, SamplingDefaults
from router.openai.structured import structured_output

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for the completions endpoint
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of all stop strings of a request
MAX_LOGIT_BIAS = 8192
MAX_LISTED_IDS = 1 << 20  # per field, counted once for each prompt of the request
MAX_PROMPT_LOGPROBS = 1 << 18  # prompt tokens with their alternatives, counted once for each choice
MAX_ID_CHARACTERS = 128
MAX_CHOICES = 128

ID_FIELDS = ("request_id", "session_id", "cache_salt")


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed values of a number: from ``low``, or above it, to ``high``, None = without end."""

    low: float
    high: float | None = None
    is_low_open: bool = False


RANGES = {
    "n": Range(1, MAX_CHOICES),
    "max_tokens": Range(1),  # 0 with echo
    "max_completion_tokens": Range(1),
    "max_output_tokens": Range(1),
    "min_tokens": Range(0),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**64 - 1),
    "priority": Range(-(2**31), 2**31 - 1),
    "timeout_s": Range(0, is_low_open=True),
}

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits that the served model sets for a request, and its defaults for missing fields.

    Output without a limit of its own ends at ``max_model_len``, the longest context that is served now. Only what exceeds
    ``longest_model_len`` is refused for good.
    """

    max_model_len: int
    vocab_size: int
    max_prompt_tokens: int = 0  # the operator's limit; 0 = no limit
    defaults: SamplingDefaults = NEUTRAL_SAMPLING
    eos_token_ids: frozenset[int] = frozenset()
    later_model_len: int = 0  # the longest context that may soon be served; 0 = as now

    @property
    def longest_model_len(self) -> int:
        """The longest context that is served now, or may soon be."""
        return max(self.max_model_len, self.later_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What the answer contains. ``logprobs`` and ``prompt_logprobs``: number of alternatives, None = no log-probabilities."""

    is_stream: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    echo: bool = False
    is_echo_only: bool = False  # only the prompt
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stop_token_ids: frozenset[int] = frozenset()


def check_supported(request: CommonRequest) -> None:
    """Refuse known fields that are not supported.

    Raises:
        InvalidRequest: names the first such field.
    """
    for field, neutral in NEUTRAL.items():
        value = getattr(request, field, None)
        if value is not None and not is_one_of(value, neutral):
            raise InvalidRequest(f"{field} is not supported yet: leave it out", param=field)
    if isinstance(request, ChatCompletionRequest) and request.echo:
        raise InvalidRequest("echo is not supported yet in chats: leave it out", param="echo")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of is not supported yet: leave it out, or set it to n", param="best_of")


def output_options(request: CompletionRequest | ChatCompletionRequest) -> OutputOptions:
    """Return what the answer is to contain.

    Raises:
        InvalidRequest: a value is out of range, or two values contradict.
    """
    is_stream = bool(request.stream)
    stream_options = request.stream_options
    if stream_options is not None and not is_stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    if request.prompt_logprobs is not None and is_stream:
        raise InvalidRequest("prompt_logprobs is not available with stream", param="prompt_logprobs")
    _check_range("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    logprobs = _chat_logprobs(request) if isinstance(request, ChatCompletionRequest) else request.logprobs
    _check_range("logprobs", logprobs, 0, MAX_LOGPROBS)
    echo = _has_echo(request)
    return OutputOptions(
        is_stream=is_stream,
        stop=_stop_strings(request.stop),
        include_stop_str=bool(request.include_stop_str_in_output),
        min_tokens=request.min_tokens or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
        echo=echo,
        is_echo_only=echo and request.max_tokens == 0,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        return_token_ids=bool(request.return_token_ids),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
    )


def shared_params(
    request: CompletionRequest | ChatCompletionRequest, limits: ModelLimits, num_prompts: int = 1
) -> SamplingParams:
    """Return the sampling parameters that all prompts of a request share. ``check_ranges`` must have passed.

    Raises:
        InvalidRequest: a token id is outside the vocabulary, two values contradict, or there are too many ids for all prompts.
    """
    _check_listed_ids(request, num_prompts)
    for field in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(field, getattr(request, field) or (), limits.vocab_size)
    if request.allowed_token_ids is not None and not request.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty: no token could be generated", param="allowed_token_ids")
    options = output_options(request)
    defaults = limits.defaults
    prompt_logprobs = options.prompt_logprobs
    if prompt_logprobs is None and options.echo:
        prompt_logprobs = options.logprobs
    top_p = _default(request.top_p, defaults.top_p)
    params = SamplingParams(
        min_tokens=request.min_tokens or 0,
        temperature=_default(request.temperature, defaults.temperature) if top_p else 0.0,
        top_p=top_p,
        top_k=min(max(0, defaults.top_k if request.top_k is None else request.top_k), limits.vocab_size),
        min_p=_default(request.min_p, defaults.min_p),
        repetition_penalty=_default(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_default(request.presence_penalty, 0.0),
        frequency_penalty=_default(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias, limits.vocab_size),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=options.logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured_output(request),
    )
    ends = options.stop_token_ids if params.ignore_eos else options.stop_token_ids | limits.eos_token_ids
    check_tokens_left(params, ends, limits.vocab_size)
    return params


def params_of_prompt(
    request: CompletionRequest | ChatCompletionRequest,
    shared: SamplingParams,
    num_prompt_tokens: int,
    seed: int,
    limits: ModelLimits,
) -> SamplingParams:
    """Return the sampling parameters for one prompt; ``seed`` is used if the client gave none.

    Raises:
        InvalidRequest: ``min_tokens`` exceeds ``max_tokens``.
        ContextTooLong: prompt and output together exceed the model's context.
    """
    _check_prompt_length(request, num_prompt_tokens, limits.max_prompt_tokens)
    max_tokens = _max_tokens(request, num_prompt_tokens, limits)
    if (request.min_tokens or 0) > max_tokens:
        limit = f"{_field_of_max_tokens(request)} = {max_tokens}"
        raise InvalidRequest(f"min_tokens = {request.min_tokens} exceeds {limit}", param="min_tokens")
    return msgspec.structs.replace(
        shared,
        max_tokens=max(
            1, max_tokens
        ),  # a worker always samples a token; ``router.openai.postprocess`` drops it if none was requested
        seed=seed if request.seed is None else request.seed % 2**63,
    )


def check_num_logprobs(
    request: CompletionRequest | ChatCompletionRequest, shared: SamplingParams, nums_prompt_tokens: Sequence[int]
) -> None:
    """Refuse prompt log-probabilities that would be too many for one answer.

    Raises:
        InvalidRequest: names their number.
    """
    if shared.prompt_logprobs is None:
        return
    num_entries = (request.n or 1) * sum(nums_prompt_tokens) * (1 + shared.prompt_logprobs)
    if num_entries > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"{num_entries} log-probabilities of prompt tokens were to be in the answer, at most {MAX_PROMPT_LOGPROBS} are: "
            "ask for fewer alternatives, choices or prompts",
            param=field,
        )


def _check_listed_ids(request: CompletionRequest | ChatCompletionRequest, num_prompts: int) -> None:
    """Refuse lists of ids that are too long for the number of prompts, because each prompt has its own copy."""
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        num_ids = num_prompts * len(getattr(request, field) or ())
        if num_ids > MAX_LISTED_IDS:
            raise InvalidRequest(
                f"{field}, once for each of {num_prompts} prompts, holds {num_ids} ids, at most {MAX_LISTED_IDS} are allowed",
                param=field,
            )


def load_failure_policy(request: CommonRequest) -> LoadFailurePolicy | None:
    """Return the policy for KV that cannot be loaded; None means the workers' setting.

    Raises:
        InvalidRequest: the policy is unknown; names the field and the allowed values.
    """
    wanted = request.kv_transfer_params and request.kv_transfer_params.kv_load_failure_policy
    if wanted is None:
        return None
    allowed: tuple[LoadFailurePolicy, ...] = get_args(LoadFailurePolicy)
    for policy in allowed:
        if wanted == policy:
            return policy
    field = "kv_transfer_params.kv_load_failure_policy"
    raise InvalidRequest(f"{field} must be one of {', '.join(allowed)}, got {wanted!r}", param=field)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: names the field and the id.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(f"{field} holds {wrong}, the vocabulary ends at {vocab_size - 1}", param=field)


def check_ranges(request: CommonRequest) -> None:
    """Check the ranges that do not depend on the model.

    Raises:
        InvalidRequest: names the first field out of range.
    """
    for field, allowed in RANGES.items():
        low = 0 if field == "max_tokens" and _has_echo(request) else allowed.low
        _check_range(field, getattr(request, field, None), low, allowed.high, is_low_open=allowed.is_low_open)
    for field in ID_FIELDS:
        text = getattr(request, field) or ""
        if len(text) > MAX_ID_CHARACTERS:
            raise InvalidRequest(f"{field} has {len(text)} characters, at most {MAX_ID_CHARACTERS} are allowed", param=field)
    if request.cache_salt is not None and not request.cache_salt:
        raise InvalidRequest("cache_salt is empty: leave it out, or give it a value", param="cache_salt")


def _has_echo(request: CommonRequest) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo)


def _check_range(
    field: str, value: float | None, low: float, high: float | None, *, is_low_open: bool = False, param: str = ""
) -> None:
    if value is None or ((low < value if is_low_open else low <= value) and (high is None or value <= high)):
        return
    allowed = f"more than {low}" if is_low_open else f"at least {low}"
    if high is not None:
        allowed += f" and at most {high}"
    raise InvalidRequest(f"{field} must be {allowed}, got {value}", param=param or field)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    _check_range("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
    return (request.top_logprobs or 0) if request.logprobs else None


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    num_characters = sum(map(len, strings))
    if num_characters > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop holds {num_characters} characters, at most {MAX_STOP_CHARACTERS} are allowed together", param="stop"
        )
    if "" in strings:
        raise InvalidRequest("stop holds an empty string, which would match everywhere", param="stop")
    return strings


def _check_prompt_length(
    request: CompletionRequest | ChatCompletionRequest, num_prompt_tokens: int, max_prompt_tokens: int
) -> None:
    if max_prompt_tokens and num_prompt_tokens > max_prompt_tokens:
        raise ContextTooLong(
            f"The prompt has {num_prompt_tokens} tokens, this server takes at most {max_prompt_tokens}.",
            param="messages" if isinstance(request, ChatCompletionRequest) else "prompt",
        )


def _max_tokens(request: CompletionRequest | ChatCompletionRequest, num_prompt_tokens: int, limits: ModelLimits) -> int:
    """Return the client's limit, else the endpoint's default, checked against the model's context."""
    most = limits.longest_model_len - num_prompt_tokens
    room = limits.max_model_len - num_prompt_tokens
    room = room if room > 0 else most
    is_chat = isinstance(request, ChatCompletionRequest)
    wanted = _wanted_tokens(request)
    if wanted is None:
        wanted = room if is_chat else min(COMPLETION_MAX_TOKENS, room)
    needed = max(1, wanted)
    if needed > most:
        field = _field_of_max_tokens(request)
        fix = f": {field} may be at most {most} with this prompt" if most > 0 else ""
        raise ContextTooLong(
            f"This model's maximum context length is {limits.longest_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + needed} tokens ({num_prompt_tokens} in the prompt, {needed} in the completion){fix}.",
            param=field if most > 0 else "messages" if is_chat else "prompt",
        )
    return wanted


def _field_of_max_tokens(request: CommonRequest) -> str:
    """Return the field that limits the output."""
    is_newer = isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if is_newer else "max_tokens"


def _wanted_tokens(request: CommonRequest) -> int | None:
    """Return the client's limit of output tokens."""
    wanted: int | None = getattr(request, _field_of_max_tokens(request))
    return wanted


def truncated(token_ids: Sequence[int], request: CommonRequest, limits: ModelLimits) -> tuple[int, ...]:
    """Return the last tokens of a prompt, as many as ``truncate_prompt_tokens`` says.

    -1 means what fits beside ``max_tokens``, or beside ``COMPLETION_MAX_TOKENS`` if the client gives none.

    Raises:
        InvalidRequest: the number is neither -1 nor at least 1.
    """
    limit = request.truncate_prompt_tokens
    if limit is None:
        return tuple(token_ids)
    if limit < 1 and limit != -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, or -1 for the model's limit, got {limit}",
            param="truncate_prompt_tokens",
        )
    if limit == -1:
        wanted = _wanted_tokens(request)
        room = limits.max_model_len - (COMPLETION_MAX_TOKENS if wanted is None else max(1, wanted))
        limit = max(1, min(room, limits.max_prompt_tokens or room))
    return tuple(token_ids[-limit:])


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    if bias and len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias")
    for key, value in (bias or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"logit_bias has the key {key[:20]!r}, expected a token id", param="logit_bias")
        check_token_ids("logit_bias", (int(key),), vocab_size)
        _check_range(f"logit_bias[{key}]", value, -100, 100, param="logit_bias")
        if int(key) in result:
            other = next(known for known in bias or () if int(known) == int(key))
            raise InvalidRequest(f"logit_bias has two keys of one token, {other} and {key}: leave one out", param="logit_bias")
        result[int(key)] = value
    return result
