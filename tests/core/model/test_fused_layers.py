"""Kernels that do in one pass what torch does in several: used where they agree, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from core.model import fused_layers
from core.model.fused_layers import LayerOps, TritonLayerOps, layer_ops
from core.model.layers import RMSNorm

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_choice_is_kept():
    layer_ops.cache_clear()
    yield
    layer_ops.cache_clear()


def test_torch_does_it_on_a_cpu_and_in_32_bits():
    assert type(layer_ops(torch.device("cpu"), torch.bfloat16)) is LayerOps
    assert type(layer_ops(CUDA, torch.float32)) is LayerOps


@pytest.mark.parametrize("failure", [ImportError("no module named triton"), RuntimeError("no kernel image\nfor it")])
def test_kernels_that_cannot_run_are_not_used(monkeypatch, caplog, failure):
    def fail():
        raise failure

    monkeypatch.setattr(fused_layers, "TritonLayerOps", fail)
    assert type(layer_ops(CUDA, torch.bfloat16)) is LayerOps
    assert "event=fused_layers_off" in caplog.text


@pytest.mark.parametrize("difference", [1.0, float("nan")])
def test_kernels_that_differ_are_not_used(monkeypatch, caplog, difference):
    monkeypatch.setattr(fused_layers, "TritonLayerOps", LayerOps)
    monkeypatch.setattr(fused_layers, "_largest_difference", lambda *args: difference)
    assert type(layer_ops(CUDA, torch.bfloat16)) is LayerOps
    assert "they differ from torch by" in caplog.text


@pytest.mark.parametrize("name", ["add_and_normalize", "silu_and_mul", "rotate_"])
def test_a_wrong_operation_is_noticed(name):
    """The comparison looks at each of them."""
    right = getattr(LayerOps, name)

    def wrong(self, first, *others):
        result = right(self, first, *others)
        (first if result is None else result)[-1, -1].add_(0.5)
        return result

    cpu, wrong_ops = torch.device("cpu"), type("WrongOps", (LayerOps,), {name: wrong})
    assert fused_layers._largest_difference(LayerOps(), cpu, torch.float32) < 1e-4
    assert fused_layers._largest_difference(wrong_ops(), cpu, torch.float32) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_agree_on_a_gpu(dtype):
    assert type(layer_ops(CUDA, dtype)) is TritonLayerOps


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 4096])
def test_kernels_on_a_gpu_do_what_torch_does_in_large_shapes(num_rows):
    torch.manual_seed(2)
    ops, exact = TritonLayerOps(), LayerOps()
    hidden, update = (torch.randn(num_rows, 4096, device=CUDA).bfloat16() for _ in range(2))
    norm = RMSNorm(torch.randn(4096, device=CUDA).bfloat16(), 1e-5)
    sums = hidden.clone(), hidden.clone()
    found, wanted = ops.add_and_normalize(sums[0], update, norm), exact.add_and_normalize(sums[1], update, norm)
    torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=0)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    gate_up = torch.randn(num_rows, 2 * 14336, device=CUDA).bfloat16()
    torch.testing.assert_close(ops.silu_and_mul(gate_up), exact.silu_and_mul(gate_up), rtol=2e-2, atol=2e-2)
    heads, angles = torch.randn(num_rows, 48, 128, device=CUDA).bfloat16(), torch.rand(num_rows, 1, 128, device=CUDA)
    rotated = heads.clone(), heads.clone()
    for which, each in zip(rotated, (ops, exact), strict=True):
        each.rotate_(which[:, :40], angles.cos().bfloat16(), angles.sin().bfloat16())
    torch.testing.assert_close(*rotated, rtol=2e-2, atol=3e-2)
    torch.testing.assert_close(rotated[0][:, 40:], heads[:, 40:], rtol=0, atol=0)
