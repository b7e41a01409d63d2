"""Calls of the server's API: what comes back, how they end, and which are refused."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from agent.calls import ServerCalls
from core.tracing import TraceContext
from core.wire.engine_calls import EngineCall
from core.wire.messages import RequestFailed
from tests.support.polling import until

CHAT = "/v1/chat/completions"
ONE_TOKEN = (200, {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "length"}]})


def call(path=CHAT, name="c", **fields):
    return EngineCall(request_id=name, path=path, body=b'{"a": 1}', **fields)


async def ended(running):
    await running.until(
        lambda: running.replies and (isinstance(running.replies[-1], RequestFailed) or running.replies[-1].is_last)
    )
    return running.replies


@pytest.mark.parametrize("status", [200, 400])
async def test_an_answer_comes_in_one_part_whatever_its_status(running, status):
    running.server.called[CHAT] = (status, {"b": 2})
    running.engine.submit_call(call())
    (reply,) = await ended(running)
    assert (reply.request_id, reply.status, reply.body, reply.position) == ("c", status, b'{"b": 2}', 0)
    assert running.server.calls == [(CHAT, {"a": 1})]


async def test_a_stream_comes_in_parts_with_numbers(running):
    running.server.called[CHAT] = [{"n": 1}, {"n": 2}]
    running.engine.submit_call(call())
    replies = await ended(running)
    assert [reply.position for reply in replies] == list(range(len(replies)))
    assert b"".join(reply.body for reply in replies) == b'data: {"n": 1}\n\ndata: {"n": 2}\n\n'
    assert [reply.is_last for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert replies[0].content_type == "text/event-stream"


class Pieces:
    """A server whose stream comes in these pieces."""

    def __init__(self, pieces):
        self._pieces = pieces

    @asynccontextmanager
    async def post(self, path, body, trace):
        yield SimpleNamespace(headers={"content-type": "text/event-stream"}, status_code=200, aiter_raw=self._stream)

    async def _stream(self):
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(
    ("pieces", "passed_on"),
    [
        ([b": keep-alive\n\n"], []),
        ([b": keep-alive\n\n", b"data: 1\n\n", b": keep-alive\n\n"], [b"data: 1\n\n", b": keep-alive\n\n"]),
        ([b": keep", b"-alive\n", b"\n: keep-alive\n\nda", b"ta: 1\n\n"], [b"da", b"ta: 1\n\n"]),
        ([b"data: 1\n\n: keep-alive\n\n"], [b"data: 1\n\n: keep-alive\n\n"]),
    ],
)
async def test_a_comment_is_no_begin_of_an_answer(pieces, passed_on):
    """vLLM sends some while a request waits: another engine could still answer it."""
    replies = []
    calls = ServerCalls(Pieces(pieces), replies.append)
    calls.submit(call())
    await until(lambda: not len(calls))
    assert [reply.body for reply in replies] == [*passed_on, b""]
    assert [(reply.position, reply.is_last) for reply in replies] == [
        (number, number == len(passed_on)) for number in range(len(replies))
    ]


async def test_an_answer_that_is_too_long_is_no_fault_of_the_engine(running, monkeypatch):
    monkeypatch.setattr("agent.calls.MAX_ANSWER_BYTES", 5)
    running.server.called[CHAT] = (200, {"b": 2})
    running.engine.submit_call(call())
    (failed,) = await ended(running)
    assert (failed.error.code, failed.error.http_status, failed.error.retryable) == ("invalid_request", 400, False)
    assert "stream it" in failed.error.message


async def test_a_call_continues_the_trace_of_its_client(running):
    trace = TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", tracestate="a=1")
    running.engine.submit_call(call(trace=trace))
    await ended(running)
    assert running.server.headers[-1].items() >= trace.headers.items()


@pytest.mark.parametrize("path", ["/inference/v1/abort_requests", "/v1/chat/completions/../../pause", "/sleep"])
async def test_other_routes_are_not_called(running, path):
    running.engine.submit_call(call(path))
    (failed,) = await ended(running)
    assert failed.error.code == "invalid_request"
    assert running.server.calls == []


async def test_an_aborted_call_ends_at_the_server_too(running):
    running.server.called[CHAT] = [{"n": 1}, None]
    running.engine.submit_call(call())
    await running.until(lambda: running.replies)
    running.engine.submit_abort(["c"])
    await running.until(lambda: not running.server.num_open)
    assert len(running.replies) == 1


@pytest.mark.parametrize(
    ("path", "fields", "needs_steps"),
    [(CHAT, {}, True), (f"{CHAT}/render", {}, False), (CHAT, {"is_release": True}, False)],
)
async def test_an_engine_that_makes_no_steps_for_a_call_has_stalled(running, path, fields, needs_steps):
    running.server.called[path] = [{"n": 1}, None]
    assert running.engine.reading().stalled_s == 0.0
    running.engine.submit_call(call(path, **fields))
    await running.until(lambda: running.replies)
    assert (running.engine.reading().stalled_s > 0.0) == needs_steps
    running.engine.submit_abort(["c"])
    assert running.engine.reading().stalled_s == 0.0


async def test_an_engine_without_steps_to_make_for_a_call_is_asked_for_one(server, running):
    """Its front end reads images, say."""
    server.called[CHAT] = [{"n": 1}, None]
    server.answers += [ONE_TOKEN, ONE_TOKEN, [None]]  # the third step does not come
    running.engine.submit_call(call())
    await running.until(lambda: running.replies)
    running.engine.start()
    await running.until(lambda: len(server.bodies) == 2)
    begun = running.engine.reading().stalled_s
    await running.until(lambda: len(server.bodies) == 3)
    assert [len(body["token_ids"]) for body in server.bodies] == [1, 1, 1]
    await running.until(lambda: running.engine.reading().stalled_s > begun + 0.1)


async def test_an_engine_that_makes_steps_for_a_call_is_asked_for_none(server, running):
    server.called[CHAT] = [{"n": 1}, None]
    server.steps_by_themselves = True
    running.engine.submit_call(call())
    await running.until(lambda: running.replies)
    running.engine.start()
    await running.until(lambda: server.num_looks > 5)
    assert server.bodies == []


async def test_a_lost_server_fails_the_call(running):
    running.server.stop()
    running.engine.submit_call(call())
    (failed,) = await ended(running)
    assert failed.error.code == "engine_dead"
