"""What a router records of real requests: their timelines, the traffic between workers, placements, and hits."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import EngineDead
from core.wire.messages import ErrorInfo, PrefillDone, TransferUsage
from router.dispatch.members import WorkerKey
from router.dispatch.request_state import Moved
from router.metrics import PLACEMENT_REASONS

BODY = {"prompt": "say it", "max_tokens": 50}


async def post(under_test, body=BODY, **headers):
    async with under_test.client() as client:
        return await client.post("/v1/completions", json=body, headers=headers)


async def requests_json(under_test, **query):
    async with under_test.client() as client:
        return (await client.get("/status/requests.json", params=query)).json()


def record(under_test):
    return under_test.router.gateway.observer


async def test_a_served_request_is_found_by_the_id_of_its_answer_with_all_that_happened(served):
    answer = await post(served, **{"x-request-id": "mine"})
    (timeline,) = (await requests_json(served, id=answer.json()["id"]))["found"]
    (again,) = (await requests_json(served, id="mine"))["found"]
    assert again == timeline | {"age_s": again["age_s"]}  # it has grown older
    assert (timeline["state"], timeline["outcome"], timeline["num_output_tokens"]) == ("finished", "stop", 12)
    assert (timeline["prefill"], timeline["decode"]) == tuple(worker.engine_id for worker in served.workers)
    assert [event["name"] for event in timeline["events"]] == ["prefill", "first_token", "decode", "ended"]
    assert [step["name"] for step in timeline["steps"]][:3] == ["queue", "prefill", "relay"]
    assert timeline["handoff"] == {
        "outcome": "loaded",
        "transport": "tcp",
        "num_bytes": 4096,
        "num_tokens": 6,
        "verified_blocks": 0,
        "recomputed_tokens": 0,
    }
    assert timeline["routing"]["reason"] == "load"
    assert (timeline["num_cached_tokens"], timeline["num_prompt_tokens"]) == (4, 6)
    assert "say it" not in str(timeline)
    ends = [step["start_ms"] + step["ms"] for step in timeline["steps"]]
    assert ends[-1] == pytest.approx(timeline["total_ms"], abs=0.01)


async def test_traffic_placements_and_hits_are_those_of_the_requests(served):
    prefill, decode = served.workers
    for _ in range(3):
        await post(served)
    async with served.client() as client:
        report = (await client.get("/status.json")).json()
    (pair,) = report["traffic"]
    assert (pair["prefill"], pair["decode"], pair["transport"]) == (prefill.engine_id, decode.engine_id, "tcp")
    assert pair["handoffs_per_s"] == pytest.approx(3 / 5)  # the shortest window
    assert {worker["engine_id"]: worker["transport"] for worker in report["workers"]} == dict.fromkeys(
        (prefill.engine_id, decode.engine_id), "tcp"
    )
    assert [worker["prompts_per_s"] > 0 for worker in report["workers"]] == [True, False]
    assert (report["output_tokens"], report["num_more_pairs"]) == (36, 0)
    placed = sum(served.metric("kvferry_routing_placements_total", reason=reason) for reason in ("prefix", "load", "wait"))
    assert placed == 3
    assert served.metric("kvferry_answered_prompt_tokens_total", source="cache") == 12
    assert served.metric("kvferry_answered_prompt_tokens_total", source="computed") == 6


async def test_every_answer_and_two_metrics_tell_how_true_its_placement_was(served):
    reports = [report for _ in range(8) for report in (await post(served)).json()["usage"]["kv_transfer"]["routing"]]
    assert len(reports) == 8
    for report in reports:
        assert report["reason"] in PLACEMENT_REASONS
        assert (report["candidates"], report["hit_tokens"], report["longest_hit_tokens"]) == (1, 4, 0)
        assert min(report["predicted_ttft_ms"], report["ttft_ms"]) > 0
    real_s = sum(report["ttft_ms"] for report in reports) / 1e3
    error_s = sum(abs(report["ttft_ms"] - report["predicted_ttft_ms"]) for report in reports) / 1e3
    assert served.metric("kvferry_routing_ttft_seconds_total") == pytest.approx(real_s)
    assert served.metric("kvferry_routing_ttft_error_seconds_total") == pytest.approx(error_s)
    assert served.metric("kvferry_routing_prefill_time_error_ratio") > 0


@pytest.mark.parametrize("tokens_per_frame", [1, 50])
async def test_hits_that_a_worker_tells_at_the_end_are_in_the_answer_and_the_metrics(start_router, tokens_per_frame):
    under_test = await start_router(has_http=False)
    worker = await under_test.add("aggregated", takes_calls=True)
    worker.script.late_cached_tokens, worker.script.tokens_per_frame = 3, tokens_per_frame
    answer = (await post(under_test)).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    (timeline,) = (await requests_json(under_test, id=answer["id"]))["found"]
    assert timeline["num_cached_tokens"] == timeline["routing"]["hit_tokens"] == 3
    sources = ("cache", "computed")
    assert [under_test.metric("kvferry_answered_prompt_tokens_total", source=source) for source in sources] == [3, 3]
    assert under_test.metric("kvferry_routing_real_hit_tokens") == 3
    async with under_test.client() as client:
        (shown,) = (await client.get("/status.json")).json()["workers"]
    assert shown["prompts_per_s"] == pytest.approx(1 / 5)


async def test_what_a_decode_worker_tells_at_the_end_changes_nothing_of_its_prompt(start_router):
    under_test = await start_router(has_http=False)
    await under_test.add("prefill", takes_calls=True)
    decode = await under_test.add("decode", takes_calls=True)
    decode.script.late_cached_tokens = 6  # all that was handed off
    answer = (await post(under_test, BODY | {"prompt_logprobs": 1})).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert len(answer["choices"][0]["prompt_logprobs"]) == 6
    (routing,) = answer["usage"]["kv_transfer"]["routing"]
    assert routing["hit_tokens"] == 4


async def test_a_request_placed_by_load_says_so(start_router):
    under_test = await start_router(has_http=False, routing="load")
    await under_test.add("aggregated")
    answer = await post(under_test)
    (timeline,) = (await requests_json(under_test, id=answer.json()["id"]))["found"]
    assert timeline["routing"] is None
    assert [event["name"] for event in timeline["events"]] == ["alone", "first_token", "ended"]
    assert [step["name"] for step in timeline["steps"]] == ["first_token", "decode"]
    assert under_test.metric("kvferry_routing_placements_total", reason="by_load") == 1
    assert record(under_test).traffic.prompts_per_s(under_test.router.gateway.now) != {}


async def test_a_failover_names_both_workers(start_router):
    under_test = await start_router(has_http=False)
    dead = under_test.script(error=ErrorInfo.of(EngineDead("it died")))
    failing = await under_test.add("prefill", script=dead)
    decode = await under_test.add("decode")
    assert (await post(under_test)).status_code == 200
    (timeline,) = (await requests_json(under_test))["latest"]
    (timeline,) = (await requests_json(under_test, id=timeline["request_id"]))["found"]
    told = [(event["name"], event.get("worker", "")) for event in timeline["events"]]
    assert told[:3] == [("prefill", failing.engine_id), ("retry", failing.engine_id), ("alone", decode.engine_id)]
    assert (timeline["num_retries"], timeline["handoff"]["outcome"]) == (1, "no_prefill")


async def test_a_prompt_that_leaves_a_long_queue_is_moved_and_not_retried(start_router):
    under_test = await start_router(has_http=False)
    prefill = await under_test.add("prefill", script=under_test.script(is_silent=True))
    await under_test.add("decode")
    asking = asyncio.create_task(post(under_test))
    message = await prefill.generated()
    gateway = under_test.router.gateway
    gateway.core.dispatcher.requests[message.request_id].has_moved = True
    gateway._perform([Moved(message.request_id, WorkerKey("other", 1), WorkerKey(prefill.engine_id, 1), 4.0)])
    await prefill._prefill(message)
    assert (await asking).status_code == 200
    (timeline,) = (await requests_json(under_test, id=message.request_id))["found"]
    assert [event["name"] for event in timeline["events"]] == ["prefill", "move", "first_token", "decode", "ended"]
    assert (timeline["events"][1]["worker"], timeline["num_retries"]) == ("other", 0)
    assert under_test.metric("kvferry_prompts_moved_total") == 1
    assert under_test.metric("kvferry_routing_ttft_seconds_total") == 0, "the prediction was for another time"


async def test_a_refused_request_has_a_timeline_and_a_running_one_is_listed_first(start_router):
    under_test = await start_router(has_http=False, max_requests=1)
    script = under_test.script(pause_after=2)
    await under_test.add("aggregated", script=script)
    running = asyncio.create_task(post(under_test))
    await under_test.until(lambda: record(under_test).num_output_tokens == 2)
    assert (await post(under_test)).status_code == 429
    latest = (await requests_json(under_test))["latest"]
    assert [(each["state"], each["outcome"]) for each in latest] == [("running", ""), ("failed", "overloaded")]
    script.resume.set()
    assert (await running).status_code == 200
    assert [each["state"] for each in (await requests_json(under_test))["latest"]] == ["finished", "failed"]
    assert not record(under_test).timelines._open


async def test_a_failed_load_is_a_handoff_with_its_reason(start_router):
    under_test = await start_router(has_http=False)
    await under_test.add("prefill")
    lost = TransferUsage(fallback_reason="peer_lost", recomputed_tokens=6)
    await under_test.add("decode", script=under_test.script(cost=lost))
    answer = await post(under_test)
    (timeline,) = (await requests_json(under_test, id=answer.json()["id"]))["found"]
    assert (timeline["handoff"]["outcome"], timeline["handoff"]["recomputed_tokens"]) == ("peer_lost", 6)
    (pair,) = record(under_test).traffic.pairs(under_test.router.gateway.now)
    assert pair.failed_per_s == pair.handoffs_per_s > 0


async def test_the_history_is_kept_by_the_router_s_own_timer(served):
    history = record(served).history
    await served.until(lambda: history._totals is not None)
    history._began -= 5.0
    await post(served)
    await served.until(lambda: len(history.report(served.router.gateway.now).ages_s) == 1)
    async with served.client() as client:
        report = (await client.get("/status/history.json")).json()
    assert report["num_intervals"] == 120
    assert report["kv_usage_mean"].keys() == {"prefill", "decode"}


async def test_a_handoff_between_vllm_engines_is_traffic_of_which_nothing_is_reported(start_router):
    under_test = await start_router(has_http=False)
    prefill = await under_test.add("prefill", leaves_first_token=True, script=under_test.script(is_silent=True))
    decode = await under_test.add("decode")
    asking = asyncio.create_task(post(under_test))
    message = await prefill.generated()
    await prefill.send(PrefillDone(request_id=message.request_id, choices=(), kv_handoff=prefill.handoff(message)))
    answer = await asking
    assert answer.status_code == 200
    (timeline,) = (await requests_json(under_test, id=answer.json()["id"]))["found"]
    assert [event["name"] for event in timeline["events"]] == ["prefill", "decode", "first_token", "ended"]
    assert timeline["handoff"]["outcome"] == "not_reported"
    (pair,) = record(under_test).traffic.pairs(under_test.router.gateway.now)
    assert (pair.prefill, pair.decode, pair.bytes_per_s, pair.transport) == (prefill.engine_id, decode.engine_id, 0, "")


async def test_a_prompt_that_a_bug_has_stopped_is_no_open_request(served, monkeypatch):
    def fail(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(served.router.gateway.core, "submit", fail)
    assert (await post(served)).status_code == 500
    assert not record(served).timelines._open
    (timeline,) = (await requests_json(served))["latest"]
    assert (timeline["state"], timeline["outcome"]) == ("failed", "internal_error")


async def test_a_request_that_waits_for_room_is_counted_once_it_is_placed(start_router):
    under_test = await start_router(has_http=False, api_key="one,two")
    script = under_test.script(pause_after=2)
    await under_test.add("aggregated", script=script, max_num_choices=2)
    async with under_test.client() as client:

        def ask(key):
            headers = {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json={"prompt": "say it", "max_tokens": 5}, headers=headers)

        running = [asyncio.create_task(ask("one")) for _ in range(2)]
        await under_test.until(lambda: record(under_test).num_output_tokens == 4)
        waiting = asyncio.create_task(ask("two"))
        await under_test.until(lambda: under_test.router.gateway.core.dispatcher.num_waiting == 1)
        script.resume.set()
        assert [(await call).status_code for call in (*running, waiting)] == [200, 200, 200]
    counts = {name: under_test.metric("kvferry_routing_placements_total", reason=name) for name in PLACEMENT_REASONS}
    assert (counts["by_load"], sum(counts.values())) == (0, 3)
