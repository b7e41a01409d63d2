"""The engine: scheduler and runner, stepped by one thread.

Owns the turn of the loop and the check of what comes in. Knows no threads, sockets or roles: ``core.engine.thread`` calls it in
a worker, tests and benchmarks call it directly.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

from core.engine.step_watch import StepSize
from core.errors import InvalidRequest, KVFerryError
from core.grammar.compiler import GrammarCompiler
from core.kv.events import KVEventFollower
from core.kv.hashing import BlockHasher
from core.request import EngineCoreOutput, ModelRunnerOutput, NewRequest, Request, RequestStatus, SchedulerOutput
from core.sched.scheduler import Scheduler
from core.sched.stats import EngineStats
from core.token_ids import pack_token_ids
from core.wire.messages import ErrorInfo
from core.wire.sampling import FORM_FIELD, IGNORES_END, check_tokens_left


class Engine(Protocol):
    """The engine of a worker: an ``EngineCore`` or an encode worker's. One thread only, except for ``stats``."""

    @property
    def stats(self) -> EngineStats:
        """The reading after the last step; an immutable object, so another thread may take it."""
        ...

    @property
    def step_size(self) -> StepSize:
        """Size of the current step: first of the launched one, then of the one whose result is awaited. Any thread."""
        ...

    def add_request(self, new: NewRequest) -> None:
        """Queue a request. Raises RequestError if it can never be served here; nothing is kept."""
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Stop requests; return the ids of those that had not ended. They get no more output."""
        ...

    def step(self) -> list[EngineCoreOutput]:
        """Do one step and return the outputs of requests with new tokens or an end."""
        ...

    def wake(self) -> None:
        """Request one more step, because something outside has changed."""
        ...

    def has_work(self) -> bool:
        """True if a step could achieve anything now."""
        ...

    def shutdown(self) -> None:
        """Stop what belongs to the engine. Idempotent."""
        ...


class Runner(Protocol):
    """What computes a step: ``core.engine.runner.ModelRunner``, or ``core.testing.hash_model.HashModel``."""

    @property
    def failure(self) -> Exception | None:
        """Why the next step will raise, None if it will not."""

    def launch_model(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Begin one step; return what waits for its result. One more step may be launched in between."""

    def shutdown(self) -> None:
        """Stop what belongs to the runner."""


class EngineCore:
    """Everything between a new request and its tokens. One thread only.

    ``kv_events`` get the changes of the prefix cache after each step; ``grammars`` compiles those of structured outputs,
    which are refused without it. All are closed with the engine.
    Raises: ValueError if ``hasher`` hashes blocks of another size than the KV cache looks up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        hasher: BlockHasher,
        vocab_size: int,
        kv_events: Sequence[KVEventFollower] = (),
        *,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        hash_block_size = scheduler.kv_cache_manager.hash_block_size
        if hasher.hash_block_size != hash_block_size:
            raise ValueError(f"hashes of {hasher.hash_block_size} tokens, but the KV cache looks up {hash_block_size}")
        self.scheduler = scheduler
        self.runner = runner
        self._hasher = hasher
        self._vocab_size = vocab_size
        self._kv_events = tuple(kv_events)
        self._grammars = grammars
        self._grammar_failures: list[EngineCoreOutput] = []
        self._in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()
        self._is_stalled = False
        self._is_woken = False
        self._is_shut_down = False
        self._stats = EngineStats()
        self._step_size = StepSize()

    def add_request(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served here; nothing is kept.
        """
        if new.is_early:  # it never runs
            self.scheduler.pull_early(new, self._hasher)
            self._is_stalled = False
            return
        try:
            self._add(new)
        except Exception:
            if new.early_pull:  # its role has forgotten it: only this ends it
                self.abort_requests((new.early_pull,))
            raise
        self._is_stalled = False

    def _add(self, new: NewRequest) -> None:
        prompt = self._packed_prompt(new)
        self._check_token_ids(new)
        _check_can_sample(new, self._vocab_size)
        self.scheduler.check_length(len(new.prompt_token_ids) + len(new.output_token_ids))  # before so many are hashed
        request = Request(new, self._hasher, prompt)
        self._find_grammar(request)
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Stop requests in any state; return the ids of those that had not ended. They get no more output."""
        self._is_stalled = False
        aborted = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        if self._grammars is not None:
            self._grammars.abandon(aborted)
        return aborted

    def step(self) -> list[EngineCoreOutput]:
        """Schedule and launch one step, and process the finished one; return the outputs of requests with new tokens or an end.

        With ``async_scheduling`` one step stays in flight while its successor is scheduled and launched: the host works
        while the device does. A step without tokens takes no device time, so it is processed at once.
        """
        self.launch_step(self.schedule_step())
        return self.finish_launched_steps()

    def schedule_step(self) -> SchedulerOutput:
        """Decide what the next step computes.

        ``launch_step`` and ``finish_launched_steps`` follow, with nothing else in between.
        """
        self._is_woken = self._is_stalled = False
        if self._grammars is not None:
            self._take_grammars(self._grammars)
        step = self.scheduler.schedule()
        self._step_size = _size_of(step)
        return step

    def launch_step(self, step: SchedulerOutput) -> None:
        """Begin to compute it."""
        self._in_flight.append((step, self.runner.launch_model(step)))

    def keeps_newest_step(self) -> bool:
        """True if the step that was launched last stays in flight while its successor is scheduled and launched."""
        newest, _ = self._in_flight[-1]
        return newest.total_num_scheduled_tokens > 0 and self.scheduler.can_schedule_ahead()

    def finish_launched_steps(self) -> list[EngineCoreOutput]:
        """Process the launched steps that need no wait; return the outputs of requests with new tokens or an end."""
        is_alone = len(self._in_flight) == 1
        num_kept = 1 if self.keeps_newest_step() else 0
        outputs, self._grammar_failures = self._grammar_failures, []
        sizes: list[StepSize] = []
        while len(self._in_flight) > num_kept:
            oldest, result = self._in_flight.popleft()
            self._step_size = _size_of(oldest)
            sizes.append(self._step_size)
            outputs += self._finish(oldest, result())
        self._step_size = sizes[0] if sizes else StepSize()  # of the step that took the time; a second one is empty
        if not is_alone:  # it was decided before the end of its predecessor was known, which may change everything
            self._is_stalled = False
        return outputs

    def _finish(self, step: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Process the results; return the outputs of requests with new tokens or an end."""
        outputs = self.scheduler.update_from_output(step, runner_output)
        if self._grammars is not None:
            self._renew_grammars(self._grammars)
        self._is_stalled = not outputs and _nothing_happened(step, runner_output) and not self._has_got_blocks(step)
        self._stats = self.scheduler.make_stats()
        events = self.scheduler.take_events()
        for follower in self._kv_events:
            follower.publish(events)
        return outputs

    def wake(self) -> None:
        """Request one more step, even without requests, because a connector has something to report.

        The report may concern no request: a connector that has died raises its error in the next step.
        """
        self._is_woken = True

    def has_work(self) -> bool:
        """True if a step could achieve anything now.

        False while every request waits for a connector and the last step changed nothing, and without requests: only a new one,
        an abort or ``wake`` can change that, so the caller should block instead of stepping.
        """
        if self._grammars is not None and self._grammars.has_compiled():
            return True
        if self._in_flight or self._is_woken or self.runner.failure is not None or self.scheduler.has_pending_push_work():
            return True
        return self.scheduler.has_requests() and not self._is_stalled

    def has_requests(self) -> bool:
        """True if requests are unfinished, or blocks of finished ones not free yet."""
        return self.scheduler.has_requests()

    @property
    def stats(self) -> EngineStats:
        """The reading after the last step; an immutable object, so another thread may take it."""
        return self._stats

    @property
    def step_size(self) -> StepSize:
        """Size of the current step: first of the launched one, then of the one whose result is awaited. Any thread."""
        return self._step_size

    def shutdown(self) -> None:
        """Stop both sides of the connectors, the KV events and the grammars, also if one fails. Idempotent.

        Raises: the error of a part that fails, once all are stopped.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        with ExitStack() as stack:  # the last one first
            if self._grammars is not None:
                stack.callback(self._grammars.close)
            for follower in reversed(self._kv_events):
                stack.callback(follower.close)
            stack.callback(self.runner.shutdown)
            for connector in (self.scheduler.ec_connector, self.scheduler.connector):
                if connector is not None:
                    stack.callback(connector.shutdown)

    def _find_grammar(self, request: Request) -> None:
        """Give a request its compiled grammar, or have it compiled: the request then waits in the scheduler."""
        output = request.sampling.structured_output
        if output is None:
            return
        if self._grammars is None:
            raise InvalidRequest("structured output is not available on this worker", param=FORM_FIELD)
        if request.sampling.ignore_eos:
            raise InvalidRequest(IGNORES_END, param="ignore_eos")
        request.grammar = self._grammars.get(output)
        if request.grammar is None:
            self._grammars.request(output)

    def _take_grammars(self, grammars: GrammarCompiler) -> None:
        for done in grammars.take_compiled():
            if isinstance(done.result, KVFerryError):
                self._grammar_failures += self.scheduler.fail_grammar(done.output, ErrorInfo.of(done.result), done.owner)
            else:
                self.scheduler.take_grammar(done.output, done.result, done.owner)

    def _renew_grammars(self, grammars: GrammarCompiler) -> None:
        for output, owner in self.scheduler.take_lost_grammars():
            found = None if owner else grammars.get(output)
            if found is None:
                grammars.renew(output, owner)
            else:
                self.scheduler.take_grammar(output, found)

    def _has_got_blocks(self, step: SchedulerOutput) -> bool:
        """True if blocks became free within a step, after the decision that lacked them: nothing else would wake the engine."""
        connector = self.scheduler.connector
        return step.awaits_blocks and connector is not None and not connector.has_pending_block_frees()

    def _packed_prompt(self, new: NewRequest) -> array[int]:
        """Return the tokens of the prompt; refuse those that the model does not have, as below."""
        try:
            return pack_token_ids(new.prompt_token_ids, self._vocab_size)
        except ValueError:
            raise self._no_such_token("prompt") from None

    def _check_token_ids(self, new: NewRequest) -> None:
        """Refuse tokens that the model does not have: inside a batch they would end everybody's step."""
        for param, token_ids in (
            ("output_token_ids", new.output_token_ids),
            ("allowed_token_ids", new.sampling.allowed_token_ids),
            ("logit_bias", new.sampling.logit_bias),
            ("stop_token_ids", new.stop_token_ids),
        ):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
                raise self._no_such_token(param)

    def _no_such_token(self, param: str) -> InvalidRequest:
        return InvalidRequest(f"{param} holds a token id outside 0 to {self._vocab_size - 1}", param=param)


def _size_of(output: SchedulerOutput) -> StepSize:
    return StepSize(
        num_tokens=output.total_num_scheduled_tokens,
        num_requests=len(output.num_scheduled_tokens),
        num_images=sum(map(len, output.scheduled_encoder_inputs.values())),
    )


def _check_can_sample(new: NewRequest, vocab_size: int) -> None:
    """Refuse a request that has no token for its next position: all that it allows would end it too early."""
    if len(new.output_token_ids) < new.sampling.min_tokens:
        check_tokens_left(new.sampling, new.stop_token_ids, vocab_size)


def _nothing_happened(scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> bool:
    """True if the next step would be the same, until something comes from outside."""
    return not (
        scheduler_output.total_num_scheduled_tokens
        or scheduler_output.finished_req_ids
        or scheduler_output.preempted_req_ids
        or scheduler_output.has_dropped_images
        or runner_output.kv_connector_output is not None
        or runner_output.ec_connector_output is not None
    )
