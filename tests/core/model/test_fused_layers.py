"""Kernels that do in one pass what torch does in several: used where they agree, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.model import compiled_layers, fused_layers
from core.model.fused_layers import CompiledLayerOps, LayerOps, TritonLayerOps, layer_ops
from core.model.layers import RMSNorm
from core.testing.older_cpu import OLDER, computing_as_on

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = (576, 1536, 32)
needs_library = pytest.mark.skipif(
    compiled_layers.built_library() is None,
    reason="core/model/_layer_ops.c was not built: make install, or pip install --editable .",
)


@pytest.fixture(autouse=True)
def no_choice_is_kept():
    layer_ops.cache_clear()
    yield
    layer_ops.cache_clear()


def test_torch_does_it_where_there_are_no_kernels(monkeypatch, caplog):
    assert type(layer_ops(CUDA, torch.float32, SIZES)) is LayerOps
    assert type(layer_ops(CPU, torch.float16, SIZES)) is LayerOps
    assert type(layer_ops(CPU, torch.float32, (576, 1536, 40))) is LayerOps, "half a head does not fill vectors"
    assert "no multiples of 16" in caplog.text
    monkeypatch.setattr(compiled_layers, "built_library", lambda: None)
    assert type(layer_ops(CPU, torch.bfloat16, SIZES)) is LayerOps
    assert "_layer_ops.c was not built" in caplog.text
    with pytest.raises(ImportError, match=r"_layer_ops\.c was not built"):
        CompiledLayerOps()


@pytest.mark.parametrize("failure", [ImportError("no module named triton"), RuntimeError("no kernel image\nfor it")])
def test_kernels_that_cannot_run_are_not_used(monkeypatch, caplog, failure):
    def fail():
        raise failure

    monkeypatch.setattr(fused_layers, "TritonLayerOps", fail)
    assert type(layer_ops(CUDA, torch.bfloat16, SIZES)) is LayerOps
    assert "event=fused_layers_off" in caplog.text


@pytest.mark.parametrize("difference", [1.0, float("nan")])
def test_kernels_that_differ_are_not_used(monkeypatch, caplog, difference):
    monkeypatch.setattr(fused_layers, "TritonLayerOps", LayerOps)
    monkeypatch.setattr(fused_layers, "_largest_difference", lambda *args: difference)
    assert type(layer_ops(CUDA, torch.bfloat16, SIZES)) is LayerOps
    assert "they differ from torch by" in caplog.text


@pytest.mark.parametrize("name", ["add_and_normalize", "silu_and_mul", "gelu_and_mul", "rotate_"])
def test_a_wrong_operation_is_noticed(name):
    """The comparison looks at each of them."""
    right = getattr(LayerOps, name)

    def wrong(self, first, *others):
        result = right(self, first, *others)
        (first if result is None else result)[-1, -1].add_(0.5)
        return result

    wrong_ops = type("WrongOps", (LayerOps,), {name: wrong})
    assert fused_layers._largest_difference(LayerOps(), CPU, torch.float32) < 1e-4
    assert fused_layers._largest_difference(wrong_ops(), CPU, torch.float32) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_agree_on_a_gpu(dtype):
    assert type(layer_ops(CUDA, dtype, SIZES)) is TritonLayerOps


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


def operate(ops, operands):
    """Return the results of every operation; the operands stay as they are."""
    hidden, update, norm, gate_up, heads, angles = operands
    added, rotated = hidden.clone(), heads.clone()
    normed = ops.add_and_normalize(added, update, norm)
    ops.rotate_(rotated[:, : heads.shape[1] - 1], *angles)
    return added, normed, ops.silu_and_mul(gate_up), ops.gelu_and_mul(gate_up), rotated


def draw(num_rows, dtype, size=576, head_dim=64):
    """Return the operands of a layer, for ``operate``."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    norm = RMSNorm(normal(size).to(dtype), 1e-5, dtype)
    angle = normal(num_rows, 1, head_dim)
    tensors = normal(num_rows, size), normal(num_rows, size).to(dtype), norm, 4 * normal(num_rows, 2 * size).to(dtype)
    return *tensors, normal(num_rows, 7, head_dim).to(dtype), (angle.cos().to(dtype), angle.sin().to(dtype))


def check(operands):
    """Each result of the compiled kernels is the exact one, rounded once."""
    hidden, update, norm, gate_up, heads, angles = operands
    found = operate(CompiledLayerOps(), operands)
    exact_norm = RMSNorm(norm.weight.double(), 1e-5)
    sums = hidden.double() + update.double()
    unit = sums / (sums.square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact_norm.weight
    gate, up = gate_up.double().chunk(2, dim=-1)
    rotated = heads.double()
    LayerOps().rotate_(rotated[:, :-1], *(each.double() for each in angles))
    wanted = sums, unit, F.silu(gate) * up, F.gelu(gate, approximate="tanh") * up, rotated
    assert [each.dtype for each in found] == [torch.float32, *[update.dtype] * 4]
    for left, right in zip(found, wanted, strict=True):
        rounding = 2**-8 if left.dtype is torch.bfloat16 else 2**-20
        assert ((left.double() - right).abs() <= rounding * right.abs() + 1e-5).all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
@pytest.mark.parametrize(("size", "head_dim"), [(576, 64), (16, 32)])
def test_compiled_kernels_round_once_what_torch_computes_exactly(dtype, num_rows, size, head_dim):
    check(draw(num_rows, dtype, size, head_dim))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OLDER)
def test_compiled_kernels_of_older_cpus_do_too(dtype, kind):
    with computing_as_on(compiled_layers.built_library(), kind):
        check(draw(5, dtype))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(dtype, monkeypatch):
    ops, operands = CompiledLayerOps(), draw(300, dtype)
    hidden, update, norm, gate_up, heads, angles = operands
    together = operate(ops, operands)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, together, operate(ops, operands)))
    for row in (0, 7, 299):
        one = slice(row, row + 1)
        alone = operate(ops, (hidden[one], update[one], norm, gate_up[one], heads[one], [each[one] for each in angles]))
        assert all(torch.equal(left[one], right) for left, right in zip(together, alone, strict=True))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_uses_the_compiled_kernels(dtype):
    assert type(layer_ops(CPU, dtype, SIZES)) is CompiledLayerOps


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_gates_are_those_of_torch(dtype):
    nan, inf = float("nan"), float("inf")
    gates = torch.tensor([nan, inf, -inf, 3e38, -3e38, 1e30, -1e30, 88.0, -88.0, 0.0, -0.0, 1e-30, -4.0, -3.0, -2.0, -1.0])
    gate_up = torch.cat((gates, torch.ones(16))).unsqueeze(0).to(dtype)
    for name in ("silu_and_mul", "gelu_and_mul"):
        found, wanted = (getattr(ops, name)(gate_up) for ops in (CompiledLayerOps(), LayerOps()))
        rounding = 1e-5 if dtype is torch.float32 else 2**-7  # torch rounds twice
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=1e-5, equal_nan=True)
