"""The attention backends on a real device: the probe's mixed batch, under every mask, beside the reference."""

from __future__ import annotations

import pytest
import torch

from core.attention.base import AttentionSpec
from core.attention.batched import BatchedSdpaBackend
from core.attention.pages import PagesBackend
from core.attention.sdpa import SdpaBackend
from core.attention.select import AttentionProblem, choose_attention, probe
from core.attention.varlen import VarlenBackend

SHAPES = [(9, 3, 64), (32, 8, 128), (8, 1, 256)]


def problem(dtype: torch.dtype, block_size: int, shape: tuple[int, int, int]) -> AttentionProblem:
    heads, kv_heads, head_dim = shape
    specs = (
        AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5),
        AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, sliding_window=128),
        AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, chunk_size=8192),
    )
    return AttentionProblem(torch.device("cuda"), dtype, specs, 3, block_size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", [VarlenBackend, PagesBackend, BatchedSdpaBackend, SdpaBackend])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_a_backend_agrees_with_the_reference(backend, dtype, block_size):
    for shape in SHAPES:
        failure = probe(backend, problem(dtype, block_size, shape))
        if backend is VarlenBackend and failure is not None and "differs" not in failure:
            pytest.skip(f"no kernel for it here: {failure}")
        assert failure is None, shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_gets_a_backend_whose_steps_can_be_recorded():
    choice = choose_attention(problem(torch.bfloat16, 64, SHAPES[1]))
    assert choice.backend in (VarlenBackend, PagesBackend), choice.backend.name
