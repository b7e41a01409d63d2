"""How an error of an engine's API becomes one of the router, and how long engines are asked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from core.ids import SeededIds
from core.wire.messages import ErrorInfo
from router.dispatch.engine_api import CallFailed
from router.metrics import CLIENT_ERRORS
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


class PausedApi:
    """The first worker is lost in a pause of the router; the second answers."""

    def __init__(self, end_after_pause):
        self.time, self.end, self._end_after_pause = 100.0, 120.0, end_after_pause
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
            raise CallFailed(ErrorInfo(code="peer_lost", message="gone", http_status=503, retryable=True))

        async def whole():
            return b'{"got": 1}'

        yield SimpleNamespace(status=200, whole=whole)


async def test_another_engine_is_asked_after_a_pause_that_extends_the_request():
    api = PausedApi(end_after_pause=150.0)
    assert await EngineRenderer(api, SeededIds(1)).derender({}, lambda: api.end, b"", dict) == {"got": 1}
    api = PausedApi(end_after_pause=120.0)  # the client's own limit is not extended
    with pytest.raises(EngineRefusal) as caught:
        await EngineRenderer(api, SeededIds(1)).derender({}, lambda: api.end, b"", dict)
    assert (caught.value.info.code, api.num_calls) == ("deadline_exceeded", 1)
