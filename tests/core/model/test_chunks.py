"""No logit depends on where a prompt is cut, or on the sequences beside it, where the compiled kernels serve."""

from __future__ import annotations

import pytest
import torch

from core.attention.base import KVLayout, PagedKVCache
from core.attention.compiled_prefill import can_compile_prefill
from core.attention.paged_cpu import PagedCpuBackend
from core.model.int8_linear import Int8Linear
from core.model.loader import load_decoder

CASES = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 70}),
}
TOKENS = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(3)).tolist()
OTHERS = torch.randint(0, 97, (130,), generator=torch.Generator().manual_seed(4)).tolist()
needs_library = pytest.mark.skipif(
    not can_compile_prefill(PagedKVCache(torch.zeros(1, 1, 2, 1, 16, 16), KVLayout.HND)),
    reason="core/attention/_paged_prefill.c was not built (make install), or the CPU has no AVX2",
)


@pytest.fixture
def start(tiny_model, paged):
    """Return what starts an empty run of ``num_sequences`` on the backend that serves on a CPU."""

    def prepare(case, dtype, quantization):
        model_type, overrides = CASES[case]
        model = tiny_model(model_type, head_dim=16, **overrides)
        decoder = load_decoder(model.arch, model.weight_files, dtype=dtype, quantization=quantization)
        assert isinstance(decoder._weights.layers[0].qkv, Int8Linear) == (quantization == "int8")

        def begin(num_sequences=1):
            run = paged(decoder, num_sequences)
            pool = run.backend.cache.pool.to(dtype)
            run.backend = PagedCpuBackend(PagedKVCache(pool, KVLayout.HND))
            return run

        return begin

    return prepare


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_logits_of_a_prompt_are_the_same_in_any_chunks_and_beside_another(start, case, dtype, quantization):
    begin = start(case, dtype, quantization)
    whole = begin().step([TOKENS])
    for chunk in (2, 33, 64, 100):
        run = begin()
        parts = [run.step([TOKENS[first : first + chunk]]) for first in range(0, len(TOKENS) - chunk, chunk)]
        parts.append(run.step([TOKENS[sum(map(len, parts)) :]]))
        assert torch.equal(torch.cat(parts), whole), chunk
    beside = begin(2)
    together = torch.cat([beside.step([TOKENS[:70], OTHERS])[:70], beside.step([TOKENS[70:], OTHERS[:1]])[:130]])
    assert torch.equal(together, whole)
