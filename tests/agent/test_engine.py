"""A vLLM server as an engine: its facts, requests, answers, failures and death, with a scripted server."""

import asyncio

import pytest

from agent.readings import readings
from agent.releases import MAX_KEPT, HandoffReleases
from agent.server_metrics import HandoffCounts, ServerLoad
from agent.vllm_server import Health, VllmServer
from core.errors import ConfigError, EngineDead
from core.tracing import TraceContext
from core.wire.sampling import SamplingParams
from tests.agent.running_engine import Running, new_request, tokens
from tests.agent.scripted_server import END

# ---- the server ----------------------------------------------------------------------------------------------------------


async def test_what_the_server_says_of_itself(server, running):
    facts = await running.http.facts()
    assert (facts.version, facts.model, facts.max_model_len) == ("0.32.0", "m", 512)
    assert (facts.num_blocks, facts.block_size) == (100, 32)
    load = await running.http.load(5.0)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage, load.num_held_blocks) == (2, 1, 0.5, 7)
    assert load.total_usage == 0.75
    assert load.handoffs == HandoffCounts(4, 15 * 10**9, 30, {"digest": 2, "layout": 5})


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ('block_size="16",effective_attention_block_size="64",num_gpu_blocks="100"', (100, 64)),
        ('block_size="16",effective_attention_block_size="None",num_gpu_blocks="100"', (100, 16)),
        ('block_size="16",num_gpu_blocks="None"', (0, 16)),
        ('model="{\'a\': \\"b\\"}",block_size="16",num_gpu_blocks="100"', (100, 16)),
        (None, (0, 1)),
    ],
    ids=["decode-context parallel", "several sizes", "no number", "a brace in a label", "--disable-log-stats"],
)
async def test_the_size_of_the_server_s_cache(server, running, labels, expected):
    server.cache_info = "" if labels is None else f"vllm:cache_config_info{{{labels}}} 1.0\n"
    facts = await running.http.facts()
    assert (facts.num_blocks, facts.block_size) == expected


@pytest.mark.parametrize(("status", "said"), [(403, "--enable-scale-out"), (404, "--enable-scale-out"), (401, "api_key_file")])
async def test_a_server_that_refuses_token_ids_is_refused_with_the_fix(server, running, status, said):
    server.token_routes = status
    with pytest.raises(ConfigError, match=said):
        await running.http.facts()


async def test_the_api_key_is_sent(server):
    http = VllmServer(server.url, "secret")
    await http.facts()
    await http.close()
    assert server.headers[-1]["authorization"] == "Bearer secret"


async def test_no_proxy_is_asked(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    http = VllmServer(server.url)
    assert await http.health(5.0) is Health.HEALTHY
    await http.close()


# ---- requests ------------------------------------------------------------------------------------------------------------


async def test_a_stream_becomes_the_outputs_of_steps(running):
    outputs = await running.run(new_request(), [tokens(7), tokens(8, 9, finish_reason="length"), {"choices": []}, END])
    assert [output.new_token_ids for output in outputs] == [[7], [8, 9]]
    assert [output.finish_reason for output in outputs] == [None, "length"]
    assert outputs[0].prefill_stats.num_prompt_tokens == 2
    assert outputs[1].prefill_stats is None


async def test_the_account_of_a_stream_comes_with_the_last_output(running):
    account = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}
    outputs = await running.run(new_request(), [tokens(7), tokens(8, finish_reason="length"), account, END])
    assert [output.late_cached_tokens for output in outputs] == [None, 32]
    assert outputs[0].prefill_stats.num_cached_tokens == 0


ERROR = {"error": {"message": "no account", "code": 500}}


@pytest.mark.parametrize(
    "rest", [[], [END], [{"choices": []}, END], [{"choices": [], "usage": {}}, END], [ERROR], ["data: {not json\n\n"]]
)
async def test_a_stream_without_an_account_ends_as_well(running, rest):
    (output,) = await running.run(new_request(), [tokens(8, finish_reason="length"), *rest])
    assert (output.finish_reason, output.late_cached_tokens, output.error) == ("length", None, None)


async def test_the_servers_spans_are_children_of_the_routers_leg(running):
    trace = TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", tracestate="a=1")
    await running.run(new_request(trace=trace), [tokens(7, finish_reason="length"), END])
    headers = running.server.headers[-1]
    assert (headers["traceparent"], headers["tracestate"]) == (trace.traceparent, "a=1")
    await running.run(new_request("s/0"), [tokens(7, finish_reason="length"), END])
    assert "traceparent" not in running.server.headers[-1]


async def test_events_may_be_cut_anywhere(running):
    whole = 'data: {"choices": [{"index": 0, "token_ids": [7], "finish_reason": "stop", "stop_reason": 7}]}\n\n'
    (output,) = await running.run(new_request(), [whole[:20], whole[20:70], whole[70:]])
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([7], "stop", 7)


async def test_a_prompt_for_another_engine_returns_what_the_server_says_of_its_blocks(running):
    params = {"do_remote_prefill": True, "kvferry": "abc"}
    answer = tokens(9, finish_reason="length") | {"kv_transfer_params": params}
    (output,) = await running.run(new_request(needs_handoff=True), (200, answer))
    (body,) = running.server.bodies
    assert (body["stream"], body["sampling_params"]["max_tokens"]) == (False, 1)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert (output.kv_handoff.engine_id, output.kv_handoff.num_tokens) == ("p0", 2)
    await running.run(new_request("d/0", kv_handoff=output.kv_handoff), [tokens(1, finish_reason="length"), END])
    assert running.server.bodies[-1]["kv_transfer_params"] == params


@pytest.mark.parametrize(
    ("usage", "found"),
    [({}, None), ({"prompt_tokens_details": None}, None), ({"prompt_tokens_details": {"cached_tokens": 0}}, 0)],
    ids=["nothing", "no details", "none cached"],
)
async def test_a_prompt_for_another_engine_may_not_tell_what_was_cached(running, usage, found):
    answer = tokens(9, finish_reason="length") | {"kv_transfer_params": {"do_remote_prefill": True}, "usage": usage}
    (output,) = await running.run(new_request(needs_handoff=True), (200, answer))
    assert output.late_cached_tokens == found


async def test_a_handoff_that_no_engine_will_read_comes_back_in_a_request_that_is_refused(running):
    params = {"do_remote_prefill": True, "kvferry": "abc"}
    answer = tokens(9, finish_reason="length") | {"kv_transfer_params": params}
    (output,) = await running.run(new_request(needs_handoff=True), (200, answer))
    running.engine.submit_release(["unknown", output.kv_handoff.transfer_id])
    await running.until(lambda: running.server.calls)
    running.engine.submit_release([output.kv_handoff.transfer_id])
    ((path, body),) = running.server.calls
    assert (path, body["kv_transfer_params"]) == ("/v1/completions", params)
    assert body["model"] not in ("m", "")


@pytest.mark.slow
async def test_only_the_latest_handoffs_are_kept(running):
    releases = HandoffReleases(running.http)
    for number in range(MAX_KEPT + 1):
        releases.keep(str(number), {"kvferry": str(number)})
    releases.release([str(number) for number in range(MAX_KEPT + 1)])
    await running.until(lambda: len(running.server.calls) == MAX_KEPT)
    assert running.server.calls[0][1]["kv_transfer_params"] == {"kvferry": "1"}


async def test_handoffs_of_long_prompts_are_kept_within_a_bound_and_without_their_blocks(running, monkeypatch):
    monkeypatch.setattr("agent.releases.MAX_KEPT_CHARS", 30)
    releases = HandoffReleases(running.http)
    for number in range(4):
        params = {"do_remote_prefill": True, "kvferry": 10 * str(number), "remote_block_ids": [[1, 2, 3]]}
        releases.keep(str(number), params)
    releases.release(["1"])
    releases.keep("4", {"do_remote_prefill": True, "kvferry": 10 * "4"})
    releases.release([str(number) for number in range(5)])
    await running.until(lambda: len(running.server.calls) == 4)
    brought = [body["kv_transfer_params"] for _, body in running.server.calls]
    assert brought == [{"do_remote_prefill": True, "kvferry": 10 * name} for name in "1234"]


async def test_a_handoff_of_another_connector_ends_with_its_lease(running):
    answer = tokens(9, finish_reason="length") | {"kv_transfer_params": {"do_remote_prefill": True}}
    (output,) = await running.run(new_request(needs_handoff=True), (200, answer))
    running.engine.submit_release([output.kv_handoff.transfer_id])
    await running.run(new_request("r2/0"), [tokens(1, finish_reason="length"), END])
    assert running.server.calls == []


async def test_output_so_far_becomes_prompt_and_choices_have_seeds_of_their_own(running):
    sampling = SamplingParams(max_tokens=10, min_tokens=3, seed=40, temperature=0.5)
    for choice, before in ((0, ()), (1, ()), (0, (7, 8))):
        request = new_request(f"r/{choice}", sampling=sampling, choice_index=choice, output_token_ids=before, priority=choice)
        await running.run(request, [tokens(1, finish_reason="length"), END])
    bodies = running.server.bodies
    assert [body["sampling_params"]["seed"] for body in bodies][:2] == [40, 41]
    assert bodies[2]["sampling_params"]["seed"] not in (40, 41)
    assert bodies[2]["token_ids"] == [5, 6, 7, 8]
    assert [bodies[2]["sampling_params"][name] for name in ("max_tokens", "min_tokens")] == [8, 1]
    assert ["priority" in body for body in bodies] == [False, True, False]


async def test_logprobs_are_the_sampled_token_and_then_the_likeliest(running):
    def candidate(token_id, rank):
        return {"token_id": token_id, "logprob": -rank / 10, "rank": rank}

    content = candidate(9, 5) | {"top_logprobs": [candidate(9, 5), candidate(1, 1), candidate(2, 2)]}
    chunk = tokens(9, finish_reason="length", logprobs={"content": [content]})
    (output,) = await running.run(new_request(sampling=SamplingParams(logprobs=2)), [chunk, END])
    assert running.server.bodies[0]["sampling_params"]["logprobs"] == 3
    assert (output.logprobs[0].token_ids, output.logprobs[0].rank) == ((9, 1, 2), 5)


@pytest.mark.parametrize(("limit", "wanted", "asked"), [(5, 5, 5), (5, 4, 5), (50, 20, 21), (20, 20, 20), (20, 0, 0)])
async def test_a_server_is_asked_for_no_more_logprobs_than_it_allows(running, limit, wanted, asked):
    running.server.max_logprobs = limit
    await running.http.facts()
    request = new_request(sampling=SamplingParams(logprobs=wanted))
    (output,) = await running.run(request, [tokens(9, finish_reason="length"), END])
    assert (output.error, [body["sampling_params"]["logprobs"] for body in running.server.bodies]) == (None, [asked])


async def test_more_logprobs_than_a_server_allows_are_refused_with_its_limit(running):
    running.server.max_logprobs = 5
    await running.http.facts()
    (output,) = await running.run(new_request(sampling=SamplingParams(logprobs=6)), None)
    assert (output.error.code, "max allowed: 5" in output.error.message) == ("invalid_request", True)


async def test_logprobs_of_the_prompt_come_with_a_whole_answer(running):
    rows = [None, {"6": {"logprob": -1.5, "rank": 3}, "1": {"logprob": -0.1, "rank": 1}}]
    answer = tokens(7, 8, finish_reason="length") | {"prompt_logprobs": rows}
    (output,) = await running.run(new_request(sampling=SamplingParams(prompt_logprobs=1)), (200, answer))
    assert running.server.bodies[0]["stream"] is False
    first, second = output.prompt_logprobs
    assert (first, second.token_ids, second.rank) == (None, (6, 1), 3)
    assert output.new_token_ids == [7, 8]


# ---- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((400, {"error": {"message": "too long", "code": 400}}), "invalid_request"),
        ((429, {"error": {"message": "full", "code": 429}}), "overloaded"),
        ((500, {"error": {"message": "oh", "code": 500}}), "engine_dead"),
        ((502, "bad gateway"), "engine_dead"),
        ((200, "no json"), "engine_dead"),
        ([tokens(1), {"error": {"message": "load failed", "code": 500}}], "engine_dead"),
        ([tokens(1), "data: {\n\n"], "engine_dead"),
        ([tokens(1)], "engine_dead"),
        ([tokens(1), END], "engine_dead"),
    ],
    ids=["400", "429", "500", "no error body", "no answer", "in a stream", "garbage", "cut", "no end"],
)
async def test_each_failure_ends_the_request_with_one_error(running, answer, code):
    outputs = await running.run(new_request(), answer)
    assert [output.error.code for output in outputs if output.error] == [code]
    assert outputs[-1].error is not None
    await running.until(lambda: running.engine.num_requests == 0)
    assert running.engine.is_alive()


async def test_an_aborted_request_ends_at_the_server_too(running):
    running.server.answers.append([tokens(1), None])
    running.engine.submit_add([new_request()])
    await running.until(lambda: running.outputs)
    running.engine.submit_abort(["r/0", "unknown/0"])
    await running.until(lambda: not running.server.num_open)
    assert running.engine.num_requests == 0
    assert len(running.outputs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["frozen", "unhealthy"])
async def test_a_lost_server_is_reported_once_and_takes_no_more_requests(server, how):
    running = Running(server, patience_s=0.1)
    running.engine.start()
    await running.until(lambda: running.engine.load.num_held_blocks == 7)
    server.answers.append([tokens(1), None])
    running.engine.submit_add([new_request()])
    await running.until(lambda: running.outputs)
    server.is_healthy = how != "unhealthy"
    if how == "frozen":
        server.thawed.clear()
    await running.until(lambda: running.deaths)
    assert not running.engine.is_alive()
    with pytest.raises(EngineDead):
        running.engine.submit_add([new_request("s/0")])
    await asyncio.sleep(0.1)
    assert len(running.deaths) == 1
    server.thawed.set()
    await running.http.close()


async def test_gauges_have_the_servers_values_and_tell_a_leak(server):
    running = Running(server, patience_s=30.0)
    running.engine.start()
    await running.until(lambda: running.engine.load.num_held_blocks == 7)
    found = {metric.name: read for metric, read in readings(running.engine, 100, lambda: None, "prefill").items()}
    values = {name: read() for name, read in found.items()}
    assert (values["num_requests_running"], values["kv_cache_usage_perc"], values["kv_leased_blocks"]) == (2, 0.5, 7)
    assert values["kv_leaked_blocks"] == 0
    running.engine.load = ServerLoad(kv_cache_usage=0.04)
    assert found["kv_leaked_blocks"]() == 4
    await asyncio.to_thread(running.engine.stop, 20)
    await running.http.close()
