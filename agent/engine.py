"""A vLLM server as the engine of a worker: one HTTP request per choice, and a watch over the server's health and progress.

Runs in the event loop of the process. The connection of a request that ends is closed, and so the server ends it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from agent.calls import ServerCalls
from agent.progress import ServerProgress
from agent.regeneration import KnownTokens, is_regenerated
from agent.releases import HandoffReleases
from agent.server_metrics import ServerLoad
from agent.vllm_protocol import CompletionResponse, generate_body, prompt_token_logprobs, token_logprobs
from agent.vllm_server import Health, VllmServer
from core.clock import Clock
from core.engine.step_watch import StepReading
from core.errors import EngineDead, KVFerryError
from core.ids import IdSource, new_hex_id
from core.log import event
from core.request import EngineCoreOutput, NewRequest, PrefillStats
from core.wire.engine_calls import PLUGIN_VALUE, EngineCall
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import ErrorInfo, FinishReason
from core.worker.parts import EngineEvents

logger = logging.getLogger(__name__)

NUM_LOOKS = 2  # at a server that seems to be gone
LOOK_INTERVAL_S = 0.1
LOOK_TIMEOUT_S = 1.0
ACCOUNT_TIMEOUT_S = 1.0  # for the last part of a stream, after its last tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """What this agent writes into handoffs. ``lease_s``: how long its server keeps blocks for a reader that does not renew."""

    engine_id: str
    incarnation: int
    model_fingerprint: bytes
    layout: KVLayoutInfo
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTerms:
    """How the server is watched; seconds. It is lost after ``patience_s`` without an answer that says it is healthy.

    If it is gone, it is lost at once, and also if its process began at another time than ``started_at``: what it serves may be
    another model. 0 if that is not known.
    """

    interval_s: float
    patience_s: float
    started_at: float = 0.0


class VllmEngine:
    """The requests that the server has of this agent. See ``core.worker.parts.EnginePort``."""

    def __init__(
        self, server: VllmServer, identity: AgentIdentity, events: EngineEvents, terms: WatchTerms, clock: Clock, ids: IdSource
    ) -> None:
        self._server = server
        self._identity = identity
        self._events = events
        self._terms = terms
        self._clock = clock
        self._ids = ids
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._progress = ServerProgress(clock.now())
        self._is_dead = False
        self._calls = ServerCalls(server, events.on_call_reply)
        self._releases = HandoffReleases(server)
        self._last_handoff: float | None = None  # of our plug-in
        self.load = ServerLoad()

    @property
    def num_requests(self) -> int:
        """How many choices the server has of this agent."""
        return len(self._requests)

    @property
    def may_hold_blocks(self) -> bool:
        """Whether it may hold blocks for readers though its metrics say nothing of them: without its stats, for one lease."""
        if self._last_handoff is None or self.load.handoffs is not None:
            return False
        return self._clock.now() - self._last_handoff < self._identity.lease_s

    @property
    def _num_working(self) -> int:
        """How many requests and calls wait for steps of the server's engine."""
        return len(self._requests) + self._calls.num_generating

    # ---- the port ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the server."""
        self._watch = self._loop.create_task(self._watch_to_the_end())

    def stop(self, timeout_s: float) -> bool:
        """End all requests at the server. Any thread but the event loop's."""
        ended = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        try:
            ended.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def is_alive(self) -> bool:
        """Return False once the server is lost."""
        return not self._is_dead

    def reading(self) -> StepReading:
        """Return whether the server makes progress with the requests of this agent."""
        return self._progress.reading(self._clock.now(), has_work=bool(self._num_working))

    def submit_add(self, requests: Sequence[NewRequest]) -> None:
        """Send requests to the server.

        Raises:
            EngineDead: it is lost.
        """
        if self._is_dead:
            raise EngineDead(f"the vLLM server {self._server.url} is lost")
        for request in requests:
            self._begin_work()
            task = self._loop.create_task(self._serve(request))
            self._requests[request.request_id] = task
            task.add_done_callback(partial(self._forget, request.request_id))

    def submit_abort(self, request_ids: Sequence[str]) -> None:
        """End requests at the server; those that have ended are ignored."""
        for request_id in request_ids:
            task = self._requests.pop(request_id, None)
            if task is not None:
                task.cancel()
            else:
                self._calls.abort(request_id)

    def submit_call(self, call: EngineCall) -> None:
        """Send a call of the API to the server.

        Raises:
            EngineDead: it is lost.
        """
        if self._is_dead:
            raise EngineDead(f"the vLLM server {self._server.url} is lost")
        self._begin_work()
        self._calls.submit(call)

    def _begin_work(self) -> None:
        """Forget a time without any work: it was no stall."""
        if not self._num_working:
            self._progress.begin(self._clock.now())

    def submit_release(self, transfer_ids: Sequence[str]) -> None:
        """Tell the server of handoffs that no engine will read."""
        if not self._is_dead:
            self._releases.release(transfer_ids)

    # ---- one request -------------------------------------------------------------------------------------------------

    async def _serve(self, request: NewRequest) -> None:
        try:
            is_first, is_again = True, is_regenerated(request)
            last: EngineCoreOutput | None = None
            known = KnownTokens(request.output_token_ids if is_again else ())
            body = generate_body(request, is_regenerated=is_again, max_logprobs=self._server.max_logprobs)
            async with self._server.generate(body, request.trace) as answers:
                async for answer in answers:
                    self._progress.note(self._clock.now())
                    output = self._output(request, answer, known, is_first=is_first)
                    is_first = False
                    if output is None:
                        continue
                    if output.finish_reason is not None:
                        last = output
                        last.late_cached_tokens = await _late_count(answer, answers)
                        break
                    self._events.on_outputs([output])
            if last is None:
                raise EngineDead(f"the vLLM server {self._server.url} ended an answer in its middle")
            self._events.on_outputs([last])
        except EngineDead as error:
            if not await self._is_lost():  # else its death answers all requests
                self._fail(request.request_id, ErrorInfo.of(error))
        except KVFerryError as error:
            self._fail(request.request_id, ErrorInfo.of(error))
        except Exception as bug:  # the boundary of a request: its router gets an answer
            logger.exception(event("agent_bug", request_id=request.request_id))
            self._fail(request.request_id, ErrorInfo(code="internal_error", message=f"the agent failed: {bug!r}"))

    def _output(
        self, request: NewRequest, answer: CompletionResponse, known: KnownTokens, *, is_first: bool
    ) -> EngineCoreOutput | None:
        """Return an answer as the output of a step; None if it says nothing new."""
        if not answer.choices:
            return None
        (choice,) = answer.choices
        if choice.finish_reason in ("abort", "error"):  # by a pause of the server: this agent aborts by leaving
            raise EngineDead(f"the vLLM server {self._server.url} has ended the request: {choice.finish_reason}")
        choice = known.strip(choice)
        output = EngineCoreOutput(
            request.request_id,
            list(choice.token_ids or ()),
            finish_reason=_finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
            logprobs=token_logprobs(choice, request.sampling.logprobs or 0),
        )
        output.prompt_logprobs = prompt_token_logprobs(answer, request)
        if request.needs_handoff:
            output.kv_handoff = self._handoff(request, answer)
        if is_first:
            num_cached = answer.num_cached_tokens or 0
            output.prefill_stats = PrefillStats(
                len(request.prompt_token_ids), num_local_cached_tokens=num_cached, num_external_cached_tokens=0
            )
        return output

    def _handoff(self, request: NewRequest, answer: CompletionResponse) -> KVHandoff | None:
        if not answer.kv_transfer_params:
            return None
        identity, transfer_id = self._identity, new_hex_id(self._ids, "vllm-")
        self._releases.keep(transfer_id, answer.kv_transfer_params)
        if PLUGIN_VALUE in answer.kv_transfer_params:
            self._last_handoff = self._clock.now()
        return KVHandoff(
            transfer_id=transfer_id,
            engine_id=identity.engine_id,
            incarnation=identity.incarnation,
            control_address="",
            model_fingerprint=identity.model_fingerprint,
            layout=identity.layout,
            groups=(),
            num_tokens=len(request.prompt_token_ids),
            lease_ms=int(1000 * identity.lease_s),
            engine_params=msgspec.json.encode(answer.kv_transfer_params),
        )

    def _fail(self, request_id: str, error: ErrorInfo) -> None:
        self._events.on_outputs([EngineCoreOutput(request_id, [], finish_reason="error", error=error)])

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._requests.get(request_id) is task:
            del self._requests[request_id]

    # ---- the server --------------------------------------------------------------------------------------------------

    async def _watch_to_the_end(self) -> None:
        try:
            await self._watch_server()
        except Exception as bug:  # else requests would wait for a server that nothing watches
            logger.exception(event("agent_bug"))
            self._die(f"cannot be watched: {bug!r}")

    async def _watch_server(self) -> None:
        """Ask for health and load again and again; report the death of the server."""
        last_answer = self._clock.now()
        while True:
            await asyncio.sleep(self._terms.interval_s)
            health = await self._look(self._terms.patience_s)
            if self._is_dead:
                return
            if health is Health.GONE and await self._is_lost():
                return
            if health is not Health.HEALTHY:
                if self._clock.now() - last_answer <= self._terms.patience_s:
                    continue
                if await self._look(LOOK_TIMEOUT_S) is not Health.HEALTHY:  # the last look may have been paused with this agent
                    self._die(f"has not answered for {self._terms.patience_s:g} s")
                    return
            last_answer = self._clock.now()

    async def _look(self, timeout_s: float) -> Health:
        """Ask for health, and if it is good for the load: a server that does not tell it is silent."""
        health = await self._server.health(timeout_s)
        if health is Health.HEALTHY:
            try:
                self.load = await self._server.load(timeout_s)
            except EngineDead:
                return Health.SILENT
            if self._is_another():
                self._die("was started again, and may serve something else")
            if not self._progress.note_look(self.load.num_steps, self.load.total_usage, self._clock.now()):
                self._probe_if_it_may_be_well()
        return health

    def _is_another(self) -> bool:
        """Return whether it is another process than the one that was asked what it serves, as after a pause of this agent."""
        known = (self._terms.started_at, self.load.started_at)
        return all(known) and known[0] != known[1]

    def _probe_if_it_may_be_well(self) -> None:
        """Let the server make a step of its own, which shows whether its engine works.

        It makes none while all of our requests wait for blocks of handoffs, nor while its front end reads the images of calls.
        Without its stats its steps are not seen: then answers are the only signs.
        """
        if self.load.has_stats:
            may_be_well = bool(self._num_working) and len(self._requests) <= self.load.num_loading
        else:
            may_be_well = self.reading().stalled_s >= self._terms.interval_s
        if may_be_well and (self._probe is None or self._probe.done()):
            self._probe = self._loop.create_task(self._make_a_step())

    async def _make_a_step(self) -> None:
        with contextlib.suppress(KVFerryError):
            await self._server.compute(num_prompt_tokens=1, num_tokens=1)
            self._progress.begin(self._clock.now())

    async def _is_lost(self) -> bool:
        """Return whether the server is gone, by two looks, and report its death if so."""
        for _ in range(NUM_LOOKS):
            if not self._is_dead and await self._server.health(LOOK_TIMEOUT_S) is not Health.GONE:
                return False
            await asyncio.sleep(LOOK_INTERVAL_S)
        self._die("is gone: nothing listens at its port, or its engine is dead")
        return True

    def _die(self, why: str) -> None:
        """Report the server's death, once."""
        if self._is_dead:
            return
        self._is_dead = True
        error = EngineDead(f"the vLLM server {self._server.url} {why}")
        for task in self._requests.values():
            task.cancel()
        self._calls.cancel_all()
        self._events.on_death(error)

    async def _end_all(self) -> None:
        own = [task for task in (self._watch, self._probe) if task is not None]
        tasks = [*self._requests.values(), *self._calls.cancel_all(), *self._releases.cancel_all(), *own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _late_count(last: CompletionResponse, answers: AsyncIterator[CompletionResponse]) -> int | None:
    """Return how many tokens of the prompt the server did not compute; None if it does not say so.

    A stream says it in an answer of its own after the last tokens, which must not be lost or wait for it.
    """
    if last.usage is not None:
        return last.num_cached_tokens
    with contextlib.suppress(KVFerryError, TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(ACCOUNT_TIMEOUT_S):
            return (await anext(answers)).num_cached_tokens
    return None


def _finish_reason(reason: str | None) -> FinishReason | None:
    match reason:
        case None | "stop" | "length":
            return reason
        case _:
            return "stop"  # a reason of its own, such as repetition: the text is over
