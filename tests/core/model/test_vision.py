"""The image half against transformers: positions, tower, projection, and the whole way from a file to embeddings."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

from core.ec_connector import EmbeddingsLayout
from core.errors import ConfigError, InvalidRequest
from core.model.arch import parse_arch
from core.model.image_encoder import load_image_encoder
from core.model.image_processor import parse_image_processor
from core.model.image_prompt import embeds_per_tile
from core.model.loader import load_decoder
from core.model.vision import position_ids
from core.model.vision_arch import parse_vision_arch
from core.model.vision_loader import load_vision_tower
from tests.support.tiny_smolvlm import TILE_SIZE, encode_test_image

TOLERANCE = 2e-5  # the largest embedding is about 8


@pytest.fixture
def tower(tiny_smolvlm_files):
    files = tiny_smolvlm_files
    return load_vision_tower(parse_vision_arch(files.config), files.weight_files, dtype=torch.float32)


def features(model, pixel_values):
    with torch.inference_mode():
        return torch.cat(model.get_image_features(pixel_values[None]).pooler_output)


@pytest.mark.parametrize("side", [TILE_SIZE, 8, 24, 48, 34, 27])
def test_tiles_of_any_resolution_have_the_embeddings_of_transformers(tiny_smolvlm, tower, side):
    tiles = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(side))
    with torch.inference_mode():
        embeddings = tower.embed(tiles)
    assert embeddings.shape == (3 * tower.arch.num_embeds(side), tower.arch.output_size)
    torch.testing.assert_close(embeddings, features(tiny_smolvlm.model, tiles), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", [(512, 16, 4, 64), (384, 14, 3, 81), (364, 14, 2, 169)])
def test_released_checkpoints_have_as_many_embeddings_per_tile_as_they_say(tiny_smolvlm, sizes):
    tile_size, patch_size, scale_factor, stated = sizes  # SmolVLM 256M and 500M, SmolVLM 2.2B, Idefics 3 8B
    config = json.loads((tiny_smolvlm.folder / "config.json").read_text())
    config["scale_factor"] = scale_factor
    config["vision_config"] |= {"image_size": tile_size, "patch_size": patch_size}
    processor = parse_image_processor({"max_image_size": {"longest_edge": tile_size}})
    assert embeds_per_tile(parse_vision_arch(config), processor, {"image_seq_len": stated}) == stated


def test_a_tile_is_embedded_alike_whatever_stands_beside_it(tower):
    tiles = torch.randn(3, 3, TILE_SIZE, TILE_SIZE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(tower.embed(tiles), torch.cat([tower.embed(tile[None]) for tile in tiles]))


@pytest.mark.parametrize("patches", [1, 2, 7, 8, 13, 16, 26, 27, 32, 40])
@pytest.mark.parametrize("positions", [8, 16, 26, 27, 32, 70])
def test_patches_have_the_positions_of_transformers(patches, positions):
    embeddings = object.__new__(SmolVLMVisionEmbeddings)
    torch.nn.Module.__init__(embeddings)
    embeddings.patch_size, embeddings.num_patches_per_side = 1, positions
    embeddings.patch_embedding = lambda pixels: torch.zeros(1, 1, patches, patches)
    embeddings.position_embedding = lambda ids: ids[..., None]
    mask = torch.ones(1, patches, patches, dtype=torch.bool)
    expected = embeddings(torch.zeros(1, 3, patches, patches), mask)[0, :, 0]
    assert position_ids(patches, positions).tolist() == expected.tolist()


@pytest.mark.parametrize("size", [(60, 44), (20, 64), (500, 500)])
def test_an_image_file_has_the_embeddings_of_transformers(tiny_smolvlm, tiny_smolvlm_files, size):
    encoder = load_image_encoder(tiny_smolvlm_files, torch.float32)
    image = encode_test_image(0, *size)
    inputs = tiny_smolvlm.inputs(image, "what?")
    expected = features(tiny_smolvlm.model, inputs["pixel_values"][0])
    assert len(expected) == int((inputs["input_ids"] == encoder.arch.image_token_id).sum())
    torch.testing.assert_close(encoder.encode(image), expected, atol=TOLERANCE, rtol=0)


def test_half_precision_stays_near(tiny_smolvlm_files):
    image = encode_test_image(0)
    exact, rounded = (load_image_encoder(tiny_smolvlm_files, dtype).encode(image) for dtype in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.float() - exact).norm() / exact.norm()) < 0.05


def test_the_form_of_the_embeddings_is_told_before_there_are_any(tiny_smolvlm_files):
    encoder = load_image_encoder(tiny_smolvlm_files, torch.bfloat16)
    encoder.warm_up()
    embeddings = encoder.encode(encode_test_image(0))
    assert encoder.layout == EmbeddingsLayout(hidden_size=48, dtype="bfloat16", device="cpu", itemsize=2)
    assert encoder.layout.num_bytes(len(embeddings)) == embeddings.nbytes


def test_a_file_that_is_no_image_is_the_clients_fault(tiny_smolvlm_files):
    with pytest.raises(InvalidRequest):
        load_image_encoder(tiny_smolvlm_files, torch.float32).encode(b"hello")


def test_a_model_that_reads_text_only_has_no_image_half():
    assert parse_vision_arch({"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": 10**6}, "image_token_id 1000000 is not in the vocabulary"),
        ({"scale_factor": 0}, "scale_factor must be a positive integer"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act='relu' is not supported"),
        ({"vision_config": {"hidden_size": 30, "num_attention_heads": 4}}, "not a multiple of 4 heads"),
        ({"vision_config": {"num_channels": 1}}, "num_channels must be 3"),
        ({"vision_config": {"patch_size": [4, 4]}}, "patch_size must be a positive integer"),
    ],
)
def test_configurations_that_are_not_computed_here_are_refused(tiny_smolvlm, change, message):
    config = json.loads((tiny_smolvlm.folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        parse_vision_arch({**config, **change})


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("model.vision_model.post_layernorm.bias", None, "the weights lack model.vision_model.post_layernorm.bias"),
        (None, "model.connector.more.weight", "1 tensors have no place in this architecture: model.connector.more.weight"),
    ],
)
def test_weights_of_another_shape_of_tower_are_refused(tiny_smolvlm, tmp_path, removed, added, message):
    config = json.loads((tiny_smolvlm.folder / "config.json").read_text())
    tensors = load_file(tiny_smolvlm.folder / "model.safetensors")
    tensors.pop(removed, None)
    if added:
        tensors[added] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_vision_tower(parse_vision_arch(config), [tmp_path / "model.safetensors"], dtype=torch.float32)
    load_decoder(parse_arch(config), [tmp_path / "model.safetensors"], dtype=torch.float32)  # not its business


def test_the_text_half_refuses_what_belongs_to_neither(tiny_smolvlm, tmp_path):
    config = json.loads((tiny_smolvlm.folder / "config.json").read_text())
    tensors = load_file(tiny_smolvlm.folder / "model.safetensors")
    tensors["model.text_model.layers.0.self_attn.q_norm.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="1 tensors have no place"):
        load_decoder(parse_arch(config), [tmp_path / "model.safetensors"], dtype=torch.float32)
