"""Converts images to tiles of normalized pixels, by the ``preprocessor_config.json`` of Idefics 3 and SmolVLM.

Owns the geometry, which the router needs to count placeholder tokens, and the arithmetic, whose results are bit-identical
to transformers' own processor on Pillow. Torch-free. Knows nothing of files (``core.model.image_file``), prompts or weights.

    image --longest edge--> resized --up to whole tiles--> | 1 | 2 |   and the whole, shrunk to one tile: | 5 |
                                                           | 3 | 4 |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError
from core.model.arch import positive_count
from core.model.image_file import ImageSize, enough_memory

if TYPE_CHECKING:
    from PIL import Image

_LARGEST_EDGE = 4096  # of a resized image, even if the configuration has a larger value
_DEFAULTS: Mapping[str, Any] = {
    "do_resize": True,
    "size": {"longest_edge": 4 * 364},
    "resample": 1,
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 364},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
_NUM_FILTERS = 6  # the number of Pillow's ``Image.Resampling`` filters


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The cut of an image: rows and columns of tiles, or 0 of both if one tile shows all of it."""

    num_rows: int
    num_columns: int

    @property
    def num_tiles(self) -> int:
        """The number of tiles, including that of the whole image."""
        return self.num_rows * self.num_columns + 1


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """The parameters of one checkpoint.

    Images are first resized to ``longest_edge`` or ``fixed_size``, if one is set. ``tile_size``: the side of a tile in
    pixels. ``resample``: the number of a Pillow filter. ``rescale_factor`` is None if pixels stay 0 to 255; mean and deviation
    are None if they are not normalized.
    """

    longest_edge: int | None
    fixed_size: ImageSize | None
    tile_size: int
    resample: int
    splits: bool
    rescale_factor: float | None
    image_mean: tuple[float, ...] | None
    image_std: tuple[float, ...] | None

    @property
    def canonical(self) -> bytes:
        """Every parameter, in one canonical spelling: part of the identifier of a processed image."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @property
    def max_tiles(self) -> int | None:
        """The most tiles that an image can have; None if that depends on the image."""
        if not self.splits:
            return 1
        if self.longest_edge is None:
            return None if self.fixed_size is None else self.grid(self.fixed_size).num_tiles
        longest = min(_even(self.longest_edge), _LARGEST_EDGE)
        return self._grid_of(ImageSize(self._whole_tiles(longest), self._whole_tiles(longest))).num_tiles

    def grid(self, size: ImageSize) -> TileGrid:
        """Return how an image of ``size`` is cut."""
        return self._grid_of(self._split_size(size))

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Return the tiles of an RGB image, ``[num_tiles, 3, tile_size, tile_size]``, the whole image last.

        Raises:
            EncoderInputMissing: there is not enough memory for them at the moment.
        """
        with enough_memory():
            return self._tiles(image)

    def _tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        resized = self._resize(image, self._first_size(ImageSize(*image.size)))
        size = self._split_size(ImageSize(*image.size))
        grid = self._grid_of(size)
        cells = []
        if grid.num_rows:
            resized = self._resize(resized, size)
            cells = [self._cell(resized, row, column) for row in range(grid.num_rows) for column in range(grid.num_columns)]
        whole = self._resize(resized, ImageSize(self.tile_size, self.tile_size))
        return self._normalized(np.stack([np.asarray(cell) for cell in (*cells, whole)]))

    def _first_size(self, size: ImageSize) -> ImageSize:
        if self.longest_edge is not None:
            return _shrunk(_stretched(size, self.longest_edge), _LARGEST_EDGE)
        return self.fixed_size or size

    def _split_size(self, size: ImageSize) -> ImageSize:
        """Return the size at which the image is cut: whole tiles that roughly keep its proportions."""
        if not self.splits:
            return ImageSize(self.tile_size, self.tile_size)
        size = self._first_size(size)
        ratio = size.width / size.height
        if size.width >= size.height:
            width = self._whole_tiles(size.width)
            return ImageSize(width, self._whole_tiles(int(width / ratio)))
        height = self._whole_tiles(size.height)
        return ImageSize(self._whole_tiles(int(height * ratio)), height)

    def _whole_tiles(self, length: int) -> int:
        return max(1, math.ceil(length / self.tile_size)) * self.tile_size

    def _grid_of(self, size: ImageSize) -> TileGrid:
        if max(size.width, size.height) <= self.tile_size:
            return TileGrid(0, 0)
        return TileGrid(size.height // self.tile_size, size.width // self.tile_size)

    def _cell(self, image: Image.Image, row: int, column: int) -> Image.Image:
        left, top = column * self.tile_size, row * self.tile_size
        return image.crop((left, top, left + self.tile_size, top + self.tile_size))

    def _resize(self, image: Image.Image, size: ImageSize) -> Image.Image:
        from PIL.Image import Resampling

        return image.resize((size.width, size.height), Resampling(self.resample))

    def _normalized(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return ``[N, 3, H, W]`` from ``[N, H, W, 3]``: a pixel has 256 values, so each is computed once."""
        values = np.arange(256, dtype=np.float64)
        values = (values * self.rescale_factor if self.rescale_factor is not None else values).astype(np.float32)
        table = np.broadcast_to(values, (3, 256))
        if self.image_mean is not None:
            mean, std = (np.array(numbers, dtype=np.float32)[:, None] for numbers in (self.image_mean, self.image_std))
            table = (table - mean) / std
        return np.stack([table[channel][pixels[..., channel]] for channel in range(3)], axis=1)


def parse_image_processor(config: Mapping[str, Any]) -> ImageProcessor:
    """Parse ``preprocessor_config.json``.

    Raises:
        ConfigError: a field is wrong, or has a value that is not supported.
    """
    config = {**_DEFAULTS, **config}
    size = config["size"] if config["do_resize"] else {}
    fixed = None
    if size and not size.get("longest_edge"):
        fixed = ImageSize(positive_count(size, "width"), positive_count(size, "height"))
    resample = config["resample"]
    if not isinstance(resample, int) or not 0 <= resample < _NUM_FILTERS:
        raise ConfigError(f"preprocessor_config.json: resample={resample!r} is no filter of Pillow", param="resample")
    return ImageProcessor(
        longest_edge=positive_count(size, "longest_edge") if size and fixed is None else None,
        fixed_size=fixed,
        tile_size=positive_count(config["max_image_size"], "longest_edge"),
        resample=resample,
        splits=bool(config["do_image_splitting"]),
        rescale_factor=float(config["rescale_factor"]) if config["do_rescale"] else None,
        image_mean=_per_channel(config, "image_mean") if config["do_normalize"] else None,
        image_std=_per_channel(config, "image_std") if config["do_normalize"] else None,
    )


def _per_channel(config: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = config[name]
    numbers = (float(value),) * 3 if isinstance(value, int | float) else tuple(float(number) for number in value)
    if len(numbers) != 3:
        raise ConfigError(f"preprocessor_config.json: {name} must have 3 numbers, got {value!r}", param=name)
    return numbers


def _stretched(size: ImageSize, longest: int) -> ImageSize:
    """Return the size with its longest edge changed to ``longest`` and the other made even."""
    ratio = size.width / size.height
    if size.width >= size.height:
        return ImageSize(longest, max(1, _even(int(longest / ratio))))
    return ImageSize(max(1, _even(int(longest * ratio))), longest)


def _shrunk(size: ImageSize, longest: int) -> ImageSize:
    """Return the size with its longest edge made at most ``longest``."""
    ratio = size.width / size.height
    if size.width >= size.height and size.width > longest:
        return ImageSize(longest, max(1, int(longest / ratio)))
    if size.height > size.width and size.height > longest:
        return ImageSize(max(1, int(longest * ratio)), longest)
    return size


def _even(length: int) -> int:
    return length + length % 2
