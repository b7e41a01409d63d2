"""Plans whose tensors stay where they are attend like ordinary ones, after a refill with any decode step."""

from __future__ import annotations

import pytest
import torch

from core.attention.base import AttentionSpec, KVLayout
from core.attention.batched import BatchedSdpaBackend
from core.attention.paged_cpu import PagedCpuBackend
from core.attention.pages import PagesBackend, gathered_bytes
from core.attention.sdpa import SdpaBackend
from core.attention.varlen import VarlenBackend
from core.errors import ConfigError
from tests.support.varlen_kernel import documented_varlen_attn, documented_varlen_attn_with_sums

LENGTHS = ((1, 15, 16, 17), (33, 64, 65, 31), (2, 90, 48, 5))
MASKS = [{}, {"sliding_window": 20}, {"chunk_size": 32}]


class StandInVarlenBackend(VarlenBackend):
    kernel = documented_varlen_attn


class StandInPagesBackend(PagesBackend):
    kernel = documented_varlen_attn_with_sums


@pytest.fixture(params=[StandInVarlenBackend, StandInPagesBackend, BatchedSdpaBackend], ids=["varlen", "pages", "gather"])
def backend_type(request):
    return request.param


@pytest.mark.parametrize("mask", MASKS, ids=["full", "window", "chunks"])
@pytest.mark.parametrize("layout", [KVLayout.NHD])
def test_refilled_plan_attends_like_a_fresh_one(paged, backend_type, layout, mask):
    for lengths in LENGTHS:
        step = paged.Step(paged.Case([paged.Seq(n) for n in lengths], num_padding_rows=3, **mask), layout)
        backend = backend_type(step.cache)
        widest = step.batch.block_tables.shape[1]
        plan = backend.static_plan(7, backend.graph_widths(widest)[-1], [step.case.spec])
        other = paged.Step(paged.Case([paged.Seq(n) for n in (6, 5, 4, 3)], num_padding_rows=3, seed=1, **mask), layout)
        backend.refill_plan(plan, other.batch)
        backend.refill_plan(plan, step.batch)
        torch.testing.assert_close(step.step(backend, plan).double(), step.expected(), rtol=0, atol=2e-5)


def test_refilling_keeps_every_tensor_in_its_place(paged, backend_type):
    step = paged.Step(paged.Case([paged.Seq(n) for n in LENGTHS[1]], chunk_size=32), KVLayout.NHD)
    backend = backend_type(step.cache)
    plan = backend.static_plan(4, 8, [step.case.spec])
    before = _addresses(plan)
    backend.refill_plan(plan, step.batch)
    step.step(backend, plan)
    assert len(before) > 2
    assert _addresses(plan) == before


def test_a_backend_that_looks_at_host_values_offers_no_graphs(paged):
    step = paged.Step(paged.Case([paged.Seq(3)]), KVLayout.HND)
    assert PagedCpuBackend(step.cache).graph_widths(8) == ()
    with pytest.raises(NotImplementedError):
        PagedCpuBackend(step.cache).static_plan(1, 8, [step.case.spec])


def test_varlen_offers_no_graph_for_chunks_of_no_whole_blocks(paged):
    step = paged.Step(paged.Case([paged.Seq(3)], chunk_size=24), KVLayout.NHD)
    with pytest.raises(ConfigError, match="chunks of 24 tokens"):
        StandInVarlenBackend(step.cache).static_plan(1, 8, [step.case.spec])


def test_widths_of_the_gather_backend_are_powers_of_two_up_to_the_widest(paged):
    step = paged.Step(paged.Case([paged.Seq(3)]), KVLayout.NHD)
    assert BatchedSdpaBackend(step.cache).graph_widths(20) == (1, 2, 4, 8, 16, 20)
    assert BatchedSdpaBackend(step.cache).graph_widths(1) == (1,)


@pytest.mark.parametrize("num_heads", [(3, 3), (12, 6), (6, 1)])
def test_log_sum_exps_are_read_in_either_order_of_their_axes(paged, num_heads):
    """With as many queries as heads in the kernel's eyes, too: three sequences of one page, heads that share nothing."""

    def heads_first(*args, **options):
        output, sums = documented_varlen_attn_with_sums(*args, **options)
        return output, sums.t()

    class HeadsFirst(PagesBackend):
        kernel = heads_first

    for backend_type in (StandInPagesBackend, HeadsFirst):
        case = paged.Case([paged.Seq(n) for n in (9, 4, 15)], num_heads=num_heads[0], num_kv_heads=num_heads[1])
        paged.check(case, backend_type, KVLayout.NHD)


@pytest.mark.parametrize("num_heads", [(3, 3), (12, 6), (6, 1)])
@pytest.mark.parametrize("mask", MASKS, ids=["full", "window", "chunks"])
def test_pages_are_attended_in_calls_of_bounded_size(paged, monkeypatch, num_heads, mask):
    calls = []

    def counting(query, keys, values, query_starts, *args, **options):
        calls.append(len(query_starts) - 1)
        return documented_varlen_attn_with_sums(query, keys, values, query_starts, *args, **options)

    class Counting(PagesBackend):
        kernel = counting

    monkeypatch.setattr("core.attention.pages.MAX_PARTS", 8)
    heads, kv_heads = num_heads
    case = paged.Case([paged.Seq(n) for n in (9, 40, 15, 33, 48)], num_heads=heads, num_kv_heads=kv_heads, **mask)
    step = paged.Step(case, KVLayout.NHD)
    backend = Counting(step.cache)
    torch.testing.assert_close(step.step(backend, backend.plan(step.batch)).double(), step.expected(), rtol=0, atol=2e-5)
    assert len(calls) == 3, "two sequences of three pages at a time"
    assert max(calls) <= 8


@pytest.mark.parametrize("decoding", [[], [(9, 1)]], ids=["prefills", "mixed"])
@pytest.mark.parametrize("mask", MASKS, ids=["full", "window", "chunks"])
def test_prefills_behind_prefixes_gather_a_bounded_number_of_keys(paged, monkeypatch, mask, decoding):
    calls = []

    def counting(query, keys, *args, **options):
        if options["seqused_k"] is None:  # not the decode rows
            calls.append(len(keys))
        return documented_varlen_attn_with_sums(query, keys, *args, **options)

    class Counting(PagesBackend):
        kernel = counting

    case = paged.Case([paged.Seq(*seq) for seq in [(40, 3), (33, 2), *decoding, (70, 4), (20, 5), (9, 8)]], **mask)
    step = paged.Step(case, KVLayout.NHD)
    monkeypatch.setattr("core.attention.pages._SCRATCH_BYTES", 64 * 2 * 3 * 16 * 4)  # keys and values of 64 tokens
    backend = Counting(step.cache)
    plan = backend.plan(step.batch)
    torch.testing.assert_close(step.step(backend, plan).double(), step.expected(), rtol=0, atol=2e-5)
    assert sum(calls) > 64
    tables = [call.slots for chunks in plan.chunks.values() for call in chunks.calls]
    assert sum(slots.nbytes for slots in tables) == 4 * sum(calls), "they are there until the step ends"
    assert all(keys <= 64 or keys == 70 for keys in calls), "a sequence that is longer has a call of its own"


@pytest.mark.parametrize(("gib", "expected"), [(8, 256 << 20), (80, (80 << 30) // 100)])
def test_a_call_gathers_more_on_a_large_gpu(monkeypatch, gib, expected):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 30, gib << 30))
    assert gathered_bytes(torch.device("cuda")) == expected
    assert gathered_bytes(torch.device("cpu")) == 256 << 20


@pytest.mark.parametrize("mask", MASKS, ids=["full", "window", "chunks"])
def test_the_reference_makes_a_bounded_number_of_scores(paged, monkeypatch, mask):
    scores, attend = [], torch.nn.functional.scaled_dot_product_attention

    def counting(query, key, *args, **options):
        scores.append(query.shape[1] * query.shape[2] * key.shape[2])
        return attend(query, key, *args, **options)

    step = paged.Step(paged.Case([paged.Seq(70, 40), paged.Seq(20, 20), paged.Seq(9, 1)], **mask), KVLayout.NHD)
    monkeypatch.setattr("core.attention.sdpa._SCORES_BYTES", 4 * 9 * 200)
    monkeypatch.setattr("core.attention.sdpa.F.scaled_dot_product_attention", counting)
    backend = SdpaBackend(step.cache)
    torch.testing.assert_close(step.step(backend, backend.plan(step.batch)).double(), step.expected(), rtol=0, atol=2e-5)
    assert max(scores) <= 9 * 200
    assert len(scores) > 4


WHOLE, LATER, DECODING = (20, 20), (40, 8), (9, 1)  # tokens of a sequence, and how many of them are the step's


@pytest.mark.parametrize(
    ("seqs", "mask", "is_gathered"),
    [
        ([WHOLE, (33, 33)], {}, False),
        ([WHOLE, (33, 33)], {"sliding_window": 16}, False),
        ([WHOLE, (33, 33)], {"chunk_size": 16}, False),
        ([WHOLE, LATER], {}, True),
        ([WHOLE, LATER], {"chunk_size": 32}, False),  # tokens 32 to 40 see no others
        ([WHOLE, DECODING], {}, True),
        ([WHOLE, (1, 1)], {}, True),
    ],
)
def test_prompts_from_their_first_token_on_are_attended_where_they_were_computed(paged, seqs, mask, is_gathered):
    first, last = (
        paged.Step(paged.Case([paged.Seq(*seq) for seq in seqs], layer=layer, **mask), KVLayout.NHD) for layer in (0, 2)
    )
    for seq, values in zip(last.case.seqs, last.case.values, strict=True):
        values[-seq.num_queries :] += 1  # the layers differ in what the step writes
    last.cache.pool[:, 0] = first.cache.pool[:, 0]  # one pool with what both layers have cached
    backend, seen = _watching_pages(last.cache)
    plan = backend.plan(last.batch)
    for step in (first, last):
        seen.clear()  # memory of the step before may be used again
        heads = torch.cat((step.query, step.new_key_values().flatten(1, 2)), 1)  # in one buffer, as the decoder has them
        query, key_value = heads[:, : step.case.num_heads], heads[:, step.case.num_heads :]
        backend.write_kv(step.case.layer, key_value.view(-1, 2, step.case.num_kv_heads, step.case.head_dim), plan)
        output = backend.attend(step.case.layer, query, step.case.spec, plan)
        torch.testing.assert_close(output.double(), step.expected(), rtol=0, atol=2e-5)
        assert (heads.data_ptr() in seen) != is_gathered
        assert plan.written is None, "it would keep a layer's memory"


def test_prompts_are_attended_as_the_pool_holds_them_if_it_rounds_them(paged):
    step = paged.Step(paged.Case([paged.Seq(*WHOLE)], dtype=torch.bfloat16), KVLayout.NHD)
    backend, seen = _watching_pages(step.cache)
    plan, written = backend.plan(step.batch), step.new_key_values().float() + 1e-3  # which bfloat16 does not hold
    backend.write_kv(step.case.layer, written, plan)
    backend.attend(step.case.layer, step.query.float(), step.case.spec, plan)
    assert written.data_ptr() not in seen


def _watching_pages(cache):
    """Return a backend, and the addresses of the memory in which the keys of its calls lie."""
    seen = []

    def watching(query, keys, *args, **options):
        seen.append(keys.untyped_storage().data_ptr())
        return documented_varlen_attn_with_sums(query, keys, *args, **options)

    class Watching(PagesBackend):
        kernel = watching

    return Watching(cache), seen


def test_a_call_for_wide_tables_stays_within_the_kernels_grid_and_its_scratch(paged):
    step = paged.Step(paged.Case([paged.Seq(3)]), KVLayout.NHD)
    backend = StandInPagesBackend(step.cache)
    small, large = AttentionSpec(2, 1, 16, 0.1), AttentionSpec(64, 8, 256, 0.1)
    assert backend._max_parts(torch.empty(1, 2, 16, dtype=torch.bfloat16), small) == 32 << 10
    assert backend._max_parts(torch.empty(1, 64, 256, dtype=torch.bfloat16), large) * 64 * 256 * 14 <= 256 << 20


def _addresses(value, seen=None):
    """Return the addresses of all tensors below a plan."""
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()]
    if isinstance(value, dict):
        return [address for item in value.values() for address in _addresses(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [address for name in value.__dataclass_fields__ for address in _addresses(getattr(value, name))]
    return []
