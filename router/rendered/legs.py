"""Bodies that go to engines as they are: first to a prefill engine for one token, then to a decode engine for the answer.

This is what llm-d's side-car does. Another decode engine is tried until the first byte of the answer; after it, nothing can
go on elsewhere, because the router knows no tokens. Without a prefill engine that answers, the decode engine computes all.
An engine that is full, or has left before it was asked, has not read the blocks of the prompt: they go to the next decode
engine. After any other failure, and at the end, they are released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from core.errors import NoWorker, Overloaded, RequestError
from core.ids import IdSource, new_hex_id
from core.log import event
from core.tracing import TraceContext
from core.wire.engine_calls import PLUGIN_VALUE, EngineCall, release_body
from core.wire.messages import ErrorInfo
from router.dispatch.core import RouterCore
from router.dispatch.engine_api import CallFailed, EngineAnswer, EngineApi, deadline_ms
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import Demand, choose_route, why_not_read
from router.rendered.bodies import COMPLETIONS, EngineBody
from router.rendered.renderer import MAX_TRIES, REFUSES_AGENT, EngineRefusal, ends_tries, refusal

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 10.0
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_ANSWER = (  # what a prefill engine is not asked for
    *("max_completion_tokens", "min_tokens", "stream_options", "n"),
    *("logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs"),
)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Handoff:
    """Where the KV of a prompt is, as the engine says that has computed it."""

    worker: GenerationWorker
    params: dict[str, Any]


@dataclass(slots=True)
class TwoLegs:
    """Serves one body as a whole. Both legs with all their tries have one ``deadline``, seconds of the router's clock, which a
    pause of the router may extend.

    ``trace`` is the client's.
    """

    api: EngineApi
    core: RouterCore
    ids: IdSource
    deadline: Callable[[], float]
    trace: TraceContext | None
    _unread: _Handoff | None = field(default=None, init=False)

    async def open(self, body: EngineBody, stack: AsyncExitStack) -> EngineAnswer:
        """Return the answer of a decode engine, of any status, after its first part; ``stack`` ends the call.

        Raises:
            EngineRefusal: no engine answers.
            RequestError: no worker can take it.
        """
        try:
            return await self._open(body, stack)
        finally:
            self._release()

    async def _open(self, body: EngineBody, stack: AsyncExitStack) -> EngineAnswer:
        avoid: set[WorkerKey] = set()
        last: ErrorInfo | None = None
        for _ in range(MAX_TRIES):
            try:
                route = choose_route(self.core.membership.workers, Demand(num_tokens=1, avoid=frozenset(avoid)))
            except RequestError:
                if last is None:
                    raise
                break
            if not self._can_read(route.decode):
                self._release()
            if self._unread is None and route.prefill is not None:
                self._unread = await self._prefill(body, route.prefill, avoid)
            decode = self.core.membership.get(route.decode.key)
            if decode is None or decode.is_draining:  # since it was chosen, while the prompt was computed
                last = ErrorInfo.of(NoWorker(f"worker {route.decode.key.engine_id} leaves"))
                avoid.add(route.decode.key)
                continue
            fields = body.for_engine(kv_transfer_params=self._unread.params if self._unread is not None else None)
            try:
                call = self._call(route.decode, body, fields)
                answer = await stack.enter_async_context(call)
            except CallFailed as failed:
                last = failed.info
                if ends_tries(last, self.deadline() - self.api.now()):
                    break
                avoid.add(route.decode.key)
                if last.code != Overloaded.code:
                    self._release()  # it may have read the blocks, even all of them; ``no_worker`` may end a drain, too
                continue
            if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status not in REFUSES_AGENT:
                logger.info(event("passed_on", path=body.path, status=answer.status, decode=route.decode.key.engine_id))
                self._unread = None
                return answer
            last = await _refusal_of(answer)
            avoid.add(route.decode.key)
            await stack.aclose()
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._release()  # it may have read the blocks
        assert last is not None, "a try has ended"
        raise EngineRefusal(last)

    async def _prefill(self, body: EngineBody, worker: GenerationWorker, avoid: set[WorkerKey]) -> _Handoff | None:
        """Have the prompt computed; return where its KV is, None if it has to be computed again."""
        fields = body.for_engine(**dict.fromkeys(_OF_ANSWER), stream=False, max_tokens=1, kv_transfer_params=_REMOTE_DECODE)
        try:
            async with self._call(worker, body, fields) as answer:
                content = await answer.whole()
        except CallFailed as failed:
            logger.warning(event("prefill_leg_failed", path=body.path, code=failed.info.code, message=failed.info.message))
            avoid.add(worker.key)
            return None
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            avoid.add(worker.key)
        if answer.status != HTTPStatus.OK:  # a wrong body is refused by the decode engine, with the reason
            return None
        try:
            params = msgspec.json.decode(content, type=_PrefillAnswer).kv_transfer_params
        except msgspec.MsgspecError as error:
            logger.warning(event("prefill_leg_failed", path=body.path, code="engine_error", message=str(error)))
            return None
        return _Handoff(worker, params) if params else None

    def _can_read(self, decode: GenerationWorker) -> bool:
        """Return whether a decode engine can read the blocks that are not read yet, if there are any."""
        return self._unread is None or not why_not_read(self.core.membership.get(self._unread.worker.key), decode)

    def _release(self) -> None:
        """Release the blocks that no engine will read; those of other connectors than ours end with their lease."""
        handoff, self._unread = self._unread, None
        if handoff is not None and PLUGIN_VALUE in handoff.params:
            call = self._new_call(COMPLETIONS, release_body(handoff.params), RELEASE_TIMEOUT_S, is_release=True)
            self.api.send(handoff.worker, call)

    def _call(
        self, worker: GenerationWorker, body: EngineBody, fields: dict[str, Any]
    ) -> AbstractAsyncContextManager[EngineAnswer]:
        return self.api.call(worker, self._new_call(body.path, fields, self.deadline() - self.api.now()))

    def _new_call(self, path: str, fields: dict[str, Any], timeout_s: float, *, is_release: bool = False) -> EngineCall:
        return EngineCall(
            request_id=new_hex_id(self.ids, "call-"),
            path=path,
            body=msgspec.json.encode(fields),
            deadline_ms=deadline_ms(timeout_s),
            trace=self.trace,
            is_release=is_release,
        )


async def _refusal_of(answer: EngineAnswer) -> ErrorInfo:
    """Return why an engine has not answered a body."""
    try:
        return refusal(answer.status, await answer.whole())
    except CallFailed as failed:
        return failed.info
