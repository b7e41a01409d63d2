"""The compiled prefill kernel, apart from what ``test_conformance.py`` asks of every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention import compiled_prefill
from core.attention.base import AttentionBatch, AttentionSpec, BatchedSequence, KVLayout, PagedKVCache
from core.attention.compiled_prefill import CompiledPrefill, can_compile_prefill
from core.attention.gathered import GatherKernel
from core.attention.paged_cpu import PagedCpuBackend
from core.testing.older_cpu import KINDS, OLDER, computing_as_on

BLOCK, NUM_PAGES = 16, 20
DTYPES = [torch.float32, torch.bfloat16]
MASKS = [{}, {"sliding_window": 70}, {"chunk_size": 96}]
needs_library = pytest.mark.skipif(
    not can_compile_prefill(PagedKVCache(torch.zeros(1, 1, 2, 1, 16, 16), KVLayout.HND)),
    reason="core/attention/_paged_prefill.c was not built (make install), or the CPU has no AVX2",
)


class Prompt:
    """Random pages, of which a sequence has ``NUM_PAGES`` in any order, and a query at each position."""

    def __init__(self, dtype, head_dim=64, group=3, layout=KVLayout.HND, factor=1.0, **mask) -> None:
        generator = torch.Generator().manual_seed(1)
        inner = (2, BLOCK) if layout is KVLayout.HND else (BLOCK, 2)
        pool = torch.randn(1 + NUM_PAGES, 3, 2, *inner, head_dim, generator=generator).to(dtype)
        self.table = (torch.randperm(NUM_PAGES, generator=generator) + 1).numpy()
        self.query = torch.randn(NUM_PAGES * BLOCK, 2 * group, head_dim, generator=generator).mul(factor).to(dtype)
        self.spec = AttentionSpec(2 * group, 2, head_dim, 0.2, **mask)
        self.cache = PagedKVCache(pool, layout)
        self.kernel = CompiledPrefill(self.cache)

    def attend(self, first, end, kernel=None):
        """Return the result of the queries [first, end), the last of the sequence, in layer 1."""
        kernel = kernel or self.kernel
        sequence = BatchedSequence(0, end - first, end, self.table[: -(-end // BLOCK)])
        output = self.query.new_empty(end - first, *self.query.shape[1:])
        kernel.attend(1, self.query[first:end], kernel.index(sequence, self.spec), output)
        return output

    def exact(self, first, end):
        """Return the same in float64."""
        pages = [pages[torch.from_numpy(self.table)].double() for pages in (self.cache.key(1), self.cache.value(1))]
        if self.cache.layout is KVLayout.HND:
            pages = [each.transpose(1, 2) for each in pages]
        key, value = (each.flatten(0, 1)[:end].repeat_interleave(self.spec.num_heads // 2, 1) for each in pages)
        hidden = torch.ones(end - first, end, dtype=torch.bool)
        for row, position in enumerate(range(first, end)):
            hidden[row, self.spec.first_visible(position) : position + 1] = False
        scores = torch.einsum("qhd,thd->hqt", self.query[first:end].double(), key).mul(self.spec.scale)
        return torch.einsum("hqt,thd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def assert_close(found, expected):
    # In bfloat16 the weights and the result are rounded, each by at most 2 ** -9 of itself.
    rounding = 2**-8 if found.dtype is torch.bfloat16 else 0.0
    assert ((found.double() - expected).abs() <= rounding * (expected.abs() + 1.0) + 2e-5).all()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [KVLayout.HND, KVLayout.NHD])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 256])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_agrees_with_float64(dtype, layout, head_dim, group):
    prompt = Prompt(dtype, head_dim, group, layout)
    for first, end in ((0, 2), (0, 100), (37, 39), (64, 128), (131, 310)):
        assert_close(prompt.attend(first, end), prompt.exact(first, end))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64])
@pytest.mark.parametrize("kind", OLDER)
def test_agrees_with_float64_on_older_cpus_and_wherever_a_prompt_is_cut(dtype, head_dim, kind):
    prompt = Prompt(dtype, head_dim)
    with computing_as_on(compiled_prefill.built_library(), kind):
        whole = prompt.attend(0, 310)
        assert_close(whole, prompt.exact(0, 310))
        for first, end in ((0, 100), (37, 39), (131, 310)):
            assert torch.equal(prompt.attend(first, end), whole[first:end])


@needs_library
def test_a_cpu_without_vectors_of_eight_leaves_prompts_to_torch():
    library = compiled_prefill.built_library()
    assert library.kvferry_has_paged_prefill()
    with computing_as_on(library, "any"):
        assert not library.kvferry_has_paged_prefill()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS[1:])
def test_agrees_with_float64_under_masks(dtype, mask):
    prompt = Prompt(dtype, **mask)
    for first, end in ((0, 69), (0, 310), (65, 200), (191, 193), (192, 320)):
        assert_close(prompt.attend(first, end), prompt.exact(first, end))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunk", [2, 7, 16, 64, 100, 256])
def test_no_result_depends_on_the_chunks_of_a_prompt(dtype, mask, chunk):
    prompt = Prompt(dtype, **mask)
    whole = prompt.attend(0, 310)
    for first in range(0, 310, chunk):
        end = min(first + chunk, 310)
        assert torch.equal(prompt.attend(first, end), whole[first:end]), first


@needs_library
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("num_threads", "num_parts"), [(2, 2), (3, 2), (4, 4), (9, 8), (16, 16)])
def test_threads_share_heads_and_queries_and_change_no_bit(monkeypatch, num_threads, num_parts, mask):
    prompt = Prompt(torch.bfloat16, **mask)
    expected = prompt.attend(100, 200)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(compiled_prefill, "_PAIRS_PER_THREAD", 1)
    index = prompt.kernel.index(BatchedSequence(0, 100, 200, prompt.table[:13]), prompt.spec)
    assert len(index.parts) == num_parts
    done = sorted((head, query) for part in index.parts for head in range(*part.heads) for query in range(100)[part.queries])
    assert done == [(head, query) for head in range(2) for query in range(100)]
    assert torch.equal(prompt.attend(100, 200), expected)


@needs_library
def test_queries_are_shared_by_the_keys_that_they_see(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiled_prefill, "_PAIRS_PER_THREAD", 1)
    spec = AttentionSpec(4, 4, 64, 1.0)
    cuts = compiled_prefill._split(BatchedSequence(0, 300, 300, np.arange(19)), spec)
    assert [heads for _, heads in cuts] == [(0, 4)] * 3
    seen = [sum(range(1, 301)[queries]) for queries, _ in cuts]
    assert max(seen) < 1.05 * min(seen)
    monkeypatch.setattr(compiled_prefill, "_PAIRS_PER_THREAD", 1 << 30)
    assert compiled_prefill._split(BatchedSequence(0, 300, 300, np.arange(19)), spec) == [(slice(0, 300), (0, 4))]


@needs_library
@pytest.mark.parametrize("factor", [1e4, 1e-30])
def test_large_and_tiny_scores_neither_overflow_nor_vanish(factor):
    prompt = Prompt(torch.float32, factor=factor)
    torch.testing.assert_close(prompt.attend(50, 200).double(), prompt.exact(50, 200), rtol=1e-2, atol=1e-3)


@needs_library
def test_a_score_beyond_the_largest_number_weighs_nothing():
    prompt = Prompt(torch.float32, head_dim=16)
    prompt.query[:] = 1.0
    prompt.cache.key(1)[torch.from_numpy(prompt.table[:4])] = -3e38  # the first block of keys: every score is -inf
    found = prompt.attend(100, 200)
    assert found.isfinite().all()
    assert_close(found, prompt.exact(100, 200))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_query_sees_changes_nothing_and_a_visible_nan_shows(dtype, bits, kind):
    prompt = Prompt(dtype, sliding_window=40)
    with computing_as_on(compiled_prefill.built_library(), kind):
        before = prompt.attend(100, 203)
        for plane in (prompt.cache.key(1), prompt.cache.value(1)):
            plane[torch.from_numpy(prompt.table[:3])] = bits  # before the window of the first query
            plane[prompt.table[12], :, 11:] = bits  # behind the last one
        assert torch.equal(prompt.attend(100, 203), before)
        prompt.cache.key(1)[prompt.table[11], 1, 5] = bits
        assert not prompt.attend(100, 203)[90:, 3:].isfinite().any()


@needs_library
def test_refuses_blocks_outside_the_pool_and_too_few_blocks():
    prompt = Prompt(torch.float32)
    with pytest.raises(AssertionError, match="longer than its blocks"):
        prompt.kernel.index(BatchedSequence(0, 10, 33, prompt.table[:2]), prompt.spec)
    prompt.table[2] = prompt.cache.num_blocks
    with pytest.raises(AssertionError, match="outside the pool"):
        prompt.kernel.index(BatchedSequence(0, 10, 33, prompt.table[:3]), prompt.spec)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_kernel_that_takes_its_place(dtype):
    prompt = Prompt(dtype)
    found, expected = prompt.attend(60, 310), prompt.attend(60, 310, GatherKernel(prompt.cache))
    assert_close(found, expected.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_backend_computes_prompts_without_the_library(monkeypatch, dtype):
    monkeypatch.setattr(compiled_prefill, "built_library", lambda: None)
    cache = PagedKVCache(torch.zeros(3, 1, 2, 2, BLOCK, 64, dtype=dtype), KVLayout.HND)
    backend = PagedCpuBackend(cache)
    assert isinstance(backend._prefill, GatherKernel)
    batch = AttentionBatch(
        np.array([0, 5], np.int32), np.array([5], np.int32), np.array([[1]], np.int32), np.arange(BLOCK, BLOCK + 5)
    )
    output = backend.attend(0, torch.randn(5, 4, 64).to(dtype), AttentionSpec(4, 2, 64, 0.1), backend.plan(batch))
    assert torch.equal(output, torch.zeros_like(output))
