"""Products of few rows by compiled C: the bits of oneDNN's, or not used."""

from __future__ import annotations

import pytest
import torch

from core.model import few_rows, linear
from core.model.few_rows import MAX_ROWS, FewRows
from core.model.linear import PackedLinear, make_linear
from core.testing.older_cpu import OLDER, computing_as_on

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((64, 576), (960, 576), (576, 1536), (128, 1024), (192, 4864), (80, 640), (2080, 1056))


def has_few_rows(dtype: torch.dtype) -> bool:
    library = few_rows.built_library()
    is_there = library is not None and library.kvferry_has_few_rows(dtype is torch.bfloat16)
    return bool(is_there) and linear.can_pack(torch.zeros(1, 1, dtype=dtype))


def few_rows_layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    layer = make_linear(weight, bias)
    if getattr(layer, "few_rows", None) is None:
        pytest.skip("needs AVX-512, a C compiler when kvferry was installed, and oneDNN's usual order of sums")
    assert isinstance(layer, PackedLinear)
    return layer


def cancelling(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights whose sums over ``twice`` of anything are rounding errors alone: they differ with the order of the sum."""
    half = torch.randn(rows, columns // 2)
    return torch.cat([half, -half], 1)[:, order_of(columns)].to(dtype)


def twice(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns // 2).repeat(1, 2)[:, order_of(columns)].to(dtype)


def order_of(columns: int) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gives_the_bits_of_the_packed_layer_for_every_number_of_rows(shape, dtype):
    layer = few_rows_layer(cancelling(*shape, dtype))
    x = twice(100, shape[1], dtype)
    expected = layer(x)  # more than MAX_ROWS: by oneDNN
    assert expected.count_nonzero() > expected.numel() // 4
    for rows in range(MAX_ROWS + 1):
        assert torch.equal(layer.few_rows(x[:rows]), expected[:rows])
    assert torch.equal(layer(x[40:100]), expected[40:100])


@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_the_bias_as_the_packed_layer_does(dtype):
    weight, bias = cancelling(192, 576, dtype), torch.randn(192).to(dtype) * 1e-3
    layer, x = few_rows_layer(weight, bias), twice(70, 576, dtype)
    assert torch.equal(layer.few_rows(x[:9]), layer(x)[:9])
    assert not torch.equal(layer.few_rows(x[:9]), few_rows_layer(weight).few_rows(x[:9]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_what_is_no_number(dtype):
    layer = few_rows_layer(torch.randn(64, 64).to(dtype))
    x = torch.randn(70, 64).to(dtype)
    x[0, 3], x[1, 5], x[2, 7], x[3] = float("nan"), float("inf"), -float("inf"), 1e-40
    torch.testing.assert_close(layer.few_rows(x[:5]), layer(x)[:5], rtol=0, atol=0, equal_nan=True)


def test_takes_rows_with_a_stride_and_refuses_what_onednn_refuses():
    layer, wide = few_rows_layer(torch.randn(64, 64)), torch.randn(9, 200)
    assert torch.equal(layer(wide[:, 7:71]), layer(wide[:, 7:71].contiguous()))
    shapes = ((2, 63), (5, 96), (2, 64, 3), (2, 64, 0), (2,))
    for wrong in (*map(torch.randn, shapes), torch.randn(5, 64).double(), torch.empty(5, 64, device="meta")):
        with pytest.raises((RuntimeError, NotImplementedError)):
            layer(wrong)


@pytest.mark.skipif(not has_few_rows(torch.float32), reason="needs AVX-512, and a C compiler when kvferry was installed")
def test_is_used_by_this_version_of_torch():
    """Else the tests above skip, and decode steps of few sequences are slower than they could be."""
    assert make_linear(torch.randn(960, 576)).few_rows is not None


def test_is_not_used_where_torch_has_several_threads(caplog):
    """There oneDNN is as fast, and may pack narrower tiles: those of 80 rows have none of 64 for 8 threads."""
    if not has_few_rows(torch.float32):
        pytest.skip("this CPU has not the instructions")
    one_thread = torch.get_num_threads()
    x = torch.randn(3, 640)
    with caplog.at_level("INFO"):
        assert make_linear(torch.randn(80, 640)).few_rows is not None
        torch.set_num_threads(8)
        try:
            layers = [make_linear(torch.randn(80, 640)) for _ in range(2)]
            memory = layers[0].packed_memory()
            with pytest.raises(ValueError, match="not in tiles of 64 rows"):
                FewRows(memory, torch.Size((80, 640)), None, 512)
        finally:
            torch.set_num_threads(one_thread)
    assert [layer.few_rows for layer in layers] == [None, None]
    assert caplog.text.count('event=few_rows_off shape="(80, 640)" dtype=torch.float32 reason="torch has several threads"') == 1
    assert layers[0](x).shape == (3, 80)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_not_used_where_no_order_of_sums_is_that_of_the_layer(monkeypatch, dtype):
    monkeypatch.setattr(few_rows, "_BLOCKS", (128, 256))
    layer = make_linear(torch.randn(112, 1088).to(dtype))  # a shape that nothing else has
    assert getattr(layer, "few_rows", None) is None
    assert layer(torch.randn(2, 1088).to(dtype)).shape == (2, 112)


@pytest.mark.parametrize("shape", [(72, 64), (64, 72), (8, 8)])
def test_is_not_used_for_sizes_that_do_not_fill_vectors(shape):
    assert getattr(make_linear(torch.randn(shape)), "few_rows", None) is None


@pytest.mark.parametrize("kind", OLDER)
def test_is_used_on_a_cpu_with_the_instructions_alone(kind):
    if not has_few_rows(torch.bfloat16):
        pytest.skip("this CPU has not the instructions")
    weight, x = cancelling(128, 576, torch.float32), twice(40, 576, torch.float32)
    with computing_as_on(few_rows.built_library(), kind):
        assert not has_few_rows(torch.bfloat16)
        layer = make_linear(weight)
        assert (layer.few_rows is not None) is has_few_rows(torch.float32) is (kind == "x86-64-v4")
        assert torch.equal(layer(x[:9]), layer(x)[:9])
