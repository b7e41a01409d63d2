"""Recorded decode steps give what eager ones give; a replay is the eager function on the recorded tensors (no GPU needed)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention.base import AttentionBatch
from core.attention.batched import BatchedSdpaBackend
from core.engine.cuda.cuda_graphs import CudaRecorder, batch_sizes, padded_batch
from core.request import NewRequest
from core.wire.sampling import SamplingParams

VOCAB = 211


class CallAgain:
    """A recorder whose replay calls the function again, on the tensors' current content."""

    def __init__(self):
        self.num_recorded = self.num_replays = 0
        self.has_given_back = False

    def give_back(self):
        self.has_given_back = True

    def record(self, run):
        output = run()
        self.num_recorded += 1

        def replay():
            self.num_replays += 1
            output.copy_(run())

        return output, replay


def requests(count, max_tokens=12, **sampling):
    generator = np.random.default_rng(5)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    prompts = [generator.integers(3, VOCAB, generator.integers(1, 60)).tolist() for _ in range(count)]
    return [NewRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=params) for i, prompt in enumerate(prompts)]


def tokens(found):
    return {request_id: finished.token_ids for request_id, finished in found.items()}


@pytest.fixture
def build_recorded(build_tiny):
    """Return a builder of an engine with graphs on the CPU, and of its recorder."""

    def build(sizes=(1, 2, 4, 8), **settings):
        built = build_tiny(model__attention="gather", model__max_model_len=128, **settings)
        recorder = CallAgain()
        built.engine.runner.record_graphs(recorder, sizes, built.max_model_len)
        return built, recorder

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 7}, {"logprobs": 2}], ids=["greedy", "random", "logprobs"]
)
def test_replayed_steps_give_the_tokens_of_eager_ones(build_tiny, build_recorded, run_engine, sampling):
    built, recorder = build_recorded(scheduler__max_num_batched_tokens=48)
    found = run_engine(built.engine, requests(7, **sampling), per_step=2)
    expected = run_engine(build_tiny(scheduler__max_num_batched_tokens=48).engine, requests(7, **sampling), per_step=2)
    assert tokens(found) == tokens(expected)
    assert recorder.num_replays > 10


def test_greedy_tokens_are_the_models(build_recorded, run_engine, oracle):
    built, _ = build_recorded()
    texts = requests(5)
    found = run_engine(built.engine, texts)
    for new in texts:
        oracle.assert_greedy(new.prompt_token_ids, found[new.request_id].token_ids)


def test_padding_rows_write_into_the_null_block_only(build_recorded, run_engine):
    built, recorder = build_recorded(sizes=(8,))
    pool = built.pool.cache.pool
    pool[1:] = 0

    def check(engine):
        held = {i for r in engine.scheduler.running for i in engine.scheduler.kv_cache_manager.get_block_ids(r.request_id)[0]}
        used = {i for i in range(1, built.num_blocks) if pool[i].any()}
        assert used <= held | freed
        freed.update(held)

    freed = set()
    run_engine(built.engine, requests(3), after_step=check)
    assert recorder.num_replays
    assert pool[0].any()


def test_only_decode_steps_within_the_recorded_sizes_are_replayed(build_recorded, run_engine):
    built, recorder = build_recorded(sizes=(1, 2))
    run_engine(built.engine, requests(3, max_tokens=6))
    assert recorder.num_replays == 0  # three sequences at a time
    run_engine(built.engine, [NewRequest(request_id="long", prompt_token_ids=[5] * 9, sampling=SamplingParams(max_tokens=6))])
    assert recorder.num_replays == 5  # the prompt is no decode step


def test_a_graph_is_recorded_for_every_size_and_width(build_recorded):
    built, recorder = build_recorded(sizes=(1, 4))
    widths = built.engine.runner._attention.graph_widths(-(-built.max_model_len // 16))
    assert recorder.num_recorded == 2 * len(widths)


def test_a_backend_without_graphs_runs_eagerly_and_the_log_says_so(build_tiny, run_engine, caplog):
    built = build_tiny()
    recorder = CallAgain()
    built.engine.runner.record_graphs(recorder, (1, 2), built.max_model_len)
    assert "decode_graphs_off" in caplog.text
    assert recorder.num_recorded == 0
    assert len(run_engine(built.engine, requests(2))) == 2


class Fails(CallAgain):
    """A recorder that fails at its third step."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def record(self, run):
        if self.num_recorded == 2:
            raise self.error
        return super().record(run)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("capture failed")])
def test_a_recording_that_fails_leaves_every_step_to_eager_execution(build_tiny, run_engine, caplog, error):
    built = build_tiny(model__attention="gather", model__max_model_len=128)
    recorder = Fails(error)
    built.engine.runner.record_graphs(recorder, (1, 2), built.max_model_len)
    assert recorder.num_recorded == 2
    assert recorder.has_given_back
    assert "decode_graphs_off" in caplog.text
    assert str(error) in caplog.text
    assert len(run_engine(built.engine, requests(2))) == 2
    assert recorder.num_replays == 0


def test_steps_too_large_to_be_worth_recording_run_eagerly(build_tiny, build_recorded, run_engine, monkeypatch):
    monkeypatch.setattr(BatchedSdpaBackend, "max_graph_blocks", 8)
    built, recorder = build_recorded(sizes=(1, 4))  # at most 8 blocks: all widths of one, 1 and 2 of four
    assert recorder.num_recorded == 4 + 2
    prompts = requests(4, max_tokens=20)
    found = run_engine(built.engine, prompts)
    assert recorder.num_replays < 19
    assert tokens(found) == tokens(run_engine(build_tiny(model__max_model_len=128).engine, prompts))


def replayed_and_eager(built):
    """Return the hidden states of a step of three sequences, computed twice."""
    runner = built.engine.runner
    for new in requests(3, max_tokens=40):
        built.engine.add_request(new)
    built.engine.step()
    while len(built.engine.scheduler.running) < 3 or any(
        r.num_computed_tokens < r.num_prompt_tokens for r in built.engine.scheduler.running
    ):
        built.engine.step()
    inputs = runner._batch.prepare({f"r{i}": 1 for i in range(3)})
    rows = np.arange(3)
    with torch.inference_mode():
        assert runner.graphs.run(inputs, runner._input_ids(inputs)) is not None
        replayed = runner._forward(inputs, rows).clone()
        runner.graphs = None
        return replayed, runner._forward(inputs, rows)


def test_hidden_states_of_a_replay_equal_those_of_an_eager_step(build_recorded):
    torch.testing.assert_close(*replayed_and_eager(build_recorded(sizes=(4,))[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, (1,)), (3, (1, 2, 3)), (20, (1, 2, 4, 8, 16, 20)), (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64))],
)
def test_batch_sizes_end_with_the_largest_batch(largest, expected):
    assert batch_sizes(largest) == expected


def test_batch_sizes_end_at_512():
    assert batch_sizes(4096)[-1] == 512


def test_padding_rows_are_sequences_of_one_token_in_the_null_block():
    batch = AttentionBatch(
        query_start_loc=np.arange(3, dtype=np.int32),
        seq_lens=np.array([20, 5], dtype=np.int32),
        block_tables=np.array([[3, 4], [5, 9]], dtype=np.int32),
        slot_mapping=np.array([4 * 16 + 3, 5 * 16 + 4]),
    )
    padded = padded_batch(batch, 4)
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.seq_lens.tolist() == [20, 5, 1, 1]
    assert padded.block_tables.tolist() == [[3, 4], [5, 9], [0, 0], [0, 0]]
    assert padded.slot_mapping.tolist() == [67, 84, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02), ("float32", 1e-4)])
@pytest.mark.parametrize("attention", ["auto", "triton", "pages", "gather"])
def test_hidden_states_of_a_cuda_graph_are_those_of_an_eager_step(build_tiny, dtype, tolerance, attention):
    """They have a root mean square of 1; a padded step may be multiplied by another kernel, which rounds otherwise."""
    if dtype == "float32" and attention in ("triton", "pages"):
        pytest.skip("its kernel takes 16 bits")
    settings = {"model__device": "cuda", "model__dtype": dtype, "model__attention": attention}
    built = build_tiny(scheduler__async_scheduling="off", scheduler__max_num_seqs=8, **settings)
    torch.testing.assert_close(*replayed_and_eager(built), rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_replay_what_eager_steps_compute(build_tiny, run_engine):
    """In float32, where no two logits are so close that rounding decides."""
    settings = {"model__device": "cuda", "model__dtype": "float32", "cache__num_blocks": 200}
    eager = build_tiny(model__cuda_graphs=False, **settings)
    recorded = build_tiny(**settings)
    assert isinstance(recorded.engine.runner.graphs._recorder, CudaRecorder)
    assert len(recorded.engine.runner.graphs)
    assert tokens(run_engine(recorded.engine, requests(7), per_step=2)) == tokens(
        run_engine(eager.engine, requests(7), per_step=2)
    )
