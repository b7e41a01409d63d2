"""What ``model.dtype = auto`` stands for."""

from __future__ import annotations

import pytest

from core.model import dtype_name
from core.model.dtype_name import resolve_dtype_name


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
