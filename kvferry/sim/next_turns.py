"""Second turns of conversations: prompts that begin with an earlier prompt and its answer.

Their beginnings are in the caches of decode workers, so prefill workers may load them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from core.testing.hash_model import HashAttention, expected_tokens
from kvferry.sim.plan import RequestPlan

_DELAY_S = (0.5, 4.0)
_MAX_TURNS = 2
_LATEST_S = 10.0  # of a turn, since faults that have ended excuse nothing
_MAX_PROMPT_TOKENS = 100
_MAX_NEW_TOKENS = 20
_MAX_OUTPUT_TOKENS = 12


def draw_conversations(
    random: Random, requests: Sequence[RequestPlan], attentions: tuple[HashAttention, ...]
) -> tuple[RequestPlan, ...]:
    """Return the requests, each followed by up to two more turns as long as its prompt stays short enough."""
    every = turns = list(requests)
    for _ in range(_MAX_TURNS):
        turns = [_next_turn(random, request, attentions) for request in turns if not request.stop_token_ids]
        turns = [turn for turn in turns if len(turn.prompt_token_ids) <= _MAX_PROMPT_TOKENS and turn.at <= _LATEST_S]
        every = every + turns
    return tuple(every)


def _next_turn(random: Random, request: RequestPlan, attentions: tuple[HashAttention, ...]) -> RequestPlan:
    new_tokens = tuple(random.randrange(50_000) for _ in range(random.randint(1, _MAX_NEW_TOKENS)))
    prompt = request.prompt_token_ids + request.expected + new_tokens
    max_tokens = random.randint(2, _MAX_OUTPUT_TOKENS)
    return replace(
        request,
        name=f"{request.name}t",
        at=request.at + random.uniform(*_DELAY_S),
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        abort_at=None,
        text_ends_after=None,
        expected=tuple(expected_tokens(prompt, max_tokens, attentions=attentions)),
    )
