"""Computes the embeddings of an image file: decoding and processing, then the model's image half.

Owns the parts of a checkpoint that embed images. Knows nothing of requests, caches or connectors. The two steps run on
different threads: ``prepare`` on any, ``embed`` on the one thread that computes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.torch_kernels import upload
from core.ec_connector import EmbeddingsLayout
from core.kv.hashing import hash_media
from core.kv.spec import ceil_div
from core.model.arch import model_fingerprint, parse_arch
from core.model.hub import ModelFiles
from core.model.image_file import decode_image, require_pillow
from core.model.image_processor import ImageProcessor, parse_image_processor
from core.model.image_prompt import embeds_per_tile, processing_key
from core.model.vision import VisionTower
from core.model.vision_arch import VisionArch, parse_vision_arch
from core.model.vision_loader import load_vision_tower


class ImageEncoder:
    """Embeds the images of one model; holds weights and no state of any image."""

    def __init__(self, processor: ImageProcessor, tower: VisionTower, model_fingerprint: bytes) -> None:
        self.model_fingerprint = model_fingerprint
        self._processor = processor
        self._tower = tower
        self._processing = processing_key(tower.arch, processor)

    @property
    def arch(self) -> VisionArch:
        """The image half of the model."""
        return self._tower.arch

    @property
    def device(self) -> torch.device:
        """The device of the embeddings."""
        return self._tower.device

    @property
    def layout(self) -> EmbeddingsLayout:
        """The shape and type of the rows."""
        dtype = self._tower.dtype
        return EmbeddingsLayout(
            hidden_size=self.arch.output_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
            itemsize=dtype.itemsize,
        )

    @property
    def max_embeds(self) -> int:
        """The most embeddings that an image can have, 0 if that depends on the image."""
        return (self._processor.max_tiles or 0) * self.arch.num_embeds(self._processor.tile_size)

    def identify(self, content: bytes) -> bytes:
        """Return the identifier of an image file's embeddings, as the router computes it."""
        return hash_media(self.model_fingerprint, self._processing, content)

    def prepare(self, content: bytes) -> npt.NDArray[np.float32]:
        """Decode an image file and cut it into tiles ``[num_tiles, num_channels, side, side]``. Any thread; without torch.

        Raises:
            InvalidRequest: the file is damaged, no image, or too large.
            EncoderInputMissing: there is not enough memory for it at the moment.
        """
        return self._processor.tiles(decode_image(content))

    def prepared_bytes(self, num_embeds: int) -> int:
        """Return the size of the tiles of an image with this many embeddings."""
        side = self._processor.tile_size
        num_tiles = ceil_div(num_embeds, self.arch.num_embeds(side))
        return num_tiles * self.arch.num_channels * side * side * np.dtype(np.float32).itemsize

    @torch.inference_mode()
    def embed(self, tiles: npt.NDArray[np.float32]) -> Tensor:
        """Return the embeddings ``[num_embeds, output_size]`` of the tiles of an image, in the order of its image tokens."""
        is_here = self.device.type == "cpu"
        return self._tower.embed(torch.from_numpy(tiles) if is_here else upload(tiles, self.device))

    def encode(self, content: bytes) -> Tensor:
        """Return the embeddings of an image file: ``prepare`` and ``embed``. Raises the errors of ``prepare``."""
        return self.embed(self.prepare(content))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Embed as many tiles as one pass takes, which needs as much memory as any image does."""
        side = self._processor.tile_size
        self._tower.embed(torch.zeros(self._tower.tiles_per_pass, self.arch.num_channels, side, side))


def load_image_encoder(
    files: ModelFiles, dtype: torch.dtype, device: torch.device | str = "cpu", quantization: str = "none"
) -> ImageEncoder | None:
    """Load the image half of a checkpoint, None for a model that reads text only.

    ``quantization`` is that of the text half; the image half has ``dtype``.

    Raises:
        ConfigError: Pillow is missing, or files of the checkpoint are wrong, missing or not supported.
    """
    arch = parse_vision_arch(files.config)
    if arch is None:
        return None
    require_pillow()
    processor = parse_image_processor(files.image_processor_config)
    embeds_per_tile(arch, processor, files.processor_config)
    tower = load_vision_tower(arch, files.weight_files, dtype=dtype, device=device)
    return ImageEncoder(processor, tower, model_fingerprint(parse_arch(files.config), files.weights_id, quantization))
