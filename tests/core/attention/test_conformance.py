"""Every backend in every layout against a dense float64 oracle.

The pool around the batch is NaN: one slot too many, and the output is NaN. ``varlen`` runs here on a stand-in kernel written
from the documentation of ``varlen_attn``; that shows the translation of its arguments, not the CUDA kernel.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.attention.base import KVLayout
from core.attention.batched import BatchedSdpaBackend
from core.attention.paged_cpu import PagedCpuBackend
from core.attention.pages import PagesBackend
from core.attention.sdpa import SdpaBackend
from core.attention.varlen import VarlenBackend
from tests.support.varlen_kernel import documented_varlen_attn, documented_varlen_attn_with_sums


class UncompiledCpuBackend(PagedCpuBackend):
    may_be_compiled = False


class StandInVarlenBackend(VarlenBackend):
    kernel = documented_varlen_attn


class StandInPagesBackend(PagesBackend):
    kernel = documented_varlen_attn_with_sums


BACKENDS = [
    pytest.param(SdpaBackend, KVLayout.HND, id="sdpa-HND"),
    pytest.param(SdpaBackend, KVLayout.NHD, id="sdpa-NHD"),
    pytest.param(PagedCpuBackend, KVLayout.HND, id="paged_cpu-HND"),
    pytest.param(PagedCpuBackend, KVLayout.NHD, id="paged_cpu-NHD"),
    pytest.param(UncompiledCpuBackend, KVLayout.HND, id="paged_cpu-uncompiled-HND"),
    pytest.param(UncompiledCpuBackend, KVLayout.NHD, id="paged_cpu-uncompiled-NHD"),
    pytest.param(StandInVarlenBackend, KVLayout.NHD, id="varlen-NHD"),
    pytest.param(StandInPagesBackend, KVLayout.NHD, id="pages-NHD"),
    pytest.param(BatchedSdpaBackend, KVLayout.NHD, id="gather-NHD"),
]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("backend_type", "layout"), BACKENDS)]
HEADS = [pytest.param(9, 3, id="grouped"), pytest.param(4, 4, id="multi-head"), pytest.param(6, 1, id="multi-query")]
MASKS = [
    pytest.param({}, id="full"),
    pytest.param({"sliding_window": 20}, id="sliding-window"),
    pytest.param({"sliding_window": 1}, id="window-of-one"),
    pytest.param({"chunk_size": 24}, id="chunked-local"),
    pytest.param({"chunk_size": 32}, id="chunks-of-whole-blocks"),
]


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_reads_scattered_partly_filled_pages(paged, backend_type, layout, num_heads, num_kv_heads, block_size):
    seqs = [paged.Seq(n) for n in (1, 15, 16, 17, 64, 65, 65, 130)]
    case = paged.Case(seqs, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)
    paged.check(case, backend_type, layout)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_queries", [1, 40])
def test_masks_hide_what_they_must(paged, backend_type, layout, mask, num_queries):
    seqs = [paged.Seq(40, min(num_queries, 40)), paged.Seq(71, num_queries), paged.Seq(48, num_queries)]
    paged.check(paged.Case(seqs, **mask), backend_type, layout)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_attends_to_its_cached_prefix(paged, backend_type, layout, num_heads, num_kv_heads, block_size):
    seqs = [paged.Seq(50, 50), paged.Seq(70, 3), paged.Seq(96, 32)]
    case = paged.Case(seqs, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)
    paged.check(case, backend_type, layout)


@pytest.mark.parametrize("mask", MASKS)
def test_mixed_batch_of_prefill_and_decode(paged, backend_type, layout, mask):
    seqs = [paged.Seq(33), paged.Seq(40, 7), paged.Seq(18), paged.Seq(20, 20), paged.Seq(5)]
    paged.check(paged.Case(seqs, **mask), backend_type, layout)


@pytest.mark.parametrize("num_queries", [1, 2])
def test_pages_shared_by_several_sequences(paged, backend_type, layout, num_queries):
    seqs = [paged.Seq(40, num_queries)]
    seqs += [paged.Seq(n, num_queries, shares=(0, 2)) for n in (35, 36, 60)]
    seqs += [paged.Seq(64, num_queries, shares=(3, 3))]
    paged.check(paged.Case(seqs), backend_type, layout)


def test_padding_rows_touch_the_null_block_only(paged, backend_type, layout):
    step = paged.Step(paged.Case([paged.Seq(33), paged.Seq(18)], num_padding_rows=3), layout)
    torch.testing.assert_close(step.run(backend_type).double(), step.expected(), rtol=0, atol=2e-5)
    written = (~step.cache.pool.isnan()).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == sorted({0, *step.tables[0], *step.tables[1]})


def test_write_fills_exactly_the_mapped_slots_of_its_layer(paged, backend_type, layout):
    case = paged.Case([paged.Seq(20, 20), paged.Seq(17, 2)])
    step = paged.Step(case, layout)
    before = step.cache.pool.clone()
    backend = backend_type(step.cache)
    backend.write_kv(case.layer, step.new_key_values(), backend.plan(step.batch))
    for slot, row in zip(step.batch.slot_mapping.tolist(), step.new_key_values(), strict=True):
        block, offset = divmod(slot, case.block_size)
        for half, view in enumerate((step.cache.key(case.layer), step.cache.value(case.layer))):
            stored = view[block][:, offset] if layout is KVLayout.HND else view[block][offset]
            assert torch.equal(stored, row[half])
            stored.copy_(before[block, case.layer, half].select(1 if layout is KVLayout.HND else 0, offset))
    assert torch.equal(step.cache.pool.nan_to_num(-7), before.nan_to_num(-7))


def test_write_takes_a_strided_slice_of_the_fused_projection(paged, backend_type, layout):
    case = paged.Case([paged.Seq(20, 4)])
    step = paged.Step(case, layout)
    fused = torch.zeros(4, 9 + 6, case.head_dim)
    fused[:, 9:] = step.new_key_values().flatten(1, 2)
    step.new_key_values = lambda: fused[:, 9:].view(4, 2, 3, case.head_dim)
    torch.testing.assert_close(step.run(backend_type).double(), step.expected(), rtol=0, atol=2e-5)


def test_query_may_be_a_strided_view(paged, backend_type, layout):
    step = paged.Step(paged.Case([paged.Seq(33), paged.Seq(18, 3)]), layout)
    expected = step.expected()
    wide = torch.zeros(4, 15, step.case.head_dim)
    wide[:, :9] = step.query
    backend = backend_type(step.cache)
    plan = backend.plan(step.batch)
    backend.write_kv(step.case.layer, step.new_key_values(), plan)
    output = backend.attend(step.case.layer, wide[:, :9], step.case.spec, plan)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("factor", [30, 1000])
def test_scores_far_beyond_the_range_of_an_exponential(paged, backend_type, layout, factor):
    """Of both signs: the largest alone would overflow, and the first query, which sees one key, would lose its only weight."""
    step = paged.Step(paged.Case([paged.Seq(90, 90), paged.Seq(40, 7), paged.Seq(33)]), layout)
    step.query *= factor
    torch.testing.assert_close(step.run(backend_type).double(), step.expected(), rtol=0, atol=1e-6 * factor + 2e-5)


def test_chunked_prefill_equals_one_shot(paged, backend_type, layout):
    one_shot = paged.Step(paged.Case([paged.Seq(90, 90)]), layout).run(backend_type)
    step = paged.Step(paged.Case([paged.Seq(90, 90)]), layout)
    backend = backend_type(step.cache)
    chunks = []
    for start, end in ((0, 16), (16, 47), (47, 48), (48, 90)):
        step.narrow(start, end)
        chunks.append(step.step(backend, backend.plan(step.batch)))
    torch.testing.assert_close(torch.cat(chunks), one_shot, rtol=0, atol=2e-5)


def test_one_plan_serves_every_layer_and_mask(paged, backend_type, layout):
    step = paged.Step(paged.Case([paged.Seq(33), paged.Seq(40, 7), paged.Seq(33)]), layout)
    backend = backend_type(step.cache)
    plan = backend.plan(step.batch)
    for layer, sliding_window, num_heads in ((0, None, 9), (1, 18, 9), (2, None, 9), (0, None, 6)):
        step.refill(layer=layer, sliding_window=sliding_window, num_heads=num_heads)
        torch.testing.assert_close(step.step(backend, plan).double(), step.expected(), rtol=0, atol=2e-5)


def test_plan_survives_later_changes_of_the_engines_table(paged, backend_type, layout):
    step = paged.Step(paged.Case([paged.Seq(33), paged.Seq(40, 7)]), layout)
    backend = backend_type(step.cache)
    plan = backend.plan(step.batch)
    step.batch.block_tables[:] = 1
    torch.testing.assert_close(step.step(backend, plan).double(), step.expected(), rtol=0, atol=2e-5)


def test_a_poisoned_sequence_does_not_reach_its_neighbours(paged, backend_type, layout):
    """One sequence of NaN, over several layers of one plan: the others stay exact."""
    step = paged.Step(paged.Case([paged.Seq(33), paged.Seq(33), paged.Seq(20)]), layout)
    backend = backend_type(step.cache)
    plan = backend.plan(step.batch)
    expected = step.expected()
    step.query[1] = float("nan")
    step.step(backend, plan)
    output = step.step(backend, plan)
    torch.testing.assert_close(output[[0, 2]].double(), expected[[0, 2]], rtol=0, atol=2e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_bfloat16_pools(paged, backend_type, layout, mask):
    seqs = [paged.Seq(33), paged.Seq(40, 7), paged.Seq(70)]
    paged.check(paged.Case(seqs, dtype=torch.bfloat16, **mask), backend_type, layout)


def test_model_sized_heads(paged, backend_type, layout):
    for heads, kv_heads, head_dim in ((9, 3, 64), (4, 1, 256), (3, 3, 80)):
        seqs = [paged.Seq(130), paged.Seq(70, 6)]
        case = paged.Case(seqs, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=64)
        paged.check(case, backend_type, layout)


@st.composite
def batches(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    mask = draw(st.sampled_from(["full", "window", "chunk"]))
    limit = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    queries = [draw(st.one_of(st.just(1), st.integers(1, n))) for n in lengths]
    block_size = draw(st.sampled_from([1, 4, 16]))
    shared = [draw(st.integers(0, min(n, lengths[0]) // block_size)) for n in lengths]
    return {
        "seqs": [(n, q, (0, k) if i and k else None) for i, (n, q, k) in enumerate(zip(lengths, queries, shared, strict=True))],
        "num_heads": num_kv_heads * draw(st.integers(1, 4)),
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([8, 16, 24, 48])),  # the compiled kernels take multiples of 16
        "block_size": block_size,
        "sliding_window": limit if mask == "window" else None,
        "chunk_size": limit if mask == "chunk" else None,
        "num_padding_rows": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_any_batch_agrees_with_the_oracle(paged, backend_type, layout, batch):
    seqs = [paged.Seq(*seq) for seq in batch.pop("seqs")]
    paged.check(paged.Case(seqs, **batch), backend_type, layout)
