"""What one worker's work costs: times of prefill, decode steps and handoffs, and the size of its KV cache.

Times are ms. Costs come from a file or from the table of known ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from core.errors import ConfigError
from router.routing.cost import PrefillTime

_Time = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefill takes base + token * new + pair * new * (hit + new / 2)."""

    base_ms: _Time
    token_ms: _Time
    pair_ms: _Time = 0.0


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode step takes base + request * running requests + kv_token * the tokens of their contexts."""

    base_ms: _Time
    request_ms: _Time = 0.0
    kv_token_ms: _Time = 0.0


class HandoffCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A handoff takes base + token * tokens that the decode worker does not have."""

    base_ms: _Time = 0.0
    token_ms: _Time = 0.0


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The costs of one kind of worker and model.

    ``kv_tokens`` is the size of its KV cache, and ``tier_tokens`` what its tiers hold beside, whose loading counts as free.
    """

    prefill: PrefillCost
    step: StepCost
    handoff: HandoffCost = HandoffCost()
    kv_tokens: _Count
    tier_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)] = 0
    max_num_seqs: _Count = 256

    @property
    def prefill_time(self) -> PrefillTime:
        """The prefill time as the router's cost function takes it."""
        return PrefillTime(self.prefill.base_ms, self.prefill.token_ms, self.prefill.pair_ms)

    def step_ms(self, num_running: int, num_kv_tokens: float) -> float:
        """Return the time of a decode step."""
        return self.step.base_ms + self.step.request_ms * num_running + self.step.kv_token_ms * num_kv_tokens

    def chunk_ms(self, num_new: int, num_context: int) -> float:
        """Return what a chunk of a prompt adds to a step, without the step's base."""
        return num_new * (self.prefill.token_ms + self.prefill.pair_ms * (num_context + num_new / 2))

    def handoff_ms(self, num_tokens: int) -> float:
        """Return the time from the end of a prefill until the decode worker can use its KV."""
        return self.handoff.base_ms + self.handoff.token_ms * num_tokens


KNOWN = {
    "qwen3-32b-2gpu": Costs(  # Qwen3-32B on two GPUs a worker; 262,144 bytes a token over 25 GB/s
        prefill=PrefillCost(base_ms=12, token_ms=0.05337, pair_ms=2.30e-6),
        step=StepCost(base_ms=14, request_ms=0.05, kv_token_ms=0.05e-3),
        handoff=HandoffCost(base_ms=8, token_ms=262_144 / 25e6),
        kv_tokens=300_000,
        tier_tokens=2_772_000,  # 676 GiB of host memory, so that a worker caches 6,000 blocks of 512 tokens
    )
}


def read_costs(name: str) -> Costs:
    """Return the known costs of this name, or those of a YAML or JSON file.

    Raises:
        ConfigError: there is no such name or file, or a value is missing or wrong.
    """
    if name in KNOWN:
        return KNOWN[name]
    try:
        costs = msgspec.yaml.decode(Path(name).read_bytes(), type=Costs)
    except OSError as error:
        known = ", ".join(KNOWN)
        raise ConfigError(f"no costs {name!r}: {error.strerror}; a YAML file, or one of {known}", param="costs") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"costs {name!r}: {' '.join(str(error).split())}", param="costs") from None
    if costs.chunk_ms(1, 0) + costs.prefill.base_ms <= 0 or costs.step.base_ms <= 0:
        raise ConfigError(f"costs {name!r}: a prefill and a decode step take more than 0 ms", param="costs")
    return costs
