"""The compiled write, apart from what ``test_conformance.py`` asks of every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention import compiled_write
from core.attention.base import AttentionBatch, KVLayout, PagedKVCache
from core.attention.compiled_write import can_compile_write
from core.attention.paged_cpu import PagedCpuBackend

needs_library = pytest.mark.skipif(
    not can_compile_write(PagedKVCache(torch.zeros(1, 1, 2, 1, 16, 16), KVLayout.HND)),
    reason="core/attention/_write_rows.c was not built: make install, or pip install --editable .",
)


def make(dtype=torch.float32, layout=KVLayout.HND):
    """Return a backend over three blocks of 4 tokens, two KV heads of 16 and two layers."""
    inner = (2, 4) if layout is KVLayout.HND else (4, 2)
    return PagedCpuBackend(PagedKVCache(torch.zeros(3, 2, 2, *inner, 16, dtype=dtype), layout))


def batch_of(*slots):
    tables, lengths = np.ones((len(slots), 1), np.int32), np.ones(len(slots), np.int32)
    return AttentionBatch(np.arange(len(slots) + 1, dtype=np.int32), lengths, tables, np.array(slots, np.int64))


@needs_library
@pytest.mark.parametrize("slot", [-1, 12])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slot):
    with pytest.raises(AssertionError, match="a slot is outside the pool"):
        make().plan(batch_of(4, slot))


@needs_library
def test_a_plan_of_other_tokens_is_refused():
    backend = make()
    with pytest.raises(AssertionError, match="the plan is of other tokens"):
        backend.write_kv(0, torch.ones(2, 2, 2, 16), backend.plan(batch_of(4)))


@needs_library
@pytest.mark.parametrize("layout", [KVLayout.HND, KVLayout.NHD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_of_the_fused_projection_is_written_as_torch_would(dtype, layout, monkeypatch):
    compiled = make(dtype, layout)
    monkeypatch.setattr(compiled_write, "built_library", lambda: None)
    plain = make(dtype, layout)
    fused = torch.randn(3, 5 + 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    view = fused[:, 5:].view(3, 2, 2, 16)
    for backend in (compiled, plain):
        backend.write_kv(1, view, backend.plan(batch_of(11, 4, 6)))
    assert compiled._write.takes(view)
    assert plain._write is None
    assert torch.equal(compiled.cache.pool, plain.cache.pool)
    assert compiled.cache.pool.count_nonzero() == 3 * 4 * 16


@needs_library
@pytest.mark.parametrize("key_value", [torch.ones(1, 2, 2, 16).bfloat16(), torch.ones(1, 2, 16, 2).transpose(2, 3)])
def test_other_types_and_orders_are_written_by_torch(key_value):
    backend = make()
    assert not backend._write.takes(key_value)
    backend.write_kv(0, key_value, backend.plan(batch_of(5)))
    assert backend.cache.pool[1, 0, :, :, 1].eq(1).all()
    assert backend.cache.pool.count_nonzero() == 4 * 16
