"""Answers that take time: whole or as a stream of events, aborted when the client disconnects.

Owns the loop from a generation's updates to bytes, and the watch on the client's connection, which lasts from before the first
byte until the last. A stream has one event for each update that adds text. While the client keeps up, an update that ends
nothing is written as it comes (``HttpAnswer.take``); the task of the stream wakes up for everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from core.errors import Cancelled, KVFerryError
from core.log import event
from core.wire.messages import ErrorInfo
from router.dispatch.types import Update
from router.dispatch.worker_gateway import Generation
from router.http import sse
from router.http.caller import Caller, unless_left, wait_for_leave
from router.http.direct_write import DirectWriter, writer_of
from router.http.errors import BUG, RequestFailure, error_body
from router.http.event_encoder import EventEncoder
from router.http.middleware import plain_send
from router.metrics import RouterMetrics
from router.openai.postprocess import Delta, RequestOutput
from router.openai.responses import ChatShaper, CompletionShaper
from router.openai.text_pool import TextPool
from router.responses_api.shaper import ResponsesShaper

logger = logging.getLogger(__name__)

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_HEADERS = [(b"content-type", sse.MEDIA_TYPE.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class HttpAnswer:
    """One HTTP answer in progress. Its owner must call ``close``."""

    def __init__(
        self,
        generation: Generation,
        output: RequestOutput,
        shaper: CompletionShaper | ChatShaper | ResponsesShaper,
        caller: Caller,
        pool: TextPool,
    ) -> None:
        self._generation = generation
        self._output = output
        self._shaper = shaper
        self._encoder = EventEncoder(shaper, output)
        self._pool = pool
        self._failure: ErrorInfo | None = None
        self._bug: Exception | None = None
        self._writer: DirectWriter | None = None
        self._watch = asyncio.create_task(_abort_when_gone(caller.receive, generation))
        self._hold = caller.hold

    async def whole(self) -> ASGIResponse:
        """Wait for the whole output and return the response.

        Raises:
            RequestFailure: the request failed, the client left, or there is no memory for its log-probabilities.
        """
        while not self._output.is_finished:
            self._hold(self._shaper.gather(await self._deltas()))
        body = await self._shaped(lambda: _encoder.encode(self._shaper.whole()))
        return ASGIResponse(body=body, media_type="application/json")

    async def first(self) -> bytes:
        """Wait for the first events and return them, none if the answer has none. An error before them has its own status.

        Raises:
            RequestFailure: the request failed, or the client left.
        """
        events = b""
        while not events and not self.is_finished:
            events = await self.next()
        return events

    async def next(self) -> bytes:
        """Wait for updates that this task has to send and return their events, possibly none.

        Raises:
            RequestFailure: the request failed, or the client left.
        """
        if self._shaper.is_heavy:
            deltas = await self._deltas()
            return await self._shaped(lambda: self._events(deltas))
        events = []
        for update in await self._updates():
            if self._failure is None:
                events.append(self._events(self._apply([update])))
        if self._failure is not None and not any(events):
            raise RequestFailure(self._failure)
        return b"".join(events)

    def write_to(self, writer: DirectWriter | None) -> None:
        """Let updates be written directly from now on."""
        self._writer = None if self._shaper.is_heavy or self._output.has_stops else writer

    def _events(self, deltas: Sequence[Delta]) -> bytes:
        return self._encoder.encode(deltas)

    async def _shaped(self, shape: Callable[[], bytes]) -> bytes:
        """Return the result of ``shape``; many log-probabilities are encoded on a thread, unless the client has left."""
        return await self._unless_left(self._pool.run(shape)) if self._shaper.is_heavy else shape()

    async def _unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which ends when the client leaves: the generation may have ended before.

        Raises:
            RequestFailure: the client has left, or ``work`` is refused, as when no thread can be started.
        """
        try:
            return await unless_left(self._watch, work)
        except KVFerryError as error:
            raise RequestFailure(ErrorInfo.of(error)) from None

    def last(self) -> bytes:
        """Return the events that end a stream."""
        return b"".join([sse.event(chunk) for chunk in self._shaper.last_chunks()]) + sse.DONE

    def failed(self, info: ErrorInfo) -> bytes:
        """Return the error as an event. The stream then ends without ``[DONE]``, so that it does not look complete."""
        return sse.event(error_body(info))

    @property
    def is_finished(self) -> bool:
        """True once every choice has ended."""
        return self._output.is_finished

    def close(self) -> None:
        """Stop watching the connection, and abort what is still running."""
        self._watch.cancel()
        self._generation.abort("the answer was given up")

    async def _deltas(self) -> list[Delta]:
        """Wait for updates. Output before a failure is returned first; the next call raises the failure."""
        deltas = self._apply(await self._updates())
        if self._failure is not None and not deltas:
            raise RequestFailure(self._failure)
        return deltas

    async def _updates(self) -> list[tuple[int, Update]]:
        if self._failure is not None:
            raise RequestFailure(self._failure)
        updates = await self._generation.updates(self if self._writer is not None else None)
        if self._bug is not None:
            raise self._bug
        return updates

    def _apply(self, updates: Sequence[tuple[int, Update]]) -> list[Delta]:
        deltas, stopped, self._failure = self._output.apply(updates)
        for index in stopped:
            self._generation.finish_choice(*self._output.locate(index))
        return deltas

    def take(self, prompt_index: int, update: Update) -> bool:
        """Write the events of an update; return False if this is for the task. An error ends this answer alone."""
        writer = self._writer
        if writer is None or update.ends_something or not writer.is_open or self._bug is not None:
            return False
        try:
            events = self._events(self._apply([(prompt_index, update)]))
        except Exception as bug:
            self._bug = bug
            return False
        if events:
            writer.write(events)
        return True

    def take_tokens(self, prompt_index: int, token_ids: Sequence[int]) -> bool:
        """Write the event of tokens if it differs from the choice's last one in nothing but text; else return False."""
        writer, index = self._writer, prompt_index  # the prompt's only choice
        if writer is None or not writer.is_open or not self._encoder.is_plain(index):
            return False
        try:
            text = self._output.push_plain(index, token_ids)
            new = self._encoder.encode_text(index, text) if text else b""
        except Exception as bug:
            self._bug = bug
            return False
        if new:
            writer.write(new)
        return True


class EventStream:
    """ASGI application that sends an answer as server-sent events, beginning with ``first``."""

    def __init__(self, answer: HttpAnswer, first_events: bytes, metrics: RouterMetrics) -> None:
        self._answer = answer
        self._first_events = first_events
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end, an error, or a disconnect."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            send = plain_send(scope, send)
            self._answer.write_to(writer_of(scope))
            events = self._first_events
            while not self._answer.is_finished:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                events = await self._answer.next()
            events += self._answer.last()
        except RequestFailure as failure:
            events = self._failed(failure.info)
        except Exception as bug:
            logger.error(event("internal_error", path=scope["path"]), exc_info=bug)
            events = self._failed(BUG)
        finally:
            self._answer.close()
        await send({"type": "http.response.body", "body": events, "more_body": False})

    def _failed(self, info: ErrorInfo) -> bytes:
        self._metrics.count_failed(info.code)
        return b"" if info.code == Cancelled.code else self._answer.failed(info)


async def _abort_when_gone(receive: Receive, generation: Generation) -> None:
    await wait_for_leave(receive)
    generation.abort("client disconnected")
