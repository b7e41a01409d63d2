"""What settings of a model's numbers mean on a device."""

from __future__ import annotations

import pytest

from core.config_workers import ModelSection
from core.errors import ConfigError
from core.model import dtype_name
from core.model.dtype_name import check_quantization, resolve_dtype_name


@pytest.mark.parametrize(
    ("checkpoint", "device_type", "has_instructions", "expected"),
    [
        ("bfloat16", "cpu", True, "bfloat16"),
        ("bfloat16", "cpu", False, "float32"),
        ("float32", "cpu", True, "float32"),
        ("float16", "cpu", True, "float32"),
        ("float32", "cuda", False, "bfloat16"),
    ],
)
def test_auto_takes_bfloat16_where_it_loses_nothing(monkeypatch, checkpoint, device_type, has_instructions, expected):
    monkeypatch.setattr(dtype_name, "has_bfloat16_instructions", lambda: has_instructions)
    assert resolve_dtype_name("auto", checkpoint, device_type) == expected


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "float16"])
def test_a_named_type_is_taken_as_it_is(setting):
    assert resolve_dtype_name(setting, "bfloat16", "cpu") == setting


def test_8_bit_weights_are_for_a_cpu():
    check_quantization(ModelSection(quantization="int8"), "cpu")
    check_quantization(ModelSection(), "cuda")
    with pytest.raises(ConfigError, match=r"only a CPU computes it, .* set model\.device to cpu, or") as refused:
        check_quantization(ModelSection(quantization="int8"), "cuda")
    assert refused.value.param == "model.quantization"
