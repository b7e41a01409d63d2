"""The gauges of the roles' load, which autoscalers read, as a router shows them."""

from __future__ import annotations

import asyncio
import contextlib

BODY = {"prompt": "say it", "max_tokens": 50}  # 6 tokens
NO_SAMPLE = -1


async def post(under_test):
    async with under_test.client() as client:
        return await client.post("/v1/completions", json=BODY)


def by_role(under_test, name):
    return [under_test.metric(f"kvferry_role_{name}", role=role) for role in ("prefill", "decode", "aggregated")]


async def test_idle_roles_show_their_workers_and_no_load(served):
    assert by_role(served, "available_workers") == [1, 1, 0]
    assert by_role(served, "inflight_tokens") == [0, 0, 0]
    for name in ("predicted_wait_seconds", "demanded_workers", "offered_workers"):
        assert by_role(served, name) == [0, 0, NO_SAMPLE], "what a role without workers needs is unknown, not zero"
    assert served.metric("kvferry_planner_workers") == 0  # off by default


async def test_a_prompt_at_a_prefill_worker_is_its_roles_load_until_it_ends(served):
    prefill, _ = served.workers
    prefill.script.is_silent = True
    request = asyncio.create_task(post(served))
    sent = await prefill.generated()
    assert by_role(served, "inflight_tokens") == [6, 6 + BODY["max_tokens"], 0]  # a decode worker keeps room for all
    assert by_role(served, "demanded_workers")[0] >= by_role(served, "offered_workers")[0] > 0
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    await prefill.aborts(sent.request_id)
    assert by_role(served, "inflight_tokens") == [0, 0, 0]
    assert by_role(served, "predicted_wait_seconds") == [0, 0, NO_SAMPLE]
