"""Norms, rope and activation against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.model.arch import parse_arch
from core.model.layers import RMSNorm, RotaryEmbedding, inverse_frequencies, rotate_, silu_and_mul
from core.model.rope import Rope

BASE = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def rotary(rope):
    arch = parse_arch({**BASE, "rope_parameters": rope})
    return RotaryEmbedding(arch.head_dim, arch.ropes[0], torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(kind):
    arch = parse_arch({**BASE, "rope_parameters": ROPES[kind]})
    reference = LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=ROPES[kind]))
    ours = inverse_frequencies(arch.head_dim, arch.ropes[0])
    torch.testing.assert_close(ours, reference.inv_freq, rtol=1e-6, atol=0)


def test_rotation_is_a_complex_product_of_the_two_halves():
    positions, heads = torch.tensor([0, 5, 1000]), torch.randn(3, 4, 64)
    frequencies = inverse_frequencies(64, Rope(10000.0)).double()
    turn = torch.polar(torch.ones(3, 1, 32, dtype=torch.float64), positions[:, None, None] * frequencies)
    expected = torch.complex(heads[..., :32].double(), heads[..., 32:].double()) * turn
    embedding = rotary(ROPES["default"])
    rotate_(heads, *embedding.angles(positions))
    torch.testing.assert_close(heads, torch.cat((expected.real, expected.imag), -1).float(), atol=1e-4, rtol=1e-4)


def test_rotation_writes_through_a_strided_view_and_nothing_beside_it():
    buffer = torch.randn(3, 7, 64)
    before, view = buffer.clone(), buffer[:, 1:5]
    embedding = rotary(ROPES["default"])
    rotate_(view, *embedding.angles(torch.tensor([1, 2, 3])))
    assert torch.equal(buffer[:, :1], before[:, :1])
    assert torch.equal(buffer[:, 5:], before[:, 5:])
    assert not torch.allclose(buffer[:, 1:5], before[:, 1:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e4])
def test_rms_norm_divides_by_the_root_mean_square(dtype, size):
    hidden, weight = (size * torch.randn(5, 16)).to(dtype), torch.randn(16).to(dtype)
    before, exact = hidden.clone(), hidden.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    actual = RMSNorm(weight, 1e-5)(hidden)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0)
    assert torch.equal(hidden, before)


def test_silu_and_mul_gates_the_second_half_with_the_first():
    gate, up = torch.randn(5, 16), torch.randn(5, 16)
    both = torch.cat((gate, up), -1)
    before = both.clone()
    torch.testing.assert_close(silu_and_mul(both), F.silu(gate) * up)
    assert torch.equal(both, before)


def test_norm_whose_weight_leaves_one_out_rounds_as_transformers_does_in_bf16():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    generator = torch.Generator().manual_seed(0)
    theirs = Gemma3RMSNorm(64, eps=1e-6).bfloat16()
    theirs.weight.data = torch.randn(64, generator=generator).bfloat16()
    hidden = torch.randn(9, 64, generator=generator).bfloat16()
    norm = RMSNorm(theirs.weight.data.float() + 1.0, 1e-6)
    assert torch.equal(norm(hidden), theirs(hidden))


def test_norm_of_float32_gives_its_own_dtype_rounded_once():
    hidden, weight = torch.randn(5, 64), torch.randn(64).bfloat16()
    exact = RMSNorm(weight.float(), 1e-6)(hidden)
    assert torch.equal(RMSNorm(weight, 1e-6, torch.bfloat16)(hidden), exact.bfloat16())
