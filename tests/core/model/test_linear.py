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


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 17, 300])
def test_bfloat16_results_are_exact_sums_rounded_once(num_rows):
    weight, x = torch.randn(96, 640).bfloat16(), torch.randn(num_rows, 640).bfloat16()
    result = make_linear(weight)(x)
    assert result.dtype is torch.bfloat16
    exact = F.linear(x.double(), weight.double())
    # Half a unit in the last of 8 places, and the rounding of fp32 sums.
    assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (200, 1536)])
def test_result_of_a_row_does_not_depend_on_the_other_rows(dtype, shape):
    if not linear.can_pack(torch.zeros(shape, dtype=dtype)):
        pytest.skip("the CPU has no instructions for it")
    layer, x = make_linear(torch.randn(shape).to(dtype)), torch.randn(600, shape[1]).to(dtype)
    together = layer(x)
    for first, end in ((0, 1), (7, 9), (3, 20), (11, 44), (100, 356)):
        assert torch.equal(layer(x[first:end]), together[first:end])


def test_accepts_rows_with_a_stride():
    weight, wide = torch.randn(32, 64), torch.randn(9, 200)
    torch.testing.assert_close(make_linear(weight)(wide[:, 7:71]), F.linear(wide[:, 7:71], weight), atol=1e-4, rtol=1e-4)


@needs_packing
@pytest.mark.parametrize("has_instructions", [False, True])
def test_packs_float32_and_where_the_cpu_has_instructions_bfloat16(monkeypatch, has_instructions):
    monkeypatch.setattr(linear, "has_bfloat16_instructions", lambda: has_instructions)
    assert linear.can_pack(torch.randn(8, 8))
    assert linear.can_pack(torch.randn(8, 8).bfloat16()) is has_instructions
    assert not linear.can_pack(torch.randn(8, 8).half())
    assert isinstance(make_linear(torch.randn(8, 8)), PackedLinear)
    assert isinstance(make_linear(torch.randn(8, 8).half()), DenseLinear)


@needs_packing
def test_packed_weight_is_a_copy():
    weight, x = torch.randn(8, 8), torch.randn(5, 8)
    layer = make_linear(weight)
    before = layer(x)
    weight.zero_()
    torch.testing.assert_close(layer(x), before)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong_rows", [1, 5])
def test_falls_back_where_packed_results_differ(monkeypatch, wrong_rows, caplog, dtype):
    monkeypatch.setattr(linear, "has_bfloat16_instructions", lambda: True)
    error = 1e-2 if dtype is torch.float32 else 0.2
    correct = PackedLinear.__call__

    def slightly_wrong(self, x):
        return correct(self, x) + (error if x.shape[0] == wrong_rows else 0.0)

    monkeypatch.setattr(PackedLinear, "__call__", slightly_wrong)
    # a shape that nothing else has
    weight, x = torch.randn(8 + wrong_rows, 8).to(dtype), torch.randn(wrong_rows, 8).to(dtype)
    layer = make_linear(weight)
    assert isinstance(layer, DenseLinear)
    torch.testing.assert_close(layer(x), F.linear(x, weight))
    assert "packed_linear_rejected" in caplog.text


def test_falls_back_where_the_ops_refuse_and_says_so_once(monkeypatch, caplog):
    """As in bfloat16 with ``ONEDNN_MAX_CPU_ISA=AVX2`` on a CPU that has more."""

    def refuse(self, weight, bias):
        raise RuntimeError("bf16 path needs the cpu support\nat a place in C++")

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    for _ in range(2):
        assert isinstance(make_linear(torch.randn(23, 8)), DenseLinear)  # a shape that nothing else has
    assert caplog.text.count('reason="bf16 path needs the cpu support"') == 1


@pytest.mark.parametrize(("rows", "is_known"), [(25, False), (26, True)])
def test_a_lack_of_memory_is_no_reason_for_another_kernel(monkeypatch, rows, is_known):
    def fail(self, weight, bias):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory" if not is_known else "could not create a primitive")

    if is_known:
        assert isinstance(make_linear(torch.randn(rows, 8)), PackedLinear)
    monkeypatch.setattr(PackedLinear, "__init__", fail)
    with pytest.raises(RuntimeError):
        make_linear(torch.randn(rows, 8))


def test_falls_back_where_the_private_ops_are_missing(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight, x = torch.randn(8, 8), torch.randn(3, 8)
    torch.testing.assert_close(make_linear(weight)(x), F.linear(x, weight))
