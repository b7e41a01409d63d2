"""The sampling parameters of a request with one prompt, in one call."""

from __future__ import annotations

from core.wire.sampling import SamplingParams
from router.openai.requests import ChatCompletionRequest, CompletionRequest
from router.openai.sampling import ModelLimits, params_of_prompt, shared_params


def sampling_params(
    request: CompletionRequest | ChatCompletionRequest, num_prompt_tokens: int, seed: int, limits: ModelLimits
) -> SamplingParams:
    """Return the sampling parameters for the only prompt of a request. ``check_ranges`` must have passed.

    Raises:
        InvalidRequest, ContextTooLong: as for ``shared_params`` and ``params_of_prompt``.
    """
    return params_of_prompt(request, shared_params(request, limits), num_prompt_tokens, seed, limits)
