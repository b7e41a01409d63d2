"""Calls of engines' own APIs for the HTTP side: an answer as a status and a stream of bytes.

Owns the parts of answers that no reader has taken yet. All methods belong to the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from core.clock import Clock
from core.errors import NoWorker
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.limits import MAX_MILLISECONDS
from core.wire.messages import ErrorInfo
from router.dispatch.core import Action, RouterCore
from router.dispatch.engine_calls import Answered
from router.dispatch.members import GenerationWorker, WorkerKey

SHUTS_DOWN = "the router shuts down: try again"


class CallFailed(Exception):
    """A call that its worker did not answer, or not to its end."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def deadline_ms(timeout_s: float) -> int:
    """Return the deadline of a call that may take this long, as far as the wire can say it: 0 would mean none."""
    return max(1, round(min(timeout_s * 1e3, MAX_MILLISECONDS)))


class EngineAnswer:
    """What an engine answers to a call: status and type, then the body in parts as they come."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[EngineReply | ErrorInfo] = asyncio.Queue()
        self._first: EngineReply | None = None
        self.status = 0
        self.content_type = ""

    def put(self, reply: EngineReply | ErrorInfo) -> None:
        """Add a part."""
        self._parts.put_nowait(reply)

    async def open(self) -> None:
        """Wait for the first part. Raises CallFailed."""
        self._first = await self._next()
        self.status, self.content_type = self._first.status, self._first.content_type

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises CallFailed."""
        part = self._first
        while part is not None:
            if part.body:
                yield part.body
            part = None if part.is_last else await self._next()

    async def whole(self) -> bytes:
        """Return the body. Raises CallFailed."""
        return b"".join([piece async for piece in self.pieces()])

    async def _next(self) -> EngineReply:
        part = await self._parts.get()
        if isinstance(part, ErrorInfo):
            raise CallFailed(part)
        return part


class EngineApi:
    """Calls of the engines of a router's workers.

    ``perform`` carries out what the core answers; ``wait_for_change`` ends when the router may know more of its workers.
    """

    def __init__(
        self,
        core: RouterCore,
        clock: Clock,
        perform: Callable[[Sequence[Action]], None],
        wait_for_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._core = core
        self._clock = clock
        self._perform = perform
        self.wait_for_change = wait_for_change
        self._answers: dict[str, EngineAnswer] = {}
        self.is_closed = False

    @property
    def is_there(self) -> bool:
        """True if there are workers, and the engines of all have an API."""
        workers = list(self._core.membership.workers)
        return bool(workers) and all(worker.facts.takes_calls for worker in workers)

    @property
    def splits_output(self) -> bool:
        """True if an engine separates reasoning from the text of every chat."""
        return any(worker.facts.splits_output for worker in self._core.membership.workers)

    @property
    def is_settling(self) -> bool:
        """True if the router was just paused, so that workers may reconnect soon."""
        return not self.is_closed and self._core.is_settling(self._clock.now())

    def now(self) -> float:
        """Return the time by the router's clock, in seconds."""
        return self._clock.now()

    def choose(self, avoid: frozenset[WorkerKey] = frozenset(), model_fingerprint: bytes = b"") -> GenerationWorker:
        """Return the least loaded worker with an API, one of ``avoid`` only as the last resort.

        Raises:
            NoWorker: there is none.
        """
        workers = [
            worker
            for worker in self._core.membership.workers
            if worker.facts.takes_calls and not worker.is_closed and model_fingerprint in (b"", worker.facts.model_fingerprint)
        ]
        if not workers:
            raise NoWorker("no worker whose engine has an API takes requests")
        return min(workers, key=lambda worker: (worker.key in avoid, worker.load, worker.last_picked))

    @asynccontextmanager
    async def call(self, worker: GenerationWorker, call: EngineCall) -> AsyncIterator[EngineAnswer]:
        """Have a worker's engine called; yield its answer after the first part. Leaving the context ends the call.

        Raises:
            CallFailed: the worker was lost, or does not answer in time, or the router ends.
        """
        if self.is_closed:
            raise CallFailed(ErrorInfo.of(NoWorker(SHUTS_DOWN)))
        request_id = call.request_id
        answer = self._answers[request_id] = EngineAnswer()
        try:
            self._perform(self._core.begin_call(call, worker, self._clock.now()))
            await answer.open()
            yield answer
        finally:
            del self._answers[request_id]
            self._perform(self._core.abort_call(request_id, self._clock.now()))

    def send(self, worker: GenerationWorker, call: EngineCall) -> None:
        """Have a worker's engine called, whatever it answers: nobody waits for that."""
        if not self.is_closed:
            self._perform(self._core.begin_call(call, worker, self._clock.now()))

    def put(self, answered: Answered) -> None:
        """Pass a part on to its reader."""
        answer = self._answers.get(answered.request_id)
        if answer is not None:
            answer.put(answered.reply)

    def close(self) -> None:
        """Fail all calls, and those to come: the router ends."""
        self.is_closed = True
        gone = ErrorInfo.of(NoWorker(SHUTS_DOWN))
        for answer in self._answers.values():
            answer.put(gone)
