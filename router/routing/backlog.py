"""The prompts that one worker has and has not computed yet, and how long a new one would wait for them.

Owns the router's picture of one worker's queue. It is corrected by every completion: what a prompt took longer or shorter than
predicted ends with it. Callers pass the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """One prompt at a worker: how many tokens it has to compute, for how long, and when it is due (router time, ms)."""

    num_new_tokens: int
    predicted_ms: float
    due_ms: float
    tenant: int = 0


@dataclass(slots=True)
class Backlog:
    """The uncomputed prompts at one worker. The worker computes one at a time, the one that is due first.

    A prompt that is due after all others, as every new one of a worker without patience is, costs the same behind any number
    of them.
    """

    prompts: dict[str, QueuedPrompt] = field(default_factory=dict)
    num_new_tokens: int = 0
    _running: str | None = None
    _since_ms: float = 0.0
    _tenant_ms: dict[int, float] = field(default_factory=dict)  # predicted times of the prompts, by tenant
    _tenant_counts: dict[int, int] = field(default_factory=dict)
    _by_due: list[tuple[float, int, str]] = field(default_factory=list)  # heap; entries of prompts that are gone are skipped
    _numbers: dict[str, int] = field(default_factory=dict)  # of the valid entries
    _num_added: int = 0
    _last_due_ms: float = -math.inf  # no prompt is due later

    def add(self, request_id: str, prompt: QueuedPrompt, now_ms: float) -> None:
        """Record a prompt that was sent to the worker; a known id is replaced."""
        self.remove(request_id, now_ms, is_computed=False)
        self.prompts[request_id] = prompt
        self.num_new_tokens += prompt.num_new_tokens
        self._tenant_ms[prompt.tenant] = self._tenant_ms.get(prompt.tenant, 0.0) + prompt.predicted_ms
        self._tenant_counts[prompt.tenant] = self._tenant_counts.get(prompt.tenant, 0) + 1
        self._num_added += 1
        self._numbers[request_id] = self._num_added
        heapq.heappush(self._by_due, (prompt.due_ms, self._num_added, request_id))
        self._last_due_ms = max(self._last_due_ms, prompt.due_ms)
        if self._running is None:
            self._running, self._since_ms = request_id, now_ms

    def remove(self, request_id: str, now_ms: float, *, is_computed: bool = True) -> QueuedPrompt | None:
        """Record that a prompt has been computed or has left otherwise; return it, or None if it is unknown.

        One that is computed, and not the one that is late, shows what the worker does. One that leaves its queue shows nothing.
        """
        prompt = self.prompts.pop(request_id, None)
        if prompt is None:
            return None
        is_late = is_computed and now_ms - self._since_ms > self._predicted_ms_of_running()
        self._forget(request_id, prompt)
        if is_late or request_id == self._running:
            self._running, self._since_ms = self._first_due(), now_ms
        return prompt

    def place_of(self, due_ms: float, now_ms: float, tenant: int | None = None) -> tuple[float, int]:
        """Return how many ms a prompt due then would wait, and how many queued prompts it would overtake.

        With a ``tenant`` the worker is fair: the prompts of each other tenant delay it by as much as those of its own, and by
        about one prompt more.
        """
        tenants_ms: Mapping[int, float] = self._tenant_ms
        num_delayed = 0
        if due_ms < self._last_due_ms:
            tenants_ms, num_delayed = self._due_before(due_ms)
        running = self.prompts.get(self._running) if self._running is not None else None
        wait_ms = sum(tenants_ms.values())
        if running is not None:
            wait_ms -= min(running.predicted_ms, now_ms - self._since_ms)
        if tenant is not None:
            wait_ms -= self._fair_part(tenants_ms, wait_ms, tenant, running)
        return max(0.0, wait_ms), num_delayed

    @property
    def running(self) -> str | None:
        """The name of the prompt that the worker computes, as predicted."""
        return self._running

    def last_first(self) -> list[str]:
        """Return the names of its prompts, the one that is due last first; of equal ones the latest."""
        return sorted(self.prompts, key=lambda name: self.prompts[name].due_ms)[::-1]

    def left_ms(self, request_id: str, now_ms: float, tenant: int | None = None) -> float:
        """Return the predicted time until one of its prompts is computed."""
        return self.place_of(self.prompts[request_id].due_ms, now_ms, tenant)[0]

    def work_ms(self, now_ms: float) -> float:
        """Return the predicted time until all its prompts are computed."""
        return self.place_of(float("inf"), now_ms)[0]

    def _due_before(self, due_ms: float) -> tuple[Mapping[int, float], int]:
        """Return the time of each tenant of the prompts due by then, and how many are due later."""
        num_delayed = 0
        tenants_ms: dict[int, float] = {}
        for name, prompt in self.prompts.items():
            if name != self._running and prompt.due_ms > due_ms:
                num_delayed += 1
                continue
            tenants_ms[prompt.tenant] = tenants_ms.get(prompt.tenant, 0.0) + prompt.predicted_ms
        return tenants_ms, num_delayed

    def _fair_part(self, tenants_ms: Mapping[int, float], wait_ms: float, tenant: int, running: QueuedPrompt | None) -> float:
        """Return how much of a wait falls away since the worker is fair to a tenant; the running prompt is waited for."""
        others_ms = {name: total_ms for name, total_ms in tenants_ms.items() if name != tenant}
        if running is not None and running.tenant in others_ms:
            others_ms[running.tenant] -= running.predicted_ms
        if not others_ms:
            return 0.0
        turn_ms = wait_ms - sum(others_ms.values()) + wait_ms / len(self.prompts)
        return sum(max(0.0, other_ms - turn_ms) for other_ms in others_ms.values())

    def _forget(self, request_id: str, prompt: QueuedPrompt) -> None:
        """Take a removed prompt out of the sums, which begin anew when there is none, so that rounding does not add up."""
        self.num_new_tokens -= prompt.num_new_tokens
        del self._numbers[request_id]
        self._tenant_ms[prompt.tenant] -= prompt.predicted_ms
        self._tenant_counts[prompt.tenant] -= 1
        if not self._tenant_counts[prompt.tenant]:
            del self._tenant_ms[prompt.tenant], self._tenant_counts[prompt.tenant]
        if not self.prompts:
            self._by_due.clear()
            self._last_due_ms = -math.inf

    def _first_due(self) -> str | None:
        """Return the prompt that is due first; of equal ones the oldest."""
        while self._by_due:
            _, number, name = self._by_due[0]
            if self._numbers.get(name) == number:
                return name
            heapq.heappop(self._by_due)
        return None

    def _predicted_ms_of_running(self) -> float:
        running = self.prompts.get(self._running) if self._running is not None else None
        return running.predicted_ms if running is not None else float("inf")
