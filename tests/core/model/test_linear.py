"""Packed linear layers against ``F.linear``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.model import linear
from core.model.linear import DenseLinear, PackedLinear, make_linear

needs_packing = pytest.mark.skipif(not linear.can_pack(torch.zeros(1, 1)), reason="this torch has no oneDNN linear ops")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 16, 17, 300])
def test_agrees_with_torch_at_every_batch_size(num_rows, has_bias):
    weight, x = torch.randn(96, 64), torch.randn(num_rows, 64)
    bias = torch.randn(96) if has_bias else None
    result = make_linear(weight, bias)(x)
    torch.testing.assert_close(result, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_accepts_rows_with_a_stride():
    weight, wide = torch.randn(32, 64), torch.randn(9, 200)
    torch.testing.assert_close(make_linear(weight)(wide[:, 7:71]), F.linear(wide[:, 7:71], weight), atol=1e-4, rtol=1e-4)


@needs_packing
def test_packs_float32_and_leaves_other_dtypes_to_torch():
    assert isinstance(make_linear(torch.randn(8, 8)), PackedLinear)
    assert isinstance(make_linear(torch.randn(8, 8).bfloat16()), DenseLinear)


@needs_packing
def test_packed_weight_is_a_copy():
    weight, x = torch.randn(8, 8), torch.randn(5, 8)
    layer = make_linear(weight)
    before = layer(x)
    weight.zero_()
    torch.testing.assert_close(layer(x), before)


@needs_packing
@pytest.mark.parametrize("wrong_rows", [1, 5])
def test_falls_back_where_packed_results_differ(monkeypatch, wrong_rows, caplog):
    correct = PackedLinear.__call__

    def slightly_wrong(self, x):
        return correct(self, x) + (1e-2 if x.shape[0] == wrong_rows else 0.0)

    monkeypatch.setattr(PackedLinear, "__call__", slightly_wrong)
    weight, x = torch.randn(8 + wrong_rows, 8), torch.randn(wrong_rows, 8)  # a shape that nothing else has
    layer = make_linear(weight)
    assert isinstance(layer, DenseLinear)
    torch.testing.assert_close(layer(x), F.linear(x, weight))
    assert "packed_linear_rejected" in caplog.text


def test_falls_back_where_the_private_ops_are_missing(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight, x = torch.randn(8, 8), torch.randn(3, 8)
    torch.testing.assert_close(make_linear(weight)(x), F.linear(x, weight))
