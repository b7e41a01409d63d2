"""Embeddings that are read out of the packed output layer, against the table."""

from __future__ import annotations

import pytest
import torch

from core.model import embedding, linear
from core.model.embedding import PackedEmbedding, TableEmbedding, tied_embedding
from core.model.linear import PackedLinear, make_linear

needs_packing = pytest.mark.skipif(not linear.can_pack(torch.zeros(1, 1)), reason="this torch has no oneDNN linear ops")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (1000, 96), (4097, 576)])
def test_rows_are_those_of_the_table_bit_for_bit(dtype, shape):
    table = torch.randn(shape).to(dtype)
    if not linear.can_pack(table):
        pytest.skip("the CPU has no instructions for it")
    found = tied_embedding(table, make_linear(table))
    assert isinstance(found, PackedEmbedding)
    assert (found.dtype, found.device) == (dtype, table.device)
    ids = torch.cat((torch.arange(shape[0]).flip(0), torch.tensor([0, 0, shape[0] - 1])))
    for token_ids in (ids, ids.int(), ids[:1], ids[:0]):
        rows = found(token_ids)
        assert rows.is_contiguous()
        assert torch.equal(rows.view(BITS[dtype]), table[token_ids.long()].view(BITS[dtype]))


@needs_packing
def test_packed_rows_outlive_table_and_layer():
    table = torch.randn(96, 64)
    expected = table.clone()
    found = tied_embedding(table, make_linear(table))
    del table
    others = [make_linear(torch.randn(96, 64)) for _ in range(20)]  # what freed memory would be used for
    assert torch.equal(found(torch.arange(96)), expected)
    assert others


@needs_packing
def test_keeps_the_table_where_the_layout_is_not_known(monkeypatch, caplog):
    table = torch.randn(96, 64)
    head = make_linear(table)
    memory = head.packed_memory()
    monkeypatch.setattr(PackedLinear, "packed_memory", lambda self: memory.flip(0))
    with caplog.at_level("INFO"):
        found = tied_embedding(table, head)
    assert isinstance(found, TableEmbedding)
    assert torch.equal(found(torch.tensor([3, 95])), table[[3, 95]])
    assert "embedding_kept" in caplog.text


@pytest.mark.parametrize("memory", [None, torch.zeros(96 * 64 + 1)])
def test_keeps_the_table_where_there_is_no_memory_of_that_size(monkeypatch, memory):
    monkeypatch.setattr(PackedLinear, "packed_memory", lambda self: memory)
    table = torch.randn(96, 64)
    assert isinstance(tied_embedding(table, make_linear(table)), TableEmbedding)


def test_keeps_the_table_beside_a_layer_that_is_not_packed():
    table = torch.randn(96, 64).half()
    found = tied_embedding(table, make_linear(table))
    assert isinstance(found, embedding.TableEmbedding)
    assert torch.equal(found(torch.tensor([5])), table[5:6])
