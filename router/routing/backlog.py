"""The prompts that one worker has and has not computed yet, and how long a new one would wait for them.

Owns the router's picture of one worker's queue. It is corrected by every completion: what a prompt took longer or shorter than
predicted ends with it. Callers pass the time.
"""

from __future__ import annotations

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

    If other routers use the worker too, it reports all its work. The report is more complete than this router's own count, but
    older: the time since then and the prompts placed since then correct it.
    """

    prompts: dict[str, QueuedPrompt] = field(default_factory=dict)
    num_new_tokens: int = 0
    _running: str | None = None
    _since_ms: float = 0.0
    _reported_ms: float = 0.0  # at _reported_at_ms; 0 = no report, or an idle worker
    _reported_at_ms: float = 0.0
    _unreported: set[str] = field(default_factory=set)  # placed since the report

    def add(self, request_id: str, prompt: QueuedPrompt, now_ms: float) -> None:
        """Record a prompt that was sent to the worker; a known id is replaced."""
        self.remove(request_id, now_ms)
        self.prompts[request_id] = prompt
        self.num_new_tokens += prompt.num_new_tokens
        self._unreported.add(request_id)
        if self._running is None:
            self._running, self._since_ms = request_id, now_ms

    def remove(self, request_id: str, now_ms: float) -> QueuedPrompt | None:
        """Record that a prompt has been computed or has left otherwise; return it, or None if it is unknown."""
        prompt = self.prompts.pop(request_id, None)
        if prompt is None:
            return None
        self.num_new_tokens -= prompt.num_new_tokens
        self._unreported.discard(request_id)
        if request_id == self._running or now_ms - self._since_ms > self._predicted_ms_of_running():
            self._running = min(self.prompts, key=lambda name: self.prompts[name].due_ms, default=None)
            self._since_ms = now_ms
        return prompt

    def report(self, work_ms: float, now_ms: float) -> None:
        """Record how much work the worker has, in ms, of this and other routers."""
        self._reported_ms, self._reported_at_ms = max(0.0, work_ms), now_ms
        self._unreported.clear()

    def place_of(self, due_ms: float, now_ms: float, tenant: int | None = None) -> tuple[float, int]:
        """Return how many ms a prompt due then would wait, and how many queued prompts it would overtake.

        With a ``tenant`` the worker is fair: the prompts of each other tenant delay it by as much as those of its own, and by
        about one prompt more.
        """
        wait_ms = unreported_ms = 0.0
        num_delayed = 0
        others_ms: dict[int, float] = {}
        for name, prompt in self.prompts.items():
            is_running = name == self._running
            if not is_running and prompt.due_ms > due_ms:
                num_delayed += 1
                continue
            left_ms = max(0.0, prompt.predicted_ms - (now_ms - self._since_ms)) if is_running else prompt.predicted_ms
            wait_ms += left_ms
            if tenant is not None and prompt.tenant != tenant and not is_running:
                others_ms[prompt.tenant] = others_ms.get(prompt.tenant, 0.0) + left_ms
            if name in self._unreported:
                unreported_ms += prompt.predicted_ms
        if others_ms:
            turn_ms = wait_ms - sum(others_ms.values()) + wait_ms / len(self.prompts)
            wait_ms -= sum(max(0.0, other_ms - turn_ms) for other_ms in others_ms.values())
        reported_ms = max(0.0, self._reported_ms - (now_ms - self._reported_at_ms))
        return max(wait_ms, reported_ms + unreported_ms) if reported_ms else wait_ms, num_delayed

    def work_ms(self, now_ms: float) -> float:
        """Return the predicted time until all its prompts are computed."""
        return self.place_of(float("inf"), now_ms)[0]

    def _predicted_ms_of_running(self) -> float:
        running = self.prompts.get(self._running) if self._running is not None else None
        return running.predicted_ms if running is not None else float("inf")
