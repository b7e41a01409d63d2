"""Sampling parameters, as the router sends them to the workers and as the engine uses them.

The router has validated every range (``router.openai.sampling``); workers trust the types that the decoder checked. Stop
*strings* never reach a worker: the router owns the text.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from core.errors import InvalidRequest
from core.wire.limits import Count, Fraction, TokenId

NonNegative = Annotated[float, Meta(ge=0, le=1e6)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Factor = Annotated[float, Meta(ge=0.01, le=100)]  # a factor of 0 would make all seen tokens equal, or infinite
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=100)]  # per token; a frame must be able to hold them

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
FORM_FIELD = "structured_outputs"  # a worker's error that names it is of the request's form, whatever field gave the form
GrammarText = Annotated[str, Meta(max_length=128 << 10)]  # ``core.grammar.limits`` has a closer limit for each kind


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that the whole output must have; hashable, the key of compiled grammars.

    ``value`` by ``kind``: ``json_schema`` a schema as JSON text; ``regex`` a pattern that the whole output matches; ``choice``
    a JSON list of strings; ``grammar`` Lark or GBNF; ``structural_tag`` vLLM's object as JSON text, which leaves the text
    outside its tags free; ``json_object`` nothing.
    """

    kind: GrammarKind
    value: GrammarText = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are sampled and when it stops.

    ``temperature`` 0 means greedy. ``top_k`` 0 means all tokens. ``seed`` is always set by the router before a worker sees
    the request; the random number for a choice's token is a pure function of (seed, choice index, position), so that the
    first token sampled on a prefill worker and the next on a decode worker continue one stream.
    """

    max_tokens: Count = 16
    min_tokens: Count = 0
    temperature: NonNegative = 1.0
    top_p: Fraction = 1.0
    top_k: Count = 0
    min_p: Fraction = 0.0
    seed: Seed = 0
    repetition_penalty: Factor = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[TokenId, Bias] = {}
    allowed_token_ids: tuple[TokenId, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: NumLogprobs | None = None  # top-N per sampled token in addition to the sampled one; None = none at all
    prompt_logprobs: NumLogprobs | None = None  # the same for prompt tokens
    structured_output: StructuredOutput | None = None  # None = free text


IGNORES_END = "ignore_eos excludes structured output, which ends where its grammar does: leave one of them out"


def check_tokens_left(params: SamplingParams, stop_token_ids: frozenset[int], vocab_size: int) -> None:
    """Refuse a request if every allowed token ends the text while ``min_tokens`` forbids the end.

    Only this can leave no token to choose: a bias is finite, and the filters keep the likeliest token.
    ``stop_token_ids`` are all tokens that end it, the model's own included, each of the vocabulary.

    Raises:
        InvalidRequest: names the field to change.
    """
    if not params.min_tokens:
        return
    if params.allowed_token_ids and stop_token_ids.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            f"every token in allowed_token_ids ends the text (it is in stop_token_ids, or the model's end of text), and "
            f"min_tokens = {params.min_tokens} forbids that: allow one that does not, or leave min_tokens out",
            param="allowed_token_ids",
        )
    if len(stop_token_ids) >= vocab_size:
        raise InvalidRequest(
            f"stop_token_ids holds the whole vocabulary, and min_tokens = {params.min_tokens} forbids each of its tokens: "
            "leave some tokens, or leave min_tokens out",
            param="stop_token_ids",
        )
