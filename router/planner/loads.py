"""The load of each role, in workers: how many the present demand needs, and how many there are. No state but averages.

Prefill: work that arrives per second, or what is queued over the wait that is allowed, whichever is more. Decode: the fullest
of a worker's measures, which are its places in the batch, its KV pool and, with a limit, its time between two tokens. A prompt
waits at a prefill worker for the prompts before it; a choice waits at a decode worker for a place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from core.wire.messages import Role
from router.dispatch.members import GenerationWorker
from router.dispatch.route_costs import RouteCosts
from router.dispatch.wait_estimate import WaitEstimates

PLANNED_ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")
_MEMORY = 0.9  # of the time that a choice takes: about the last ten requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """One role: workers that take requests, how many are needed, the wait of a new request in seconds, and its tokens.

    ``offered``: how many workers the prompts that this router alone has sent keep busy. Several routers' add up; their demands
    do not, because workers report the rest to each of them.
    """

    num_available: int
    demanded: float
    wait_s: float
    inflight_tokens: int
    offered: float = 0.0

    def without_one(self) -> float:
        """Return the load of each worker if there were one less; infinite if it were the last."""
        return self.demanded / (self.num_available - 1) if self.num_available > 1 else float("inf")

    @property
    def load(self) -> float:
        """The load of each worker: 1 = as much as the settings allow. Without workers, infinite as soon as one is needed."""
        if not self.num_available:
            return float("inf") if self.demanded else 0.0
        return self.demanded / self.num_available


class RoleLoads:
    """Measures the roles of a router's workers. ``max_itl_ms`` = 0: the time between two tokens does not count."""

    def __init__(self, costs: RouteCosts, waits: WaitEstimates, max_wait_s: float, max_itl_ms: float) -> None:
        self._costs = costs
        self._waits = waits
        self._max_wait_s = max_wait_s
        self._max_itl_ms = max_itl_ms
        self._decode_s = 0.0  # of a request, from its first token to its end

    def on_decoded(self, seconds: float) -> None:
        """Record how long a request took from its first token to its end."""
        self._decode_s = _MEMORY * self._decode_s + (1 - _MEMORY) * seconds if self._decode_s else seconds

    def of(self, role: Role, workers: Iterable[GenerationWorker], now: float) -> RoleLoad:
        """Return the load of a role at router time ``now``."""
        members = [worker for worker in workers if worker.role == role and not worker.is_closed]
        prompts, decodes = self._of_prompts(role, members, now), self._of_decodes(members)
        if role == "aggregated":
            return replace(max(prompts, decodes, key=lambda load: load.demanded), offered=prompts.offered)
        return prompts if role == "prefill" else decodes

    def _of_prompts(self, role: Role, members: list[GenerationWorker], now: float) -> RoleLoad:
        waits_s = [self._wait_s(worker, now) for worker in members]
        offered = self._costs.offered(role, now)
        return RoleLoad(
            num_available=len(members),
            demanded=max(offered, sum(waits_s) / self._max_wait_s),
            offered=offered,
            wait_s=min(waits_s, default=0.0),
            inflight_tokens=sum(self._costs.num_queued_tokens(worker.key) for worker in members),
        )

    def _wait_s(self, worker: GenerationWorker, now: float) -> float:
        return self._costs.wait_s(worker, now) if self._costs.is_enabled else self._waits.wait_s(worker.key, now)

    def _of_decodes(self, members: list[GenerationWorker]) -> RoleLoad:
        waits_s = [max(0, worker.num_held - worker.num_slots) * self._decode_s / worker.num_slots for worker in members]
        return RoleLoad(
            num_available=len(members),
            demanded=sum(self._fullness(worker) for worker in members),
            wait_s=min(waits_s, default=0.0),
            inflight_tokens=sum(worker.num_inflight_tokens for worker in members),
        )

    def _fullness(self, worker: GenerationWorker) -> float:
        step_share = self._costs.step_ms(worker.key) / self._max_itl_ms if self._max_itl_ms and worker.num_held else 0.0
        return max(worker.load, worker.kv_load, worker.kv_cache_usage, step_share)
