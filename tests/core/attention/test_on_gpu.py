"""The attention backends on a real device: the probe's mixed batch, under every mask, compared with the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention import pages
from core.attention.base import AttentionBatch, AttentionSpec, KVLayout, PagedKVCache
from core.attention.batched import BatchedSdpaBackend
from core.attention.paged_triton import TritonBackend
from core.attention.pages import PagesBackend
from core.attention.sdpa import SdpaBackend
from core.attention.select import AttentionProblem, choose_attention, probe
from core.attention.varlen import VarlenBackend
from tests.support.varlen_kernel import documented_varlen_attn_with_sums

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
@pytest.mark.parametrize("backend", [VarlenBackend, TritonBackend, PagesBackend, BatchedSdpaBackend, SdpaBackend])
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
    assert choice.backend in (VarlenBackend, TritonBackend), choice.backend.name


def assert_many_pages_are_attended(device, dtype, num_seqs, num_pages):
    """Compare decode rows of many shared pages with the reference; a call takes a part of them."""
    block_size, num_blocks, head_dim = 16, min(num_pages, 4096) + 1, 64
    generator = np.random.default_rng(3)
    tables = generator.integers(1, num_blocks, (num_seqs, num_pages))
    seq_lens = num_pages * block_size - generator.integers(0, block_size, num_seqs)
    torch.manual_seed(3)
    pool = torch.randn((num_blocks, 1, 2, block_size, 1, head_dim), device=device).to(dtype)
    query = 8 * torch.randn((num_seqs, 2, head_dim), device=device).to(dtype)  # so that some keys count for much
    batch = AttentionBatch(
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=tables.astype(np.int32),
        slot_mapping=tables[:, -1] * block_size + (seq_lens - 1) % block_size,
    )
    cache, spec = PagedKVCache(pool, KVLayout.NHD), AttentionSpec(2, 1, head_dim, head_dim**-0.5)
    results = [
        backend.attend(0, query, spec, backend.plan(batch)).float() for backend in (PagesBackend(cache), SdpaBackend(cache))
    ]
    torch.testing.assert_close(*results, rtol=0, atol=4e-2 if dtype is torch.bfloat16 else 1e-4)
    assert results[1].abs().max() > 0.2


@pytest.mark.gpu
@pytest.mark.parametrize(("num_seqs", "num_pages"), [(40, 2048), (2, 40_000), (1, 65_535)])
def test_pages_attends_to_more_of_them_than_a_call_of_the_kernel_takes(num_seqs, num_pages):
    """The grid of the kernel takes 65,535 sequences: 81,920 and 80,000 pages in one step, and the longest sequence."""
    assert_many_pages_are_attended(torch.device("cuda"), torch.bfloat16, num_seqs, num_pages)


@pytest.mark.parametrize(("num_seqs", "num_pages"), [(6, 5), (2, 12)])
def test_pages_attends_in_several_calls(monkeypatch, num_seqs, num_pages):
    calls = []

    def kernel(*args, **kwargs):
        calls.append(len(kwargs["seqused_k"]))
        return documented_varlen_attn_with_sums(*args, **kwargs)

    monkeypatch.setattr(PagesBackend, "kernel", staticmethod(kernel))
    monkeypatch.setattr(pages, "MAX_PARTS", 10)
    assert_many_pages_are_attended(torch.device("cpu"), torch.float32, num_seqs, num_pages)
    assert len(calls) == (3 if num_seqs == 6 else 2)
