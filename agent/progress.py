"""Whether a vLLM server makes progress: the age of its last sign of work.

A sign is a token of a request of ours, a step that the server has counted, or more blocks in use: vLLM counts no step that
brings no token, such as all chunks of a prompt but the last, but each chunk takes blocks. Layers with sliding windows free as
many once the window is full, so a model without full attention shows no sign within a long prompt. Times are arguments.
"""

from __future__ import annotations

from collections import deque

from core.engine.step_watch import StepReading
from core.wire.progress import stall_bound_s

_MEMORY_S = 60.0
_STALL_SHARE = 0.4
_LEAST_GAP_S = 1.0  # a server is asked about its steps so often only


class ServerProgress:
    """The time of the last sign, and the longest gap between two signs of the last minute."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._num_steps = 0
        self._usage = 0.0
        self._gaps: deque[tuple[float, float]] = deque()  # (time, seconds), each longer than those after it

    def begin(self, now: float) -> None:
        """Note that there is work, after a time without any."""
        self._last = now

    def note(self, now: float) -> None:
        """Note a sign of work. A stall counts as a part of the bound, so that the next one is noticed about as soon."""
        gap, bound_s = now - self._last, stall_bound_s(self._slowest_s(now), 0.0)
        if gap > bound_s:
            gap = bound_s * _STALL_SHARE
        self._last = now
        while self._gaps and self._gaps[-1][1] <= gap:
            self._gaps.pop()
        self._gaps.append((now, gap))

    def note_look(self, num_steps: int, usage: float, now: float) -> bool:
        """Note how many steps the server has counted so far, and how much of its KV cache is in use.

        More than at the last look is a sign; return whether there was one. Blocks are freed without a step, too.
        """
        is_sign = num_steps != self._num_steps or usage > self._usage
        self._num_steps, self._usage = num_steps, usage
        if is_sign:
            self.note(now)
        return is_sign

    def reading(self, now: float, *, has_work: bool) -> StepReading:
        """Return the progress at this moment."""
        stalled_s = now - self._last if has_work else 0.0
        return StepReading(
            stalled_s=stalled_s,
            since_progress_s=stalled_s,
            slowest_step_s=self._slowest_s(now),
            restart_bound_s=float("inf"),  # a new agent would not help
        )

    def _slowest_s(self, now: float) -> float:
        while self._gaps and self._gaps[0][0] < now - _MEMORY_S:
            self._gaps.popleft()
        return max(_LEAST_GAP_S, self._gaps[0][1] if self._gaps else 0.0)
