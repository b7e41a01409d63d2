"""Answers of engines that are passed on as they come."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

from core.wire.engine_calls import EngineReply
from core.wire.messages import ErrorInfo
from router.dispatch.engine_api import EngineAnswer
from router.http.passed_on import PassedOn


async def test_an_error_within_an_event_of_the_engine_is_an_event_of_its_own():
    answer, sent = EngineAnswer(), []
    first = b'data: 1\n\ndata: {"par'
    answer.put(EngineReply(request_id="c", position=0, status=200, content_type="text/event-stream", body=first))
    answer.put(EngineReply(request_id="c", position=1, body=b"t"))
    answer.put(ErrorInfo(code="peer_unreachable", message="lost", http_status=503))
    await answer.open()

    async def send(message):
        sent.append(message.get("body", b""))

    codes = []
    metrics = SimpleNamespace(count_failed=codes.append)
    await PassedOn("/v1/completions", answer, AsyncExitStack(), metrics)({}, asyncio.Event().wait, send)
    event, error, rest = b"".join(sent).split(b"\n\n")
    assert (event, rest) == (b"data: 1", b"")
    assert error.startswith(b'data: {"error"')
    assert codes == ["peer_unreachable"]
