"""The operator's limits for clients: requests per key, and tokens per prompt."""

from __future__ import annotations

import asyncio

import pytest

from core.clock import SystemClock
from core.wire.messages import Generate
from core.wire.sampling import SamplingParams


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def complete(under_test, name: str):
    async with under_test.client() as client:
        return await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=key(name))


async def test_one_key_cannot_take_the_places_of_another(start_router):
    under_test = await start_router(has_http=False, api_key="busy,calm", max_requests_per_key=2)
    await under_test.pair(is_silent=True)
    calls = [asyncio.create_task(complete(under_test, "busy")) for _ in range(2)]
    await under_test.until(lambda: under_test.router.gateway.num_requests == 2)
    refused = await complete(under_test, "busy")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    calls.append(asyncio.create_task(complete(under_test, "calm")))
    await under_test.until(lambda: under_test.router.gateway.num_requests == 3)
    async with under_test.client() as client:
        assert (await client.get("/v1/models", headers=key("busy"))).status_code == 200
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_key_has_one_bound_however_its_scheme_is_written(start_router):
    under_test = await start_router(has_http=False, api_key="busy", max_requests_per_key=1)
    await under_test.pair(is_silent=True)
    call = asyncio.create_task(complete(under_test, "busy"))
    await under_test.until(lambda: under_test.router.gateway.num_requests == 1)
    async with under_test.client() as client:
        headers = {"authorization": "bearer  busy"}
        refused = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=headers)
    assert refused.status_code == 429
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.slow
async def test_a_key_s_places_are_free_again_once_its_requests_have_ended(start_router):
    under_test = await start_router(has_http=False, api_key="only", max_requests_per_key=1)
    await under_test.pair()
    for _ in range(3):
        assert (await complete(under_test, "only")).status_code == 200


async def test_a_wrong_key_is_told_so_and_not_that_it_is_busy(start_router):
    under_test = await start_router(has_http=False, api_key="only", max_requests_per_key=1)
    assert (await complete(under_test, "wrong")).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("/v1/completions", "prompt", "a text that is longer than that"),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "a text that is longer than that"}]),
    ],
)
async def test_prompt_beyond_the_operator_s_limit_is_refused(start_router, path, field, prompt):
    under_test = await start_router(max_prompt_tokens=8)
    await under_test.pair()
    async with under_test.client() as client:
        refused = await client.post(path, json={field: prompt, "max_tokens": 1})
        served = await client.post("/v1/completions", json={"prompt": "short", "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "at most 8" in refused.json()["error"]["message"]
    assert served.status_code == 200


async def test_a_request_that_would_be_too_late_hears_when_to_come_back(start_router):
    under_test = await start_router(has_http=False)
    prefill, _ = await under_test.pair(is_silent=True)
    wait_estimates = under_test.router.gateway.core.wait_estimates
    (worker,) = (worker for worker in under_test.router.gateway.core.membership.workers if worker.role == "prefill")
    queued = Generate(request_id="past", prompt_token_ids=(1,), sampling=SamplingParams())
    now = SystemClock().now()
    wait_estimates.on_sent(worker.key, queued, now - 1e6)
    wait_estimates.on_first_token("past", now)  # a pace so slow that no queued prompt ever ends
    async with under_test.client() as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
        await prefill.generated()
        body = {"prompt": "x", "max_tokens": 2, "timeout_s": 0.5}
        refused = await client.post("/v1/completions", json=body)
        bad = await client.post("/v1/completions", json={**body, "timeout_s": 0})
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert refused.status_code == 503
    assert 900_000 < int(refused.headers["retry-after"]) <= 1_000_000
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("deadline_unreachable", "timeout_s")
    assert under_test.metric("kvferry_request_failure_total", code="deadline_unreachable") == 1
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "timeout_s")


async def test_workers_learn_which_requests_have_the_same_key(start_router):
    under_test = await start_router(has_http=False, api_key="first,second")
    prefill, _ = await under_test.pair()
    for name in ("first", "second", "first"):
        assert (await complete(under_test, name)).status_code == 200
    tenants = [message.tenant for message in prefill.received if isinstance(message, Generate)]
    assert tenants[0] == tenants[2] != tenants[1]
    assert 0 not in tenants


@pytest.mark.parametrize("settings", [{}, {"api_key": "first", "fair_shares": False}])
async def test_keys_that_are_not_checked_or_not_fair_name_nobody(start_router, settings):
    under_test = await start_router(has_http=False, **settings)
    prefill, _ = await under_test.pair()
    assert (await complete(under_test, "first")).status_code == 200
    assert [message.tenant for message in prefill.received if isinstance(message, Generate)] == [0]
