"""Recorded decode steps and a device's memory: what happens when it ends, and whether they stay within what is kept for them.

Each check runs on a real device, and small on the stand-in for one, which shows that the check itself works.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.config_workers import SchedulerSection
from core.engine.cuda import device_memory
from core.engine.cuda.cuda_graphs import CudaRecorder, batch_sizes
from core.engine.cuda.device_memory import DeviceMemory, measure, pool_bytes
from core.engine.trial_steps import run_largest_step, run_widest_decode
from core.request import NewRequest
from core.wire.sampling import SamplingParams
from tests.support.fake_cuda import ClaimedCuda

MIB = 1 << 20
NO_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a CUDA device, where there is none")


@pytest.fixture
def cuda(build_tiny):
    device = ClaimedCuda()
    with device.installed():
        yield device


def texts():
    generator = np.random.default_rng(5)
    return [generator.integers(3, 211, length).tolist() for length in (5, 40, 17)]


def assert_recording_that_runs_out_of_memory_is_survived(build_tiny, run_engine, caplog, *, is_recording, **settings):
    """Let memory end in the first run of a step, or in its recording; return what the worker then says."""
    built = build_tiny(model__device="cuda", model__cuda_graphs=False, model__max_model_len=128, **settings)
    runner, device = built.engine.runner, built.pool.cache.device
    compute, taken = runner._compute, []

    def greedy_for_memory(*args):
        if torch.cuda.is_current_stream_capturing() == is_recording and len(taken) < 40:
            taken.append(torch.empty(128 * MIB, dtype=torch.uint8, device=device))
        return compute(*args)

    runner._compute = greedy_for_memory
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 96 * MIB) / total)
    try:
        runner.record_graphs(CudaRecorder(device), batch_sizes(8), built.max_model_len)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(runner.graphs) == 0
    assert "decode_graphs_off" in caplog.text
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    requests = [NewRequest(request_id=f"r{i}", prompt_token_ids=text, sampling=params) for i, text in enumerate(texts())]
    found = run_engine(built.engine, requests)
    return [found[request.request_id].token_ids for request in requests]


@pytest.mark.gpu
@pytest.mark.parametrize("is_recording", [False, True], ids=["first run", "recording"])
def test_a_worker_serves_behind_a_recording_that_ran_out_of_memory(build_tiny, run_engine, caplog, make_oracle, is_recording):
    settings = {"model__dtype": "bfloat16", "is_recording": is_recording}
    found = assert_recording_that_runs_out_of_memory_is_survived(build_tiny, run_engine, caplog, **settings)
    assert [len(tokens) for tokens in found] == [9, 9, 9]


@pytest.mark.slow
@NO_DEVICE
@pytest.mark.parametrize("is_recording", [False, True], ids=["first run", "recording"])
def test_the_stand_in_serves_behind_one(build_tiny, run_engine, caplog, oracle, cuda, is_recording):
    settings = {"model__dtype": "float32", "model__attention": "gather", "is_recording": is_recording}
    found = assert_recording_that_runs_out_of_memory_is_survived(build_tiny, run_engine, caplog, **settings)
    for text, tokens in zip(texts(), found, strict=True):
        oracle.assert_greedy(text, tokens)
    assert "out of memory" in caplog.text


@pytest.fixture
def long_context_model(tmp_path):
    """Return a builder of a random model, small but for its layers and its context."""

    def build(num_layers, max_tokens):
        torch.manual_seed(2)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": num_layers}
        sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": max_tokens}
        LlamaForCausalLM(LlamaConfig(**heads, **sizes, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path / "long")
        (tmp_path / "long" / "tokenizer.json").write_text(json.dumps({}))
        return str(tmp_path / "long")

    return build


def graphs_and_what_is_kept_for_them(build_tiny, model, max_tokens, num_seqs, **settings):
    """Record the steps of a model; return their number, the bytes that they took and those that are kept for them."""
    blocks = {"cache__block_size": 64, "cache__num_blocks": 2 + max_tokens // 64, "scheduler__max_num_seqs": num_seqs}
    built = build_tiny(model__name=model, model__device="cuda", model__cuda_graphs=False, **blocks, **settings)
    runner, pool = built.engine.runner, built.pool
    backend, dtype, device = type(runner._attention), pool.cache.dtype, pool.cache.device
    section = SchedulerSection(max_num_seqs=num_seqs, max_num_batched_tokens=512)
    memory = measure(
        device,
        lambda: run_largest_step(runner.decoder, backend, pool.config, section, dtype),
        lambda: run_widest_decode(runner.decoder, backend, pool.config, section, dtype, built.max_model_len),
    )
    before, _ = torch.cuda.mem_get_info()
    runner.record_graphs(CudaRecorder(device), batch_sizes(num_seqs), built.max_model_len)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    plenty = DeviceMemory(total=1 << 40, free=1 << 40, weights=0, activations=0, decode=memory.decode)
    kept = pool_bytes(plenty, 0.5, has_graphs=False) - pool_bytes(plenty, 0.5)
    return len(runner.graphs), before - after, kept


@pytest.mark.gpu
@pytest.mark.parametrize(("attention", "num_widths"), [("triton", 1), ("pages", 10)])
def test_graphs_of_a_long_context_stay_within_what_is_kept_for_them(build_tiny, long_context_model, attention, num_widths):
    """As many layers as an 8B model has, 128K tokens of context, 64 sequences."""
    model = long_context_model(32, 131_072)
    settings = {"model__dtype": "bfloat16", "model__attention": attention}
    number, taken, kept = graphs_and_what_is_kept_for_them(build_tiny, model, 131_072, 64, **settings)
    print(f"{number} graphs took {taken / MIB:,.0f} MiB, {kept / MIB:,.0f} MiB are kept for them")
    assert number >= num_widths * len(batch_sizes(64))
    assert taken <= kept


@pytest.mark.slow
@NO_DEVICE
def test_the_stand_in_records_what_fits(build_tiny, long_context_model, cuda):
    settings = {"model__dtype": "float32", "model__attention": "gather"}
    number, taken, kept = graphs_and_what_is_kept_for_them(build_tiny, long_context_model(2, 2048), 2048, 4, **settings)
    assert (number, taken) == (3 * 6, 0)  # 1, 2 and 4 sequences of 1, 2, 4, ... 32 blocks
    assert kept == device_memory._GRAPH_BYTES
    assert cuda.num_streams == 1  # the recorder's: each that multiplies has memory of its own in cuBLAS
