"""How an error of an engine's API becomes one of the router, and how long engines are asked."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest

from core.ids import SeededIds
from core.wire.messages import ErrorInfo
from router.dispatch.engine_api import CallFailed
from router.dispatch.members import WorkerKey
from router.metrics import CLIENT_ERRORS
from router.rendered.bodies import MESSAGES, engine_body
from router.rendered.legs import TwoLegs
from router.rendered.renderer import EngineRefusal, EngineRenderer, refusal


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_request"), (404, "model_not_found"), (413, "invalid_request"), (422, "invalid_request")],
)
def test_a_refusal_by_the_engine_is_the_client_s_mistake(status, code):
    info = refusal(status, b'{"error": {"message": "no", "param": "tools"}}')
    assert (info.code, info.http_status, info.param) == (code, status, "tools")
    assert info.code in CLIENT_ERRORS


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_busy_or_broken_engine_is_no_mistake_of_a_client(status):
    assert refusal(status, b"oops").code not in CLIENT_ERRORS


LOST = ErrorInfo(code="peer_lost", message="gone", http_status=503, retryable=True)
LATE = ErrorInfo(code="deadline_exceeded", message="late", http_status=504)


class PausedApi:
    """The first call fails in a pause of the router; the second is answered."""

    def __init__(self, end_after_pause, failure):
        self.time, self.end, self._end_after_pause, self._failure = 100.0, 120.0, end_after_pause, failure
        self.num_calls = 0

    def now(self):
        return self.time

    def choose(self, avoid, model_fingerprint):
        return SimpleNamespace(key=self.num_calls, facts=SimpleNamespace(model_fingerprint=b"m"))

    @asynccontextmanager
    async def call(self, worker, call):
        self.num_calls += 1
        if self.num_calls == 1:
            self.time, self.end = 130.0, self._end_after_pause
            raise CallFailed(self._failure)

        async def whole():
            return b'{"got": 1}'

        yield SimpleNamespace(status=200, whole=whole)


async def derendered(api, monkeypatch):
    return await EngineRenderer(api, SeededIds(1)).derender({}, lambda: api.end, b"", dict)


async def passed_on(api, monkeypatch):
    route = SimpleNamespace(prefill=None, decode=SimpleNamespace(key=WorkerKey("d", 1), is_draining=False))
    monkeypatch.setattr("router.rendered.legs.choose_route", lambda workers, demand: route)
    core = SimpleNamespace(membership=SimpleNamespace(workers=[], get=lambda key: route.decode))
    body = engine_body(MESSAGES, b'{"model": "m"}', "m", splits_output=False)
    async with AsyncExitStack() as stack:
        answer = await TwoLegs(api, core, SeededIds(1), lambda: api.end, None).open(body, stack)
        return json.loads(await answer.whole())


@pytest.mark.parametrize("asked", [derendered, passed_on])
@pytest.mark.parametrize("failure", [LOST, LATE], ids=["lost", "late"])
async def test_an_engine_is_asked_again_after_a_pause_that_extends_the_request(monkeypatch, asked, failure):
    assert await asked(PausedApi(150.0, failure), monkeypatch) == {"got": 1}


@pytest.mark.parametrize(
    ("asked", "failure", "end_after_pause"),
    [
        (derendered, LOST, 120.0),
        (derendered, LATE, 120.0),
        (derendered, LATE, 130.0005),  # the wire has whole milliseconds
        (passed_on, LATE, 120.0),
        (passed_on, LATE, 130.0005),
    ],
)
async def test_no_engine_is_asked_again_if_a_pause_has_not_extended_the_request(monkeypatch, asked, failure, end_after_pause):
    api = PausedApi(end_after_pause, failure)
    with pytest.raises(EngineRefusal) as caught:
        await asked(api, monkeypatch)
    assert (caught.value.info.code, api.num_calls) == ("deadline_exceeded", 1)
