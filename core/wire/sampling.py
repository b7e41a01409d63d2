"""Sampling parameters as they travel from the router to the workers and as the engine uses them.

The router has validated every range (``router.openai``); workers trust the types that the decoder checked. Stop *strings*
never reach a worker: the router owns the text.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it stops.

    ``temperature`` 0 means greedy. ``top_k`` 0 means all tokens. ``seed`` is always set by the router before a worker sees
    the request; the random number for a choice's token is a pure function of (seed, choice index, position), so that the
    first token sampled on a prefill worker and the next on a decode worker continue one stream.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # top-N per sampled token beside the sampled one; None = none at all
    prompt_logprobs: int | None = None  # the same for prompt tokens

    @property
    def is_greedy(self) -> bool:
        """True if the token is the argmax."""
        return self.temperature == 0.0
