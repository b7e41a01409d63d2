"""The parts between two layers' attention in one call: the bits of one call after another, or not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.attention.base import KVLayout, PagedKVCache
from core.attention.paged_cpu import PagedCpuBackend
from core.model import layer_chain
from core.model.few_rows import MAX_ROWS
from core.model.fused_layers import LayerOps
from core.model.layer_chain import make_layer_chain
from core.model.layers import RMSNorm
from core.model.loader import load_decoder
from core.model.rope import Rope

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
NO_ROPE_IN_THE_SECOND = {
    **{"moe_layers": [], "intermediate_size_mlp": 96, "attention_chunk_size": 24, "no_rope_layers": [1, 0, 1]},
    **{"floor_scale": 10, "attn_scale": 0.3, "use_qk_norm": False},
}
MODELS = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, biases of query, key and value": ("qwen2", {}),
    "llama4, a layer without rope": ("llama4_text", NO_ROPE_IN_THE_SECOND),
    # sums of several blocks: more than 512 columns, and more than 1,024
    "llama, wide": ("llama", {"hidden_size": 576, "intermediate_size": 1056}),
}
DTYPES = (torch.float32, torch.bfloat16)


def load(tiny_model, name="llama", dtype=torch.float32, **changes):
    model_type, overrides = MODELS[name]
    model = tiny_model(model_type, **{**SIZES, **overrides})
    groups, arch = model.load().layer_groups, replace(model.arch, **changes)
    decoder = load_decoder(arch, model.weight_files, dtype=dtype, layer_groups=groups)
    if decoder._chain is None:
        pytest.skip("needs AVX-512 for this type, and a C compiler when kvferry was installed")
    return decoder


def answers(decoder, paged, sizes, seed=0, output_rows=None):
    """Return the hidden states' logits of several sequences after two steps of so many tokens each, and the KV pool."""
    run = paged(decoder, num_sequences=len(sizes[0]))
    shape, dtype = run.backend.cache.pool.shape, decoder._weights.embedding.dtype
    run.backend = PagedCpuBackend(PagedKVCache(torch.zeros(shape, dtype=dtype), KVLayout.HND))
    generator = torch.Generator().manual_seed(seed)
    steps = [[torch.randint(0, 97, (size,), generator=generator).tolist() for size in step] for step in sizes]
    logits = [run.step(step, output_rows) for step in steps]
    return [*logits, run.backend.cache.pool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_one_call_gives_the_bits_of_one_after_another(name, dtype, tiny_model, paged, monkeypatch):
    decoder = load(tiny_model, name, dtype)
    for sizes in ([[1], [1]], [[7], [2]], [[30, 2], [1, 1]], [[1] * 17, [1] * 17]):
        chained = answers(decoder, paged, sizes)
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_chain", None)
            assert all(map(torch.equal, chained, answers(decoder, paged, sizes)))


def test_each_layer_has_its_own_rope(tiny_model, paged, monkeypatch):
    decoder = load(tiny_model, ropes=(Rope(1e4), Rope(50.0), None))
    chained = answers(decoder, paged, [[7], [2]])
    monkeypatch.setattr(decoder, "_chain", None)
    assert all(map(torch.equal, chained, answers(decoder, paged, [[7], [2]])))


def test_a_row_has_the_same_bits_in_a_step_too_large_for_one_call(tiny_model, paged):
    decoder = load(tiny_model)
    small, large = answers(decoder, paged, [[3] * 10]), answers(decoder, paged, [[3] * 10 + [3] * 5])
    assert torch.equal(small[0], large[0][:30])


@pytest.mark.parametrize("rows", [[4], [4, 0], []])
def test_rows_are_picked_after_the_last_attention(rows, tiny_model, paged, monkeypatch):
    decoder, output_rows = load(tiny_model), torch.tensor(rows, dtype=torch.int64)
    chained = answers(decoder, paged, [[5], [5]], output_rows=output_rows)
    monkeypatch.setattr(decoder, "_chain", None)
    assert all(map(torch.equal, chained, answers(decoder, paged, [[5], [5]], output_rows=output_rows)))


def test_each_step_of_few_rows_takes_it_and_no_other(tiny_model, paged, monkeypatch):
    decoder, calls = load(tiny_model), []
    advance = decoder._chain.advance

    def noted(layer, hidden, *others):
        calls.append((layer, len(hidden)))
        return advance(layer, hidden, *others)

    monkeypatch.setattr(decoder._chain, "advance", noted)
    answers(decoder, paged, [[MAX_ROWS + 1], [MAX_ROWS], [1]])
    assert calls == [(0, MAX_ROWS), (1, MAX_ROWS), (0, 1), (1, 1)]  # of three layers


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_layers_with_other_parts_are_not_chained(model_type, tiny_model):
    overrides = {"layer_types": ["full_attention"] * 3} if model_type == "gemma3_text" else {}
    assert tiny_model(model_type, **SIZES, **overrides).load()._chain is None


def test_sizes_that_do_not_fill_vectors_are_not_chained(tiny_model):
    assert tiny_model("llama", **{**SIZES, "intermediate_size": 80}).load()._chain is None


def test_without_a_library_nothing_is_chained(tiny_model, monkeypatch):
    decoder = load(tiny_model)
    layers, ops = decoder._weights.layers, decoder._ops
    assert make_layer_chain(decoder.arch, layers, LayerOps()) is None
    monkeypatch.setattr(layer_chain, "built_library", lambda: None)
    assert make_layer_chain(decoder.arch, layers, ops) is None


@pytest.mark.parametrize("name", ["qkv", "output", "gate_up", "down"])
def test_a_layer_whose_products_are_not_computed_by_c_breaks_the_chain(name, tiny_model, monkeypatch):
    decoder = load(tiny_model)
    layers, ops = decoder._weights.layers, decoder._ops
    assert make_layer_chain(decoder.arch, layers, ops) is not None
    monkeypatch.setattr(getattr(layers[1], name), "few_rows", None)
    assert make_layer_chain(decoder.arch, layers, ops) is None


@pytest.mark.parametrize("name", ["attended_norm", "mlp_output_norm"])
def test_a_layer_with_another_norm_breaks_the_chain(name, tiny_model):
    decoder = load(tiny_model)
    first, *others = decoder._weights.layers
    assert make_layer_chain(decoder.arch, [replace(first, **{name: first.mlp_norm}), *others], decoder._ops) is None


@pytest.mark.parametrize("name", ["input_norm", "mlp_norm"])
def test_a_norm_that_gives_another_type_breaks_the_chain(name, tiny_model):
    decoder = load(tiny_model, dtype=torch.bfloat16)
    first, *others = decoder._weights.layers
    exact = RMSNorm(first.mlp_norm.weight, 1e-5)
    assert make_layer_chain(decoder.arch, [replace(first, **{name: exact}), *others], decoder._ops) is None


def test_another_gate_breaks_the_chain(tiny_model):
    decoder = load(tiny_model)
    arch = replace(decoder.arch, activation="gelu_pytorch_tanh")
    assert make_layer_chain(arch, decoder._weights.layers, decoder._ops) is None
