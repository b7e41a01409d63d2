"""Whether a decode worker should compute a prompt itself instead of loading its KV from a prefill worker. Pure functions.

A prompt at a decode worker shares its steps with the requests that run there: each of them gets its next token later by the
prompt's own time, and one that begins meanwhile by what is left of it then. So a local prefill must find an empty queue and
keep the step within the inter-token latency that the operator allows. It must also be done before the prefill worker would
begin: what the prefill worker does not compute is not in its cache either, and the next prompt with this prefix pays for that.
A fixed number of tokens as the limit helps where prefill workers are the bottleneck and hurts where decode workers are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INTERFERENCE = 0.5  # of the own time: running requests slow a local prompt down, and it takes time from them
_MEMORY = 0.9  # the mean covers about the last ten steps
_LONGEST_STEP_MS = 1000.0  # a longer pause between two frames is no step


@dataclass(slots=True)
class StepTime:
    """The recent time of one decode worker's step, in ms, by its frames of tokens; 0 before it is known."""

    ms: float = 0.0
    _last_ms: float | None = None

    def observe(self, now_ms: float) -> None:
        """Record that the tokens of a step have arrived."""
        since = now_ms - self._last_ms if self._last_ms is not None else _LONGEST_STEP_MS
        self._last_ms = now_ms
        if since < _LONGEST_STEP_MS:
            self.ms = _MEMORY * self.ms + (1 - _MEMORY) * since if self.ms else since


@dataclass(frozen=True, slots=True)
class LocalPrompt:
    """A prompt at a decode worker: its predicted own time there, and what it would meet.

    ``next_ms`` is when the next request is predicted to begin there whose prompt is computed elsewhere; inf if there is none.
    """

    own_ms: float
    wait_ms: float
    step_ms: float
    num_running: int
    next_ms: float = math.inf

    @property
    def delay_ms(self) -> float:
        """By how much the prompt delays a token of a request that runs there, or that begins before the prompt is computed."""
        return self.own_ms if self.num_running else max(0.0, self.own_ms - self.next_ms)


def finish_ms(prompt: LocalPrompt) -> float:
    """Return the predicted time to the first token of a local prefill."""
    return prompt.wait_ms + prompt.own_ms + INTERFERENCE * prompt.delay_ms


def pays(prompt: LocalPrompt, remote_wait_ms: float, max_itl_ms: float) -> bool:
    """Return True if the prompt should be computed locally rather than, after ``remote_wait_ms``, by a prefill worker.

    The chunks of the decode worker are not known here: its whole prompt counts as one step, which is the most that it can add.
    """
    if prompt.wait_ms or (prompt.delay_ms and prompt.step_ms + prompt.delay_ms > max_itl_ms):
        return False
    return finish_ms(prompt) < remote_wait_ms
