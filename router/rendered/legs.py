"""Bodies that go to engines as they are: first to a prefill engine for one token, then to a decode engine for the answer.

This is what llm-d's side-car does. Another decode engine is tried until the first byte of the answer; after it, nothing can
go on elsewhere, because the router knows no tokens. Without a prefill engine that answers, the decode engine computes all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from core.errors import RequestError
from core.ids import IdSource, new_hex_id
from core.log import event
from core.tracing import TraceContext
from core.wire.engine_calls import EngineCall
from core.wire.messages import ErrorInfo
from router.dispatch.core import RouterCore
from router.dispatch.engine_api import CallFailed, EngineAnswer, EngineApi, deadline_ms
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import Demand, choose_route
from router.rendered.bodies import EngineBody
from router.rendered.renderer import REFUSES_AGENT, EngineRefusal, ends_tries, refusal

logger = logging.getLogger(__name__)

MAX_TRIES = 3
_BYTES_PER_TOKEN = 4
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class TwoLegs:
    """Serves bodies as a whole. Both legs with all their tries have one ``deadline``, seconds of the router's clock, which a
    pause of the router may extend.

    ``trace`` is the client's.
    """

    api: EngineApi
    core: RouterCore
    ids: IdSource
    deadline: Callable[[], float]
    trace: TraceContext | None

    async def open(self, body: EngineBody, stack: AsyncExitStack) -> EngineAnswer:
        """Return the answer of a decode engine, of any status, after its first part; ``stack`` ends the call.

        Raises:
            EngineRefusal: no engine answers.
            RequestError: no worker can take it.
        """
        avoid: set[WorkerKey] = set()
        last: ErrorInfo | None = None
        for _ in range(MAX_TRIES):
            try:
                route = choose_route(self.core.membership.workers, Demand(num_tokens=1, avoid=frozenset(avoid)))
            except RequestError:
                if last is None:
                    raise
                break
            params = await self._prefill(body, route.prefill, avoid) if route.prefill is not None else None
            fields = body.for_engine(**({"kv_transfer_params": params} if params else {}))
            try:
                call = self._call(route.decode, body, fields)
                answer = await stack.enter_async_context(call)
            except CallFailed as failed:
                last = failed.info
                if ends_tries(last, self.deadline() - self.api.now()):
                    break
                avoid.add(route.decode.key)
                continue
            if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status not in REFUSES_AGENT:
                logger.info(event("passed_on", path=body.path, status=answer.status, decode=route.decode.key.engine_id))
                return answer
            last = await _refusal_of(answer)
            avoid.add(route.decode.key)
            await stack.aclose()
        assert last is not None, "a try has ended"
        raise EngineRefusal(last)

    async def _prefill(self, body: EngineBody, worker: GenerationWorker, avoid: set[WorkerKey]) -> dict[str, Any] | None:
        """Have the prompt computed; return where its KV is, None if it has to be computed again."""
        changes: dict[str, object] = {"max_completion_tokens": None, "min_tokens": None, "stream_options": None, "n": None}
        fields = body.for_engine(**changes, stream=False, max_tokens=1, kv_transfer_params=_REMOTE_DECODE)
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
            return msgspec.json.decode(content, type=_PrefillAnswer).kv_transfer_params
        except msgspec.MsgspecError as error:
            logger.warning(event("prefill_leg_failed", path=body.path, code="engine_error", message=str(error)))
            return None

    def _call(
        self, worker: GenerationWorker, body: EngineBody, fields: dict[str, Any]
    ) -> AbstractAsyncContextManager[EngineAnswer]:
        call = EngineCall(
            request_id=new_hex_id(self.ids, "call-"),
            path=body.path,
            body=msgspec.json.encode(fields),
            deadline_ms=deadline_ms(self.deadline() - self.api.now()),
            trace=self.trace,
        )
        return self.api.call(worker, call)


async def _refusal_of(answer: EngineAnswer) -> ErrorInfo:
    """Return why an engine has not answered a body."""
    try:
        return refusal(answer.status, await answer.whole())
    except CallFailed as failed:
        return failed.info
