"""Linear layers with 8-bit weights: exact sums, a scale per row, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core.errors import ConfigError
from core.model import int8_linear
from core.model.int8_linear import Int8Linear, make_int8_linear, quantize_rows
from core.model.linear import PackedLinear
from core.model.loader import load_decoder

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.onednn, "qlinear_pointwise"), reason="this torch has no oneDNN linear layers of 8 bits"
)
TOKENS = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 16, 17, 300])
def test_gives_the_sums_of_the_quantized_numbers_at_every_batch_size(num_rows, has_bias):
    weight, x = torch.randn(96, 64), torch.randn(num_rows, 64)
    bias = torch.randn(96) if has_bias else None
    (rows, row_scale), (columns, scale) = quantize_rows(x), quantize_rows(weight)
    expected = (rows.double() @ columns.double().T) * row_scale * scale.T + (0.0 if bias is None else bias)
    torch.testing.assert_close(make_int8_linear(weight, bias)(x), expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_within_the_steps_of_both_scales(dtype):
    weight, x = torch.randn(96, 640).to(dtype), torch.randn(17, 640).to(dtype)
    result = make_int8_linear(weight)(x)
    assert result.dtype is dtype
    exact = F.linear(x.double(), weight.double())
    assert (result.double() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("shape", [(96, 64), (200, 1536)])
def test_result_of_a_row_does_not_depend_on_the_other_rows(shape):
    layer, x = make_int8_linear(torch.randn(shape), torch.randn(shape[0])), torch.randn(600, shape[1])
    together = layer(x)
    for first, end in ((0, 1), (7, 9), (3, 20), (11, 44), (100, 356)):
        assert torch.equal(layer(x[first:end]), together[first:end])


def test_a_large_row_takes_nothing_from_a_small_one():
    layer, small = make_int8_linear(torch.randn(96, 64)), torch.randn(1, 64)
    assert torch.equal(layer(torch.cat((small, 1e6 * torch.randn(1, 64))))[:1], layer(small))


def test_rows_of_zeros_and_rows_without_a_number():
    x = torch.stack((torch.zeros(64), torch.full((64,), float("nan")), torch.full((64,), float("inf")), torch.ones(64)))
    result = make_int8_linear(torch.randn(96, 64))(x)
    assert (result[0] == 0).all()
    assert not result[1:3].isfinite().any()
    assert result[3].isfinite().all()


def test_numbers_of_both_ends_are_kept():
    values, scale = quantize_rows(torch.tensor([[-2.0, 2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert values.tolist() == [[-127, 127, 64], [0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([[2 / 127], [0.0]]))


def test_a_layer_that_computes_wrong_ends_the_start(monkeypatch):
    correct = Int8Linear.__call__
    monkeypatch.setattr(Int8Linear, "__call__", lambda self, x: correct(self, x) * 1.001)
    with pytest.raises(ConfigError, match=r"shape \(11, 8\) gives wrong results on this CPU; set it to 'none'") as caught:
        make_int8_linear(torch.randn(11, 8))  # a shape that nothing else has
    assert caught.value.param == "model.quantization"


def test_another_device_is_refused():
    with pytest.raises(ConfigError, match="only a CPU computes it here, not meta"):
        make_int8_linear(torch.zeros(8, 8, device="meta"))


def test_a_torch_that_lacks_the_ops_or_their_kernels_is_refused(monkeypatch):
    def fail(self, quantized, scale, bias):
        raise RuntimeError("no kernel\nat line 1")

    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(Int8Linear, "__init__", fail)
        with pytest.raises(ConfigError, match=r"cannot compute it on this CPU \(no kernel\); set it to 'none'"):
            make_int8_linear(torch.zeros(12, 8))  # a shape that nothing else has
    monkeypatch.setattr(torch.ops, "onednn", object())
    with pytest.raises(ConfigError, match="cannot compute it on this CPU"):
        make_int8_linear(torch.zeros(13, 8))


def test_the_check_finds_products_that_are_added_in_16_bits(monkeypatch):
    """As on a CPU without the instructions: the sum of two products is cut at the largest number of 16 bits."""

    def saturated(self, x):
        rows, row_scale = quantize_rows(x)
        products = (rows.int() + 128)[:, None] * self.quantized.int()
        pairs = products.view(len(x), len(self.quantized), -1, 2).sum(3).clamp(-(2**15), 2**15 - 1).sum(2)
        return (pairs - 128 * self.quantized.int().sum(1)) * row_scale * self.scale.T

    def keep(self, quantized, scale, bias):
        self.quantized, self.scale = quantized, scale

    monkeypatch.setattr(Int8Linear, "__init__", keep)
    monkeypatch.setattr(Int8Linear, "__call__", saturated)
    with pytest.raises(ConfigError, match="wrong results"):
        make_int8_linear(torch.zeros(14, 64))


def test_large_weights_are_quantized_in_parts(monkeypatch):
    weight, x = torch.randn(96, 64), torch.randn(3, 64)
    whole = make_int8_linear(weight)(x)
    monkeypatch.setattr(int8_linear, "_ROWS_AT_ONCE", 7)
    assert torch.equal(make_int8_linear(weight)(x), whole)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_a_model_keeps_its_output_layer_and_stays_close(tiny_model, paged, changes):
    model = tiny_model("llama", **changes)
    decoder = load_decoder(model.arch, model.weight_files, dtype=torch.float32, quantization="int8")
    layer = decoder._weights.layers[0]
    assert all(isinstance(each, int8_linear.Int8Linear) for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    assert isinstance(decoder._weights.head, PackedLinear)
    found, expected = paged(decoder).step([TOKENS]), model.logits(TOKENS)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
