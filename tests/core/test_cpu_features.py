"""The CPU's instructions, read from what Linux says about it."""

from __future__ import annotations

import pytest

from core.cpu_features import has_bfloat16_instructions


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse4_2", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("vmx flags\t: avx512_bf16", False),
        ("model name\t: avx512_bf16", False),
    ],
)
def test_reads_the_flags_of_the_cpu(tmp_path, line, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{line}\nbugs\t\t: none\n")
    assert has_bfloat16_instructions(path) is expected


def test_an_unknown_cpu_has_none(tmp_path):
    assert not has_bfloat16_instructions(tmp_path / "absent")
