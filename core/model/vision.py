"""Pixels to embeddings: SigLIP tower, pixel shuffle and projection into the text decoder, as in Idefics 3 and SmolVLM.

Owns the order of operations over the tiles of one image, at any square resolution. Knows nothing of image files
(``core.model.image_processor``), prompts or requests. Runs under ``torch.inference_mode``.

Every patch of a tile is used: the image processor resizes tiles to full squares, so there is no padding to mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.torch_kernels import upload
from core.model.linear import Linear
from core.model.vision_arch import VisionArch

# Tiles per pass. On the CPU one fills the cores, and more only take memory; on CUDA a tile of a thousand patches is little
# work.
_TILES_PER_PASS = {"cpu": 1, "cuda": 16}
_LAST_FRACTION = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Subtract the mean and divide by the standard deviation over the last axis, times ``weight`` plus ``bias`` ``[D]``."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` ``[T, D]`` normalized."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class VisionLayerWeights:
    """The weights of one layer; ``qkv`` gives the heads of query, key and value in this order."""

    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """All weights, on one device.

    ``patch_embedding`` maps flattened patches ``[num_channels * patch_size²]``, channels first. ``positions``
    ``[num_positions, hidden_size]``, rows of the image one after another. ``projection`` maps ``scale_factor²`` patches side by
    side to one embedding.
    """

    patch_embedding: Linear
    positions: Tensor
    layers: tuple[VisionLayerWeights, ...]
    norm: LayerNorm
    projection: Linear


class VisionTower:
    """The image half of a model; holds weights and no state of any image."""

    def __init__(self, arch: VisionArch, weights: VisionWeights) -> None:
        self.arch = arch
        self._weights = weights

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._weights.positions.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and embeddings."""
        return self._weights.positions.dtype

    @property
    def tiles_per_pass(self) -> int:
        """Tiles that are embedded together; the tiles of a larger image are embedded in several passes."""
        return _TILES_PER_PASS[self.device.type]

    def embed(self, tiles: Tensor) -> Tensor:
        """Return the embeddings ``[num_tiles * rows * columns, output_size]`` of the tiles of one image, tile by tile.

        Args:
            tiles: floating, ``[num_tiles, num_channels, side, side]``, on any device. ``side`` is in pixels; pixels beyond the
                last whole patch are ignored, and the number of patches is a multiple of ``scale_factor``. If it differs from
                ``image_size``, positions are spread over the tile.
        """
        weights = self._weights
        patches_per_side = tiles.shape[-1] // self.arch.patch_size
        ids = position_ids(patches_per_side, self.arch.num_positions_per_side)
        positions = weights.positions[upload(ids.numpy(), self.device)]
        parts = torch.split(tiles, self.tiles_per_pass)
        return torch.cat([self._embed_part(part.to(positions), positions) for part in parts])

    def _embed_part(self, tiles: Tensor, positions: Tensor) -> Tensor:
        num_tiles, num_patches = len(tiles), len(positions)
        hidden = self._weights.patch_embedding(self._patches(tiles))
        hidden.view(num_tiles, num_patches, -1).add_(positions)
        for layer in self._weights.layers:
            attended = self._attend(layer.qkv(layer.attention_norm(hidden)), num_tiles)
            hidden.add_(layer.output(attended))
            inner = F.gelu(layer.up(layer.mlp_norm(hidden)), approximate="tanh")
            hidden.add_(layer.down(inner))
        hidden = self._weights.norm(hidden).view(num_tiles, num_patches, -1)
        return self._weights.projection(pixel_shuffle(hidden, self.arch.scale_factor).flatten(0, 1))

    def _patches(self, tiles: Tensor) -> Tensor:
        """Cut tiles into flattened patches ``[num_tiles * num_patches, num_channels * patch_size²]``."""
        num_tiles, channels, side, _ = tiles.shape
        size, per_side = self.arch.patch_size, side // self.arch.patch_size
        whole = tiles[:, :, : per_side * size, : per_side * size]
        grid = whole.reshape(num_tiles, channels, per_side, size, per_side, size)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * size * size)

    def _attend(self, qkv: Tensor, num_tiles: int) -> Tensor:
        """Let every patch of a tile attend to all of it; return ``[num_tiles * num_patches, hidden_size]``."""
        heads = qkv.view(num_tiles, -1, 3, self.arch.num_heads, self.arch.head_dim)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).reshape(-1, self.arch.hidden_size)


def position_ids(patches_per_side: int, positions_per_side: int) -> Tensor:
    """Return the position of each patch of a square tile, int64 ``[patches_per_side²]``.

    A patch takes the position at the same share of the side as its corner: an image of another resolution than the tower's is
    stretched over all positions (after NaViT; Dehghani et al., 2023). In fp32, as the model was trained: if a corner falls
    on a boundary, the rounding decides.
    """
    boundaries = torch.arange(1 / positions_per_side, 1.0, 1 / positions_per_side)
    step = 1.0 / torch.tensor(patches_per_side)
    fractions = (torch.arange(patches_per_side, dtype=torch.float32) * step).clamp(max=_LAST_FRACTION)
    places = torch.bucketize(fractions, boundaries, right=True)
    return (places[:, None] * positions_per_side + places).flatten()


def pixel_shuffle(hidden: Tensor, factor: int) -> Tensor:
    """Put ``factor`` by ``factor`` neighbouring patches side by side: ``[N, P, D]`` to ``[N, P / factor², D * factor²]``.

    Within one result, rows of patches follow each other, and in a row its columns.
    """
    num_tiles, num_patches, size = hidden.shape
    side = round(num_patches**0.5) // factor
    grid = hidden.view(num_tiles, side, factor, side, factor, size)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(num_tiles, side * side, factor * factor * size)
