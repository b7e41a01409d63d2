"""Work for which no thread can be started."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.errors import Overloaded
from router.openai.text_pool import INLINE_CHARACTERS
from router.threads import submit


def refuse(_):
    raise RuntimeError("can't start new thread")


async def test_refused_work_is_not_done_by_a_later_thread(monkeypatch):
    done = []
    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(Overloaded, match="can't start new thread"):
                submit(threads, lambda: done.append("refused"))
        await submit(threads, lambda: done.append("next"))
    assert done == ["next"]


async def test_a_text_without_a_thread_is_told_to_come_back(served, monkeypatch):
    body = {"prompt": "x" * (INLINE_CHARACTERS + 1)}
    async with served.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            refused = await client.post("/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "retry-after" in refused.headers
        assert (await client.post("/tokenize", json=body)).status_code == 200


async def test_an_api_key_is_compared_without_a_thread(start_router, monkeypatch):
    under_test = await start_router(has_http=False, api_key="secret")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with under_test.client() as client:
        for key, status in (("secret", 200), ("wrong", 401)):
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == status
