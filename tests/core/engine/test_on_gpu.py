"""A whole engine on a real device: what it says is what the model says, by the rule for bfloat16."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from core.request import NewRequest
from core.wire.sampling import SamplingParams

# Of logits with a spread of several units. bfloat16's is that of ``test_p2p_handoff``; float16 has 3 bits more.
MARGIN = {"bfloat16": 0.35, "float16": 0.05}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(MARGIN))
@pytest.mark.parametrize("attention", ["auto", "triton", "pages", "gather", "sdpa"])
def test_greedy_tokens_on_a_gpu_are_the_models(build_tiny, run_engine, make_oracle, tiny_llama, dtype, attention):
    settings = {"model__device": "cuda", "model__dtype": dtype, "model__attention": attention, "cache__num_blocks": 200}
    built = build_tiny(scheduler__max_num_batched_tokens=40, **settings)
    generator = np.random.default_rng(1)
    texts = [generator.integers(3, 211, generator.integers(1, 90)).tolist() for _ in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    requests = [NewRequest(request_id=f"r{i}", prompt_token_ids=text, sampling=params) for i, text in enumerate(texts)]
    found = run_engine(built.engine, requests, per_step=2)
    rounded = copy.deepcopy(tiny_llama[1].model).to(getattr(torch, dtype)).float()
    oracle = make_oracle(rounded, MARGIN[dtype])
    for i, text in enumerate(texts):
        oracle.assert_greedy(text, found[f"r{i}"].token_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_pool_fills_the_workers_share_of_a_gpu(build_tiny):
    built = build_tiny(model__device="cuda", cache__num_blocks=0, cache__gpu_memory_utilization=0.2)
    _, total = torch.cuda.mem_get_info()
    pool_bytes = built.pool.cache.pool.nbytes
    assert 0.1 * total < pool_bytes < 0.2 * total
