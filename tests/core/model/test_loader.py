"""Reading of safetensors files: sharding, and every way in which weights and config can disagree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ConfigError
from core.model.loader import load_decoder

TOKENS = [5, 6, 7, 8, 9, 10, 11]


def edit(model, change):
    """Apply ``change`` to the dict of tensors of the model's only file."""
    (path,) = model.weight_files
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_reads_shards(tiny_model, paged):
    model = tiny_model("llama", shard_size="40KB")
    assert len(model.weight_files) > 2
    torch.testing.assert_close(paged(model.load()).step([TOKENS]), model.logits(TOKENS), atol=2e-4, rtol=1e-4)


def test_names_a_missing_tensor(tiny_model):
    model = tiny_model("llama")
    edit(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        model.load()


def test_refuses_tensors_without_a_place(tiny_model):
    model = tiny_model("llama")
    edit(model, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(ConfigError, match=r"no place in this architecture: model\.layers\.0\.self_attn\.q_norm"):
        model.load()


def test_refuses_a_shape_that_contradicts_the_config(tiny_model):
    model = tiny_model("llama")
    arch = dataclasses.replace(model.arch, intermediate_size=81)
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight has shape \(80, 48\), the config says \(81, 48\)"):
        load_decoder(arch, model.weight_files, dtype=torch.float32)


def test_a_tied_head_may_be_in_the_file_too(tiny_model, paged):
    model = tiny_model("llama", tie_word_embeddings=True)
    edit(model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(paged(model.load()).step([TOKENS]), model.logits(TOKENS), atol=2e-4, rtol=1e-4)


def test_refuses_a_tied_head_that_the_file_has_otherwise(tiny_model):
    """transformers would not tie them."""
    model = tiny_model("llama", tie_word_embeddings=True)
    changed = model.reference.get_input_embeddings().weight.detach().clone()
    changed[-1, -1] += 1
    edit(model, lambda tensors: tensors.update({"lm_head.weight": changed}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight") as caught:
        model.load()
    assert caught.value.param == "tie_word_embeddings"


def test_accepts_rope_frequencies_of_old_checkpoints(tiny_model):
    model = tiny_model("llama")
    edit(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    model.load()


def test_names_a_file_that_is_no_safetensors(tiny_model):
    model = tiny_model("llama")
    model.weight_files[0].write_bytes(b"no tensors here")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        model.load()


def test_refuses_two_files_with_the_same_tensor_and_names_both(tiny_model):
    model = tiny_model("llama")
    (path,) = model.weight_files
    save_file({"model.norm.weight": torch.zeros(48)}, path.with_name("model_old.safetensors"))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is in .*/model\.safetensors and in .*/model_old\.safetensors"):
        model.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_keeps_the_file_mapped(tiny_model, dtype):
    model = tiny_model("llama")
    decoder = load_decoder(model.arch, model.weight_files, dtype=dtype)
    (path,) = model.weight_files
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert decoder.device.type == "cpu"
