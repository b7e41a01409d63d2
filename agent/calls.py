"""Calls of the server's own API for a router: what only vLLM does, such as chat templates with tools and their parsers.

Only the paths below are called: they generate nothing that a router could not have asked for as a request.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import partial

import httpx

from agent.vllm_server import VllmServer
from core.errors import InvalidRequest, KVFerryError
from core.log import event
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import ErrorInfo, RequestFailed

logger = logging.getLogger(__name__)

CALL_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
)
EVENT_STREAM = "text/event-stream"
MAX_ANSWER_BYTES = 32 << 20  # of an answer that is no stream; a frame to the router takes twice as much
_COMMENTS = re.compile(rb"\A(?::[^\n]*\n|\s)*")  # whole ones, and what is between them, at the start of a stream


class ServerCalls:
    """The calls that the server has of this agent. ``on_reply`` gets the parts of their answers, and their failures."""

    def __init__(self, server: VllmServer, on_reply: Callable[[EngineReply | RequestFailed], None]) -> None:
        self._server = server
        self._on_reply = on_reply
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._generating: set[str] = set()  # those of them for which the engine makes steps

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def num_generating(self) -> int:
        """How many calls need steps of the engine; rendering needs none."""
        return len(self._generating)

    def submit(self, call: EngineCall) -> None:
        """Begin a call."""
        if call.needs_steps:
            self._generating.add(call.request_id)
        task = self._loop.create_task(self._serve(call))
        self._tasks[call.request_id] = task
        task.add_done_callback(partial(self._forget, call.request_id))

    def abort(self, request_id: str) -> None:
        """End a call; unknown ids are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            self._generating.discard(request_id)
            task.cancel()

    def cancel_all(self) -> list[asyncio.Task[None]]:
        """End all calls; return their tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def _serve(self, call: EngineCall) -> None:
        try:
            if call.path not in CALL_PATHS:
                raise InvalidRequest(f"an agent does not call {call.path}")
            await self._pass_on(call)
        except KVFerryError as error:
            self._fail(call, ErrorInfo.of(error))
        except Exception as bug:  # the boundary of a request: its router gets an answer
            logger.exception(event("agent_bug", request_id=call.request_id))
            self._fail(call, ErrorInfo(code="internal_error", message=f"the agent failed: {bug!r}"))

    async def _pass_on(self, call: EngineCall) -> None:
        """Send the answer on: a stream in its pieces, anything else in one part."""
        async with self._server.post(call.path, call.body, call.trace) as response:
            content_type = response.headers.get("content-type", "")
            part = partial(EngineReply, request_id=call.request_id, status=response.status_code, content_type=content_type)
            if not content_type.startswith(EVENT_STREAM):
                self._on_reply(part(position=0, body=await _whole(response), is_last=True))
                return
            position = 0
            async for piece in _from_first_event(response.aiter_raw()):
                self._on_reply(part(position=position, body=piece))
                position += 1
            self._on_reply(part(position=position, body=b"", is_last=True))

    def _fail(self, call: EngineCall, error: ErrorInfo) -> None:
        self._on_reply(RequestFailed(request_id=call.request_id, error=error))

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]
            self._generating.discard(request_id)


async def _from_first_event(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a stream from its first event on: a comment before it only keeps the connection alive, and is no answer."""
    begin, has_begun = b"", False
    async for piece in pieces:
        if has_begun:
            yield piece
            continue
        begin = _COMMENTS.sub(b"", begin + piece, count=1)
        has_begun = begin[:1] not in (b"", b":")
        if has_begun:
            yield begin


async def _whole(response: httpx.Response) -> bytes:
    """Return a body. Raises InvalidRequest for one of more than ``MAX_ANSWER_BYTES``: another engine's would be as long."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise InvalidRequest(
                f"the answer has more than {MAX_ANSWER_BYTES} bytes: stream it, or ask for fewer log-probabilities or choices"
            )
    return bytes(body)
