"""The cost models of ``local_prefill.py``: times of prefill, decode step and handoff. Times are ms of simulated time.

The prefill times are those of ``routing_simulation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from routing_simulation import PrefillMs, mocker_prefill_ms, qwen_prefill_ms

CONTEXT_TOKENS = 300_000  # that one decode worker holds
BYTES_PER_TOKEN = 262_144
HANDOFF_MS = 8.0


def qwen_step_ms(num_running: int, kv_tokens: int) -> float:
    """Return the time of a decode step of a Qwen3-32B class model on two GPUs."""
    return 14 + 0.05 * num_running + 0.05e-3 * kv_tokens


def mocker_step_ms(num_running: int, kv_tokens: int) -> float:
    """Return the time of a step of Dynamo's mocker, which depends on the share of the KV cache in use only."""
    del num_running
    share = kv_tokens / CONTEXT_TOKENS
    return 5.74 + share * (54.01 - 25.74 * share)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times in ms: of a prefill by new and cached tokens, of a decode step by requests and tokens of their contexts."""

    prefill_ms: PrefillMs
    step_ms: Callable[[int, int], float]
    bytes_per_ms: float

    def handoff_ms(self, num_tokens: int) -> float:
        return HANDOFF_MS + num_tokens * BYTES_PER_TOKEN / self.bytes_per_ms


MODELS = {
    "qwen": CostModel(qwen_prefill_ms, qwen_step_ms, 25e6),
    "mocker": CostModel(mocker_prefill_ms, mocker_step_ms, 64e6),
}
