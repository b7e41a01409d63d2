"""The model of one worker: chunked prefill and a batch of decoding requests, step by step in simulated time.

One class serves all roles, as one engine does: a prefill worker has no running requests, and a decode worker has only prompts
that arrive with their KV. A step computes one token of each running request and, if prompts wait, a chunk of the first one.
Runs of steps without a chunk are computed at once: with ``n`` requests the contexts grow by ``n`` tokens a step, so ``k`` steps
take ``k * first + kv_token_ms * n * k * (k - 1) / 2``. Times are ms.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.advise.costs import Costs
from kvferry.advise.trace import BLOCK_TOKENS, TraceRequest

_NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Job:
    """A request in the cluster. ``decode`` takes it over after its prompt; None = the worker of the prompt goes on."""

    request: TraceRequest
    arrival_ms: float
    decode: Worker | None = None
    first_ms: float = _NEVER
    decode_ms: float = _NEVER  # when it joined the running batch
    end_ms: float = _NEVER
    num_slow: int = 0  # gaps between tokens beyond the limit
    num_new: int = 0  # prompt tokens to compute, from its beginning
    num_left: int = 0  # of these
    due_ms: float = 0.0  # predicted time of the prompt, as the router counts it

    @property
    def num_total(self) -> int:
        """Prompt and answer, in tokens."""
        return self.request.num_tokens + self.request.num_output_tokens

    @property
    def mean_gap_ms(self) -> float:
        """The mean time of a token after the first one, from when the request has joined a batch; 0 if there is only one."""
        num_gaps = self.request.num_output_tokens - 1
        return (self.end_ms - self.decode_ms) / num_gaps if num_gaps > 0 else 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. ``chunk`` bounds the prompt tokens of a step. ``slow_ms`` is the limit of a gap between two tokens."""

    costs: Costs
    chunk: int
    slow_ms: float = _NEVER
    clock: float = 0.0
    queue: deque[Job] = field(default_factory=deque)
    current: Job | None = None
    _work_ms: float = 0.0  # predicted time of the prompts here that are not computed
    _expected: Counter[int] = field(default_factory=Counter)  # blocks of these prompts
    gaps: list[tuple[float, int]] = field(default_factory=list)  # (ms, how many)
    _arriving: list[tuple[float, int, Job]] = field(default_factory=list)
    _running: list[tuple[int, int, Job, int]] = field(default_factory=list)  # (last step, number, job, slow steps before)
    _cached: dict[int, None] = field(default_factory=dict)  # least recently used first
    _held_tokens: int = 0  # reserved: prompts and answers
    _answer_tokens: int = 0
    _kv_tokens: int = 0  # contexts of the running requests
    _num_steps: int = 0
    _num_slow_steps: int = 0
    _num_seen: int = 0

    @property
    def num_running(self) -> int:
        """The number of requests that decode here."""
        return len(self._running)

    def wait_ms(self, now: float) -> float:
        """Return the predicted time until a new prompt would begin."""
        done_ms = 0.0
        if self.current is not None:
            done_ms = self.current.due_ms * (1 - self.current.num_left / self.current.num_new)
        return max(0.0, self._work_ms - done_ms) + max(0.0, self.clock - now)

    def promised_tokens(self, blocks: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt will be cached once all prompts here are computed."""
        for depth, block in enumerate(blocks):
            if block not in self._cached and self._expected[block] <= 0:
                return depth * BLOCK_TOKENS
        return len(blocks) * BLOCK_TOKENS

    def hit_tokens(self, blocks: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt are cached."""
        cached = self._cached
        for depth, block in enumerate(blocks):
            if block not in cached:
                return depth * BLOCK_TOKENS
        return len(blocks) * BLOCK_TOKENS

    def prompt_ms(self, num_new: int, num_hit: int) -> float:
        """Return the predicted time of a prompt here, the decode part of its steps included."""
        num_steps = math.ceil(num_new / self.chunk)
        shared_ms = self.costs.step_ms(len(self._running), self._kv_tokens) if self._running else 0.0
        own_ms = max(0.0, shared_ms - self.costs.prefill.base_ms) * num_steps
        return self.costs.prefill_time.ms(num_new, num_hit) + own_ms + (num_steps - 1) * self.costs.prefill.base_ms

    def submit(self, job: Job, due_ms: float) -> None:
        """Queue a prompt whose computation is predicted to take this time."""
        job.due_ms = due_ms
        self._work_ms += due_ms
        self._expected.update(job.request.blocks)
        self.queue.append(job)

    def hand_over(self, job: Job, ready_ms: float) -> None:
        """Take a request whose prompt is computed, with its KV at that time."""
        self._num_seen += 1
        heapq.heappush(self._arriving, (ready_ms, self._num_seen, job))

    def advance(self, until: float) -> None:
        """Run until this time, or to the end of all work if it is infinite. The last step may end later."""
        while self.clock < until:
            self._join_arrivals()
            if self.current is None and self.queue and self._fits(self.queue[0]):
                self._begin(self.queue.popleft())
            if self.current is not None:
                self._mixed_step(self.current)
            elif self._running:
                self._decode_steps(until)
            else:
                ready = self._arriving[0][0] if self._arriving else _NEVER
                self.clock = max(self.clock, min(until, ready))

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _join_arrivals(self) -> None:
        while self._arriving and self._arriving[0][0] <= self.clock and self._fits(self._arriving[0][2]):
            _, _, job = heapq.heappop(self._arriving)
            self._reserve(job)
            self._store(job.request.blocks)
            self._run(job)

    def _begin(self, job: Job) -> None:
        self._reserve(job)
        hit = self.hit_tokens(job.request.blocks)
        self._touch(job.request.blocks)
        job.num_left = job.num_new = job.request.num_tokens - hit
        self.current = job

    def _mixed_step(self, job: Job) -> None:
        taken = min(self.chunk, job.num_left)
        num_running = len(self._running)
        base_ms = self.costs.step_ms(num_running, self._kv_tokens) if num_running else 0.0
        step_ms = max(base_ms, self.costs.prefill.base_ms) + self.costs.chunk_ms(taken, job.request.num_tokens - job.num_left)
        job.num_left -= taken
        self._pass(1, step_ms, step_ms)
        if job.num_left:
            return
        self.current = None
        self._work_ms = max(0.0, self._work_ms - job.due_ms)
        self._expected.subtract(job.request.blocks)
        self._store(job.request.blocks)
        job.first_ms = self.clock
        if job.decode is not None and job.request.num_output_tokens > 1:
            self._free(job)
            missing = job.request.num_tokens - job.decode.hit_tokens(job.request.blocks)
            job.decode.hand_over(job, self.clock + self.costs.handoff_ms(missing))
        elif job.request.num_output_tokens == 1:
            self._free(job)
            job.decode_ms = job.end_ms = self.clock
        else:
            self._run(job)

    def _decode_steps(self, until: float) -> None:
        """Run whole steps until a request ends, one arrives, or the time is over."""
        num_running = len(self._running)
        first_ms = self.costs.step_ms(num_running, self._kv_tokens)
        growth_ms = self.costs.step.kv_token_ms * num_running
        num_steps = self._running[0][0] - self._num_steps
        is_waited_for = self._arriving and self._arriving[0][0] > self.clock
        left_ms = min(until, self._arriving[0][0] if is_waited_for else _NEVER) - self.clock
        if left_ms < num_steps * first_ms + growth_ms * num_steps * (num_steps - 1) / 2:
            linear = first_ms - growth_ms / 2
            root = math.sqrt(linear * linear + 2 * growth_ms * left_ms)
            num_steps = min(num_steps, max(1, math.ceil(2 * left_ms / (linear + root))))
        total_ms = num_steps * first_ms + growth_ms * num_steps * (num_steps - 1) / 2
        self._pass(num_steps, total_ms, total_ms / num_steps)

    def _pass(self, num_steps: int, total_ms: float, step_ms: float) -> None:
        """Let steps pass: every running request gets a token in each."""
        num_running = len(self._running)
        self.clock += total_ms
        if not num_running:
            return
        self._num_steps += num_steps
        self._kv_tokens += num_running * num_steps
        self.gaps.append((step_ms, num_running * num_steps))
        if step_ms > self.slow_ms:
            self._num_slow_steps += num_steps
        while self._running and self._running[0][0] <= self._num_steps:
            _, _, job, num_slow_before = heapq.heappop(self._running)
            job.end_ms = self.clock
            job.num_slow += self._num_slow_steps - num_slow_before
            self._kv_tokens -= job.num_total - 1
            self._free(job)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _fits(self, job: Job) -> bool:
        has_seat = len(self._running) < self.costs.max_num_seqs
        return not self._held_tokens or (has_seat and self._held_tokens + job.num_total <= self.costs.kv_tokens)

    def _reserve(self, job: Job) -> None:
        self._held_tokens += job.num_total
        self._answer_tokens += job.request.num_output_tokens

    def _free(self, job: Job) -> None:
        self._held_tokens -= job.num_total
        self._answer_tokens -= job.request.num_output_tokens

    def _run(self, job: Job) -> None:
        self._num_seen += 1
        job.decode_ms = self.clock
        last = self._num_steps + job.request.num_output_tokens - 1
        heapq.heappush(self._running, (last, self._num_seen, job, self._num_slow_steps))
        self._kv_tokens += job.request.num_tokens

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._cached:
                del self._cached[block]
                self._cached[block] = None

    def _store(self, blocks: Sequence[int]) -> None:
        """Cache the blocks of a prompt; the least recently used go, the ends of prompts before their beginnings."""
        cached = self._cached
        capacity = (max(0, self.costs.kv_tokens - self._answer_tokens) + self.costs.tier_tokens) // BLOCK_TOKENS
        for block in reversed(blocks[:capacity]):
            cached.pop(block, None)
            cached[block] = None
        while len(cached) > capacity:
            del cached[next(iter(cached))]
