import numpy as np
import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Idefics3ImageProcessorPil, SmolVLMImageProcessorPil

from core.errors import ConfigError, EncoderInputMissing
from core.model.image_file import ImageSize
from core.model.image_processor import parse_image_processor

SMALL = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
VARIANTS = {
    "split": SMALL,
    "whole": {**SMALL, "do_image_splitting": False},
    "not resized": {**SMALL, "do_resize": False},
    "fixed size": {**SMALL, "size": {"height": 40, "width": 70}},
    "raw pixels": {**SMALL, "do_rescale": False, "do_normalize": False},
    "not rescaled": {**SMALL, "do_rescale": False, "image_mean": [120, 110, 100], "image_std": [50, 60, 70]},
    "not normalized": {**SMALL, "do_normalize": False},
    "bicubic": {**SMALL, "resample": 3, "image_mean": [0.48, 0.45, 0.41], "image_std": [0.27, 0.26, 0.28]},
    "tall tiles": {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 28}},
}


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def assert_agrees(config, image, reference_class=SmolVLMImageProcessorPil):
    """Bit for bit: pixels, rows and columns, and no pixel is padding."""
    expected = reference_class(**config)(image, return_row_col_info=True, return_tensors="pt")
    processor = parse_image_processor(config)
    grid = processor.grid(ImageSize(*image.size))
    tiles = processor.tiles(image)
    assert [[grid.num_rows]] == expected["rows"]
    assert [[grid.num_columns]] == expected["cols"]
    assert tiles.dtype == np.float32
    assert len(tiles) == grid.num_tiles
    assert torch.equal(torch.from_numpy(tiles), expected["pixel_values"][0].float())
    assert bool(expected["pixel_attention_mask"].all())


@pytest.mark.parametrize("reference_class", [SmolVLMImageProcessorPil, Idefics3ImageProcessorPil])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_are_those_of_transformers(variant, reference_class):
    for size in ((60, 44), (44, 60), (33, 33), (90, 7)):
        assert_agrees(VARIANTS[variant], noise(*size), reference_class)


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300), longest=st.integers(1, 200), tile=st.integers(1, 64))
@example(width=1, height=300, longest=64, tile=32)
@example(width=300, height=1, longest=64, tile=32)
@example(width=64, height=33, longest=64, tile=32)
def test_any_size_is_cut_as_in_transformers(width, height, longest, tile):
    longest = max(longest, tile)
    config = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    reference = SmolVLMImageProcessorPil(**config)
    image = np.zeros((3, height, width), dtype=np.uint8)
    try:
        resized = reference.resize_for_vision_encoder(reference.resize(image, reference.size), tile)
    except ValueError:  # its rounding has left nothing of an edge of one pixel
        assert min(width, height) * longest <= max(width, height)
        reject()
    _, rows, columns = reference.split_images(resized, reference.max_image_size)
    grid = parse_image_processor(config).grid(ImageSize(width, height))
    assert (grid.num_rows, grid.num_columns) == (rows, columns)
    assert grid.num_tiles <= parse_image_processor(config).max_tiles


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, 17),
        ({"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}}, 1),
        ({"size": {"longest_edge": 31}, "max_image_size": {"longest_edge": 31}}, 5),  # edges are made even
        ({"size": {"longest_edge": 9999}, "max_image_size": {"longest_edge": 1024}}, 17),
        (VARIANTS["whole"], 1),
        (VARIANTS["fixed size"], 7),
        (VARIANTS["not resized"], None),
    ],
)
def test_the_most_tiles_of_any_image_are_known_where_images_are_resized(config, expected):
    assert parse_image_processor(config).max_tiles == expected


@pytest.mark.full
def test_tiles_of_the_real_sizes_are_those_of_transformers():
    config = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    for size in ((4032, 3024), (640, 480), (1000, 2000), (5000, 100)):
        assert_agrees(config, noise(*size))


def test_parameters_that_change_pixels_change_the_key():
    keys = {parse_image_processor(config).canonical for config in VARIANTS.values()}
    assert len(keys) == len(VARIANTS)
    assert parse_image_processor(SMALL).canonical == parse_image_processor({**SMALL, "do_pad": True}).canonical


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"resample": 9}, "resample=9 is no filter"),
        ({"resample": None}, "resample=None is no filter"),
        ({"size": {"shortest_edge": 30}}, "width must be a positive integer"),
        ({"max_image_size": {"longest_edge": 0}}, "longest_edge must be a positive integer"),
        ({"image_mean": [0.5, 0.5]}, "image_mean must have 3 numbers"),
    ],
)
def test_configurations_that_cannot_be_followed_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_image_processor({**SMALL, **config})


def test_a_lack_of_memory_for_tiles_is_an_error_of_that_image_alone(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    processor = parse_image_processor(SMALL)
    image = noise(50, 40)
    with monkeypatch.context() as patch:
        patch.setattr(np, "stack", fail)
        with pytest.raises(EncoderInputMissing, match="no memory for an image at the moment"):
            processor.tiles(image)
    assert processor.tiles(image).shape[1:] == (3, 32, 32)
