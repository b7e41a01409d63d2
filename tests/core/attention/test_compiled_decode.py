"""The compiled decode kernel, apart from what ``test_conformance.py`` asks of every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention import compiled_decode
from core.attention.base import AttentionBatch, AttentionSpec, BatchedSequence, KVLayout, PagedKVCache
from core.attention.compiled_decode import CompiledDecode, can_compile_decode
from core.attention.paged_cpu import PagedCpuBackend
from core.testing.older_cpu import KINDS, OLDER, computing_as_on

BLOCK = 16
LENGTHS = (1, 3, 16, 17, 100, 259)
DTYPES = [torch.float32, torch.bfloat16]
needs_library = pytest.mark.skipif(
    not can_compile_decode(PagedKVCache(torch.zeros(1, 1, 2, 1, 16, 16), KVLayout.HND)),
    reason="core/attention/_paged_decode.c was not built: make install, or pip install --editable .",
)


def make(dtype, head_dim=64, group=3, layout=KVLayout.HND):
    """Return a kernel over random pages, one sequence per length, and a query for each."""
    generator = torch.Generator().manual_seed(1)
    num_pages = [-(-length // BLOCK) for length in LENGTHS]
    inner = (2, BLOCK) if layout is KVLayout.HND else (BLOCK, 2)
    pool = torch.randn(1 + sum(num_pages), 3, 2, *inner, head_dim, generator=generator).to(dtype)
    ids = iter((torch.randperm(sum(num_pages), generator=generator) + 1).tolist())
    tables = [np.array([next(ids) for _ in range(count)]) for count in num_pages]
    sequences = [BatchedSequence(n, n + 1, *each) for n, each in enumerate(zip(LENGTHS, tables, strict=True))]
    query = torch.randn(len(LENGTHS), 2 * group, head_dim, generator=generator).to(dtype)
    return CompiledDecode(PagedKVCache(pool, layout)), sequences, query, AttentionSpec(2 * group, 2, head_dim, 0.2)


def exact(kernel, sequences, query, spec, layer):
    """Return the same in float64."""
    cache, rows = kernel.cache, []
    for sequence, each in zip(sequences, query.double(), strict=True):
        pages = [pages[torch.from_numpy(sequence.block_ids)].double() for pages in (cache.key(layer), cache.value(layer))]
        if cache.layout is KVLayout.HND:
            pages = [each.transpose(1, 2) for each in pages]
        key, value = (each.flatten(0, 1)[: sequence.seq_len].repeat_interleave(spec.num_heads // 2, 1) for each in pages)
        weights = torch.einsum("hd,thd->ht", each, key).mul(spec.scale).softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", weights, value))
    return torch.stack(rows)


def check(kernel, sequences, query, spec):
    found = kernel.attend(1, query, kernel.index(sequences, spec))
    expected = exact(kernel, sequences, query, spec, 1)
    assert found.dtype is query.dtype
    rounding = 2**-8 if query.dtype is torch.bfloat16 else 0.0  # the result is rounded once
    assert ((found.double() - expected).abs() <= rounding * expected.abs() + 1e-5).all()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [KVLayout.HND, KVLayout.NHD])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 9])
def test_agrees_with_float64(dtype, layout, head_dim, group):
    check(*make(dtype, head_dim, group, layout))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize("kind", OLDER)
def test_agrees_with_float64_on_older_cpus(dtype, head_dim, kind):
    with computing_as_on(compiled_decode.built_library(), kind):
        check(*make(dtype, head_dim))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_of_a_sequence_does_not_depend_on_the_others(dtype):
    kernel, sequences, query, spec = make(dtype)
    together = kernel.attend(2, query, kernel.index(sequences, spec))
    for number, sequence in enumerate(sequences):
        alone = kernel.attend(2, query[number : number + 1], kernel.index([sequence], spec))
        assert torch.equal(alone[0], together[number])


@needs_library
@pytest.mark.parametrize("num_threads", [2, 5, 64])
def test_threads_share_the_work_and_change_no_bit(monkeypatch, num_threads):
    kernel, sequences, query, spec = make(torch.bfloat16)
    expected = kernel.attend(0, query, kernel.index(sequences, spec))
    monkeypatch.setattr(compiled_decode, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    index = kernel.index(sequences, spec)
    assert 1 < len(index.parts) <= num_threads
    assert [item for part in index.parts for item in range(*part)] == list(range(2 * len(LENGTHS)))
    assert torch.equal(kernel.attend(0, query, index), expected)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1e4, 1e-30])
def test_large_and_tiny_scores_neither_overflow_nor_vanish(dtype, factor):
    kernel, sequences, query, spec = make(dtype)
    query = query * factor
    found = kernel.attend(0, query, kernel.index(sequences, spec))
    torch.testing.assert_close(found.double(), exact(kernel, sequences, query, spec, 0), rtol=1e-2, atol=1e-3)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_visible_key_that_is_no_number_is_seen_in_the_result(dtype, bits, kind):
    kernel, sequences, query, spec = make(dtype)
    page = int(sequences[4].block_ids[2])
    with computing_as_on(compiled_decode.built_library(), kind):
        before = kernel.attend(0, query, kernel.index(sequences, spec))
        kernel.cache.key(0)[page, 1, 5] = bits
        found = kernel.attend(0, query, kernel.index(sequences, spec))
    assert not found[4, 3:].isfinite().any()
    assert torch.equal(found[4, :3], before[4, :3])
    assert torch.equal(found[5], before[5])


@needs_library
def test_refuses_blocks_outside_the_pool():
    kernel, sequences, _, spec = make(torch.float32)
    sequences[2].block_ids[0] = kernel.cache.num_blocks
    with pytest.raises(AssertionError, match="outside the pool"):
        kernel.index(sequences, spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backend_decodes_without_the_library(monkeypatch, dtype):
    monkeypatch.setattr(compiled_decode, "built_library", lambda: None)
    cache = PagedKVCache(torch.zeros(3, 1, 2, 2, BLOCK, 64, dtype=dtype), KVLayout.HND)
    backend = PagedCpuBackend(cache)
    assert not isinstance(backend._decode, CompiledDecode)
    batch = AttentionBatch(
        np.array([0, 1], np.int32), np.array([5], np.int32), np.array([[1]], np.int32), np.array([BLOCK + 4], np.int64)
    )
    output = backend.attend(0, torch.randn(1, 4, 64).to(dtype), AttentionSpec(4, 2, 64, 0.1), backend.plan(batch))
    assert torch.equal(output, torch.zeros_like(output))
