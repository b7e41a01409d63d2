from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.engine.core import EngineCore
from core.errors import ContextTooLong, InvalidRequest
from core.kv.invariants import find_violations
from core.request import NewRequest
from core.wire.sampling import SamplingParams

VOCAB = 211
BLOCK = 16


def request(name, prompt, stop=(), output=(), choice_index=0, **sampling):
    return NewRequest(
        request_id=name,
        prompt_token_ids=prompt,
        output_token_ids=output,
        choice_index=choice_index,
        stop_token_ids=frozenset(stop),
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
    )


def prompts(count, seed=0, longest=90):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, generator.integers(1, longest)).tolist() for _ in range(count)]


def pool_of(built) -> torch.Tensor:
    return built.pool.cache.pool


def assert_nothing_held(built):
    manager = built.engine.scheduler.kv_cache_manager
    assert manager.usage == 0
    assert find_violations(manager) == []


def test_staggered_requests_in_chunks_give_what_the_model_gives_each_alone(build_tiny, run_engine, oracle):
    built = build_tiny(scheduler__max_num_batched_tokens=24, scheduler__max_num_seqs=6)
    texts = prompts(14)
    found = run_engine(built.engine, [request(f"r{i}", text, max_tokens=5 + i) for i, text in enumerate(texts)], per_step=2)
    for i, text in enumerate(texts):
        assert found[f"r{i}"].finish_reason == "length"
        assert len(found[f"r{i}"].token_ids) == 5 + i
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)
    assert_nothing_held(built)


def test_prefix_hits_change_no_token(build_tiny, run_engine, oracle):
    built = build_tiny(scheduler__max_num_batched_tokens=40)
    common = list(range(10, 80))
    texts = [common + tail for tail in ([], [5], [5, 6, 7], list(range(90, 130)))]
    for number, text in enumerate(texts):
        found = run_engine(built.engine, [request(f"r{number}", text, max_tokens=8)])
        oracle.assert_greedy(text, found[f"r{number}"].token_ids)
        stats = found[f"r{number}"].outputs[0].prefill_stats
        assert stats.num_local_cached_tokens == (64 if number else 0)
    assert built.engine.stats.num_prefix_hit_tokens == 3 * 64


@pytest.mark.slow
def test_preempted_requests_give_the_same_tokens(build_tiny, run_engine, oracle):
    built = build_tiny(cache__num_blocks=12, scheduler__max_num_batched_tokens=32, cache__enable_prefix_caching=False)
    texts = prompts(6, seed=2, longest=40)
    found = run_engine(built.engine, [request(f"r{i}", text, max_tokens=50) for i, text in enumerate(texts)])
    assert built.engine.stats.num_preemptions > 0
    for i, text in enumerate(texts):
        assert len(found[f"r{i}"].token_ids) == 50
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)
    assert_nothing_held(built)


def sampled_requests():
    texts = prompts(8, seed=8, longest=50)
    for i, text in enumerate(texts):
        yield request(
            f"r{i}",
            text,
            max_tokens=20,
            temperature=[0.8, 1.2][i % 2],
            top_p=[1.0, 0.9][i // 4],
            top_k=[0, 40][i % 3 == 0],
            seed=i,
            repetition_penalty=[1.0, 1.2][i % 2],
            frequency_penalty=[0.0, 0.5][i % 4 == 2],
            choice_index=i % 3,
        )


@pytest.mark.slow
def test_random_requests_do_not_depend_on_their_company(build_tiny, run_engine):
    together = run_engine(build_tiny(scheduler__max_num_batched_tokens=50).engine, sampled_requests(), per_step=1)
    lonely = build_tiny()
    for new in sampled_requests():
        assert run_engine(lonely.engine, [new])[new.request_id].token_ids == together[new.request_id].token_ids


@pytest.mark.slow
def test_preemption_does_not_disturb_random_streams_and_penalties(build_tiny, run_engine):
    roomy = run_engine(build_tiny().engine, sampled_requests())
    tight = build_tiny(cache__num_blocks=10, cache__enable_prefix_caching=False)
    found = run_engine(tight.engine, sampled_requests())
    assert tight.engine.stats.num_preemptions > 0
    assert {name: one.token_ids for name, one in found.items()} == {name: one.token_ids for name, one in roomy.items()}


@pytest.mark.slow
def test_another_engine_continues_a_request_token_by_token(build_tiny, run_engine):
    whole = run_engine(build_tiny().engine, sampled_requests())
    first_half, second_half = build_tiny(), build_tiny()
    for new in sampled_requests():
        sampling = SamplingParams(**{**{f: getattr(new.sampling, f) for f in new.sampling.__struct_fields__}, "max_tokens": 1})
        start = run_engine(first_half.engine, [NewRequest(**{**_fields(new), "sampling": sampling})])[new.request_id].token_ids
        rest = run_engine(second_half.engine, [NewRequest(**{**_fields(new), "output_token_ids": start})])[new.request_id]
        assert start + rest.token_ids == whole[new.request_id].token_ids


def _fields(new):
    return {name: getattr(new, name) for name in NewRequest.__dataclass_fields__}


def test_slots_behind_a_sequence_are_zero_whatever_the_block_held(build_tiny, run_engine, oracle):
    built = build_tiny(cache__num_blocks=30, scheduler__max_num_batched_tokens=24)
    pool_of(built)[1:].fill_(float("nan"))
    checked = 0

    def tails_are_zero(engine):
        nonlocal checked
        for running in engine.scheduler.running:
            end = running.num_computed_tokens
            (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(running.request_id)
            if end % BLOCK:
                block = pool_of(built)[blocks[end // BLOCK]]
                assert not block[..., end % BLOCK :, :].any()
                assert bool(block[..., : end % BLOCK, :].any())
                checked += 1

    texts = prompts(10, seed=4)
    found = run_engine(built.engine, [request(f"r{i}", t, max_tokens=20) for i, t in enumerate(texts)], 1, tails_are_zero)
    assert checked > 50
    for i, text in enumerate(texts):
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)


def test_prompt_logprobs_come_once_and_cover_every_chunk(build_tiny, run_engine, oracle):
    built = build_tiny(scheduler__max_num_batched_tokens=17)
    text = prompts(1, seed=9)[0] + list(range(20, 60))
    others = [request(f"o{i}", other, max_tokens=9) for i, other in enumerate(prompts(3, seed=1))]
    for name in ("first", "again"):  # the second time the prompt is cached, and must be computed all the same
        found = run_engine(built.engine, [*others, request(name, text, max_tokens=4, prompt_logprobs=2)])
        given = [output.prompt_logprobs for output in found[name].outputs]
        assert given[1:] == [None] * 3
        expected = oracle.logits(text).log_softmax(-1)
        assert given[0][0] is None
        assert len(given[0]) == len(text)
        for position, entry in enumerate(given[0][1:], start=1):
            row = expected[position - 1]
            assert entry.token_ids[0] == text[position]
            assert entry.logprobs[0] == pytest.approx(float(row[text[position]]), abs=1e-3)
            assert entry.rank == pytest.approx(int((row > row[text[position]]).sum()) + 1, abs=1)
            assert len(entry.token_ids) == 3


def test_prompt_logprobs_of_one_token_are_none(build_tiny, run_engine):
    found = run_engine(build_tiny().engine, [request("r", [7], max_tokens=1, prompt_logprobs=0)])
    assert found["r"].outputs[0].prompt_logprobs == (None,)


def test_logprobs_accompany_every_token_of_requests_that_ask(build_tiny, run_engine, oracle):
    text = list(range(30, 50))
    found = run_engine(
        build_tiny().engine, [request("asks", text, max_tokens=6, logprobs=3), request("silent", text, max_tokens=6)]
    )
    assert all(output.logprobs is None for output in found["silent"].outputs)
    rows = oracle.logits(text + found["asks"].token_ids).log_softmax(-1)[len(text) - 1 :]
    for row, output in zip(rows, found["asks"].outputs, strict=False):
        (entry,) = output.logprobs
        assert entry.token_ids[0] == output.new_token_ids[0] == entry.token_ids[1]
        assert entry.logprobs[1:] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_stop_tokens_are_masked_until_min_tokens(build_tiny, run_engine, oracle):
    text = list(range(40, 60))
    engine = build_tiny().engine
    (first, second, *_) = run_engine(engine, [request("free", text, max_tokens=6)])["free"].token_ids
    stopped = run_engine(engine, [request("stops", text, max_tokens=6, stop={second})])["stops"]
    assert (stopped.token_ids, stopped.finish_reason) == ([first, second], "stop")
    late = run_engine(engine, [request("late", text, max_tokens=6, stop={second}, min_tokens=4)])["late"]
    assert second not in late.token_ids[:4]
    assert len(late.token_ids) >= 4


def test_ends_at_the_longest_length(build_tiny, run_engine, oracle):
    engine = build_tiny(model__max_model_len=40).engine
    text = list(range(50, 80))
    found = run_engine(engine, [request("r", text, max_tokens=100)])["r"]
    assert len(text) + len(found.token_ids) == 40
    assert found.finish_reason == "length"
    oracle.assert_greedy(text, found.token_ids)


def test_aborts_in_every_state_leave_nothing_behind(build_tiny):
    built = build_tiny(cache__num_blocks=20, scheduler__max_num_batched_tokens=16, scheduler__max_num_seqs=3)
    engine = built.engine
    names = [f"r{i}" for i in range(6)]
    for name in names:
        engine.add_request(request(name, list(range(3, 60)), max_tokens=30))
    for _ in range(6):
        engine.step()
    assert engine.abort_requests([*names[:5], "unknown"]) == names[:5]
    assert engine.has_work()
    while engine.has_work():
        assert {output.request_id for output in engine.step()} <= {names[5]}
    assert not engine.has_requests()
    assert_nothing_held(built)


@pytest.mark.parametrize(
    ("new", "error"),
    [
        (request("r", []), InvalidRequest),
        (request("r", [VOCAB]), InvalidRequest),
        (request("r", [-1]), InvalidRequest),
        (request("r", [5], allowed_token_ids=(VOCAB,)), InvalidRequest),
        (request("r", [5], logit_bias={VOCAB: 1.0}), InvalidRequest),
        (request("r", [5], output=[VOCAB + 3]), InvalidRequest),
        (request("r", [5] * 512), ContextTooLong),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(build_tiny, new, error):
    engine = build_tiny().engine
    with pytest.raises(error):
        engine.add_request(new)
    assert not engine.has_requests()


def test_engine_without_requests_has_no_work(build_tiny, run_engine):
    engine = build_tiny().engine
    assert not engine.has_work()
    run_engine(engine, [request("r", [5, 6], max_tokens=2)])
    assert not engine.has_work()
    assert engine.stats.num_running == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_not_finite_ends_alone(build_tiny, run_engine, oracle, temperature):
    built = build_tiny()
    runner = built.engine.runner
    compute_logits = runner.decoder.compute_logits

    def damaged(hidden):
        logits = compute_logits(hidden)
        if len(logits) > 1:
            logits[1, 5] = torch.nan
        return logits

    runner.decoder.compute_logits = damaged
    texts = [list(range(10, 50)), list(range(60, 100))]
    requests = [request("good", texts[0], max_tokens=8), request("bad", texts[1], max_tokens=8, temperature=temperature)]
    found = run_engine(built.engine, requests)
    assert found["good"].finish_reason == "length"
    oracle.assert_greedy(texts[0], found["good"].token_ids)
    last = found["bad"].outputs[-1]
    assert (last.finish_reason, last.error.code, last.error.http_status) == ("error", "internal_error", 500)
    assert found["bad"].token_ids == []
    assert_nothing_held(built)
    runner.decoder.compute_logits = compute_logits
    again = run_engine(built.engine, [request("again", [*texts[1], 7], max_tokens=1)])
    assert again["again"].outputs[0].prefill_stats.num_local_cached_tokens == 0, "the failed request's KV is still a hit"


def test_a_request_that_may_only_stop_but_must_not_is_refused(build_tiny, run_engine):
    engine = build_tiny().engine
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids.*min_tokens = 3"):
        engine.add_request(request("r", [5, 6], stop={2, 9}, allowed_token_ids=(2, 9), min_tokens=3, max_tokens=5))
    found = run_engine(engine, [request("s", [5, 6], stop={2}, allowed_token_ids=(2, 9), min_tokens=3, max_tokens=5)])
    assert set(found["s"].token_ids[:3]) == {9}


def test_a_request_whose_tokens_are_all_masked_ends_alone(build_tiny, run_engine, oracle):
    engine = build_tiny().engine
    prompt = list(range(10, 50))
    bias = {9: float("-inf")}
    found = run_engine(
        engine, [request("good", prompt, max_tokens=8), request("r", [5, 6], allowed_token_ids=(9,), logit_bias=bias)]
    )
    assert found["r"].outputs[-1].error.code == "invalid_request"
    oracle.assert_greedy(prompt, found["good"].token_ids)


def test_request_for_which_the_whole_vocabulary_ends_the_text_is_refused(build_tiny):
    engine = build_tiny().engine
    everything = set(range(VOCAB))
    with pytest.raises(InvalidRequest, match=r"stop_token_ids holds the whole vocabulary.*min_tokens = 1") as caught:
        engine.add_request(request("r", [5, 6], stop=everything, min_tokens=1, max_tokens=5))
    assert caught.value.param == "stop_token_ids"
    engine.add_request(request("s", [5, 6], stop=everything, max_tokens=5))


@pytest.mark.parametrize("async_scheduling", ["off", "on"])
def test_prefix_cache_survives_a_request_whose_tokens_are_all_masked(build_tiny, run_engine, async_scheduling):
    built = build_tiny(scheduler__async_scheduling=async_scheduling)
    prompt, bias = list(range(10, 50)), {9: float("-inf")}
    run_engine(built.engine, [request("before", prompt, max_tokens=1)])
    masked = request("r", [*prompt, 7], allowed_token_ids=(9,), logit_bias=bias)
    assert run_engine(built.engine, [masked])["r"].outputs[-1].error.param == "allowed_token_ids"
    after = run_engine(built.engine, [request("after", [*prompt, 8], max_tokens=1)])["after"].outputs[0]
    assert after.prefill_stats.num_local_cached_tokens == len(prompt) // 16 * 16
    assert_nothing_held(built)


def test_an_overlong_prompt_is_refused_before_it_is_hashed(build_tiny):
    engine = build_tiny().engine
    engine._hasher.extend = lambda *_: pytest.fail("hashed")
    with pytest.raises(ContextTooLong, match="context length of 512"):
        engine.add_request(request("r", [5] * 600))


def test_engine_sleeps_while_blocks_are_about_to_come_back_and_goes_on_with_them(build_tiny, copy_connector):
    connector = copy_connector()
    built = build_tiny(connector, cache__num_blocks=5)
    engine, manager = built.engine, built.engine.scheduler.kv_cache_manager
    engine.add_request(request("r", list(range(10, 40)), max_tokens=20))
    engine.step()
    pinned = manager.block_pool.get_new_blocks(manager.block_pool.num_free_blocks)
    build_meta = connector.scheduler.build_connector_meta

    def give_back(output):
        manager.block_pool.free_blocks(pinned)
        pinned.clear()
        return build_meta(output)

    connector.scheduler.has_pending_block_frees = lambda: bool(pinned)
    engine.step()
    engine.step()  # fills the second block
    engine.step()
    assert not engine.has_work()
    connector.scheduler.build_connector_meta = give_back
    engine.wake()
    engine.step()  # they come behind the decision that lacked them
    assert engine.has_work()
    ends = [output for _ in range(30) if engine.has_work() for output in engine.step() if output.finish_reason]
    assert [output.finish_reason for output in ends] == ["length"]


def test_steps_with_tokens_ask_no_connector_for_blocks(build_tiny, copy_connector):
    connector = copy_connector()
    engine = build_tiny(connector).engine
    engine.add_request(request("r", list(range(10, 40)), max_tokens=4))
    connector.scheduler.has_pending_block_frees = lambda: pytest.fail("asked")
    while not any(output.finish_reason for output in engine.step()):
        pass


def test_writes_of_a_step_are_awaited_before_the_connector_ends_it(build_tiny, copy_connector):
    connector = copy_connector()
    engine = build_tiny(connector).engine
    happened = []
    engine.runner._mark = lambda: lambda: happened.append("synchronized")
    engine.runner._connector._worker.wait_for_save = lambda: happened.append("ended")
    engine.add_request(NewRequest(request_id="r", prompt_token_ids=list(range(10, 80)), sampling=SamplingParams(max_tokens=2)))
    engine.step()
    assert happened == ["synchronized", "ended"]


@pytest.mark.parametrize("failing", ["connector", "EC connector", "runner", "KV events"])
def test_everything_is_shut_down_once_although_one_part_fails(failing):
    closed = []

    def close(part):
        closed.append(part)
        if part == failing:
            raise OSError(part)

    def stub(part, **fields):
        return SimpleNamespace(shutdown=lambda: close(part), close=lambda: close(part), **fields)

    sizes = SimpleNamespace(hash_block_size=BLOCK)
    scheduler = SimpleNamespace(connector=stub("connector"), ec_connector=stub("EC connector"), kv_cache_manager=sizes)
    engine = EngineCore(scheduler, stub("runner"), sizes, VOCAB, [stub("KV events")], grammars=stub("grammars"))
    with pytest.raises(OSError, match=failing):
        engine.shutdown()
    engine.shutdown()
    assert closed == ["connector", "EC connector", "runner", "KV events", "grammars"]


def test_the_encoder_is_shut_down_although_the_connector_fails(build_tiny, monkeypatch):
    runner, closed = build_tiny().engine.runner, []
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_connector", SimpleNamespace(shutdown=lambda: 1 / 0))
        patch.setattr(runner, "_encoder", SimpleNamespace(shutdown=lambda: closed.append(True)))
        with pytest.raises(ZeroDivisionError):
            runner.shutdown()
    assert closed == [True]
