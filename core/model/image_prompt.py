"""Images in a prompt: the placeholder tokens of each, and their positions, in the format of Idefics 3 and SmolVLM.

Owns the expansion of one image tag of a rendered conversation into the tags and tokens that the model was trained on, and the
``MMFeature`` of each. Torch-free: the router expands prompts, workers get token ids. Knows no pixels.

    <image>  →  <fake><row_1_col_1><image>…<fake><row_1_col_2><image>…\\n …\\n<fake><global-img><image>…<fake>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError, InvalidRequest
from core.kv.hashing import hash_media
from core.model.hub import ModelFiles
from core.model.image_file import ImageSize, require_pillow
from core.model.image_processor import ImageProcessor, TileGrid, parse_image_processor
from core.model.tokenizer import Tokenizer
from core.model.vision_arch import VisionArch, parse_vision_arch
from core.wire.media import MMFeature

_FAKE_TOKEN = "<fake_token_around_image>"
_WHOLE_IMAGE_TOKEN = "<global-img>"


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image of a prompt: the client's file, and its size."""

    content: bytes
    size: ImageSize


class ImagePrompts:
    """Writes the images of one model into prompts. Thread-safe: it holds no state of any request.

    Raises: ConfigError if Pillow is missing, or the checkpoint contradicts itself.
    """

    def __init__(self, arch: VisionArch, files: ModelFiles, tokenizer: Tokenizer) -> None:
        require_pillow()
        self._arch = arch
        self._processor = parse_image_processor(files.image_processor_config)
        self._embeds_per_tile = embeds_per_tile(arch, self._processor, files.processor_config)
        image_token = tokenizer.token(arch.image_token_id)
        if image_token is None:
            raise ConfigError(f"the tokenizer has no image token {arch.image_token_id}", param="model.name")
        self.image_token = image_token
        self._fake_token = _named_token(files.tokenizer_config, "fake_image_token", _FAKE_TOKEN)
        self._whole_image_token = _named_token(files.tokenizer_config, "global_image_token", _WHOLE_IMAGE_TOKEN)

    def num_embeds(self, size: ImageSize) -> int:
        """Return how many embeddings, and image tokens, an image takes."""
        return self._processor.grid(size).num_tiles * self._embeds_per_tile

    def expand(self, text: str, sizes: Sequence[ImageSize]) -> str:
        """Replace the image tags of a rendered conversation, in order, by the placeholders of images of these sizes.

        Tokenize the result as a whole, then call ``features``.

        Raises:
            InvalidRequest: there are not as many tags as images; this also refuses tags that a client writes into a text.
        """
        parts = text.split(self.image_token)
        if len(parts) != len(sizes) + 1:
            raise InvalidRequest(
                f"the conversation has {len(sizes)} images, but {len(parts) - 1} times the text {self.image_token}, which "
                "stands for an image",
                param="messages",
            )
        images = [self._expansion(self._processor.grid(size)) for size in sizes]
        return "".join(part for pair in zip(parts, [*images, ""], strict=True) for part in pair)

    def features(
        self, token_ids: Sequence[int], images: Sequence[PromptImage], model_fingerprint: bytes
    ) -> tuple[tuple[MMFeature, ...], tuple[bytes, ...]]:
        """Return the positions of the images in the tokens of an expanded text, and the files that the features refer to.

        Equal files are one: their features share identifier and ``media_index``.

        Raises:
            InvalidRequest: the tokens are not those of an expanded text with these images; this also refuses truncated ones.
        """
        places = np.flatnonzero(np.asarray(token_ids) == self._arch.image_token_id)
        ends = np.cumsum([0, *(self.num_embeds(image.size) for image in images)])
        if len(places) != ends[-1]:
            raise InvalidRequest(f"the prompt has {len(places)} image tokens, its images take {ends[-1]}", param="messages")
        media = {image.content: None for image in images}
        indices = {content: index for index, content in enumerate(media)}
        processing = processing_key(self._arch, self._processor)
        identifiers = {content: hash_media(model_fingerprint, processing, content) for content in media}
        features = []
        for image, start, end in zip(images, ends[:-1], ends[1:], strict=True):
            first, last = int(places[start]), int(places[end - 1])
            features.append(
                MMFeature(
                    identifier=identifiers[image.content],
                    offset=first,
                    length=last + 1 - first,
                    num_embeds=int(end - start),
                    media_index=indices[image.content],
                )
            )
        return tuple(features), tuple(media)

    def _expansion(self, grid: TileGrid) -> str:
        embeds = self.image_token * self._embeds_per_tile
        rows = [
            "".join(f"{self._fake_token}<row_{row}_col_{column}>{embeds}" for column in range(1, grid.num_columns + 1)) + "\n"
            for row in range(1, grid.num_rows + 1)
        ]
        whole = f"{self._fake_token}{self._whole_image_token}{embeds}{self._fake_token}"
        return "".join(rows) + ("\n" if rows else "") + whole


def load_image_prompts(files: ModelFiles, tokenizer: Tokenizer) -> ImagePrompts | None:
    """Return the image prompts of a model, None for one that reads text only.

    Raises:
        ConfigError: Pillow is missing, or a configuration of the checkpoint is wrong or not supported.
    """
    arch = parse_vision_arch(files.config)
    return None if arch is None else ImagePrompts(arch, files, tokenizer)


def embeds_per_tile(arch: VisionArch, processor: ImageProcessor, processor_config: Mapping[str, Any]) -> int:
    """Return the embeddings of one tile.

    Raises:
        ConfigError: tiles are not a whole number of embeddings, or ``processor_config.json`` has another number.
    """
    per_side = processor.tile_size // arch.patch_size
    if per_side == 0 or per_side % arch.scale_factor:
        raise ConfigError(
            f"max_image_size {processor.tile_size} is {per_side} patches, no multiple of scale_factor {arch.scale_factor}",
            param="max_image_size",
        )
    count = arch.num_embeds(processor.tile_size)
    stated = processor_config.get("image_seq_len", count)
    if stated != count:
        raise ConfigError(
            f"processor_config.json: image_seq_len={stated}, but a tile has {count} embeddings", param="image_seq_len"
        )
    return count


def processing_key(arch: VisionArch, processor: ImageProcessor) -> bytes:
    """Return ``processing`` for ``hash_media``: all parameters of the way from a file to embeddings, except the weights."""
    return arch.canonical + processor.canonical


def _named_token(tokenizer_config: Mapping[str, Any], name: str, default: str) -> str:
    extra = tokenizer_config.get("extra_special_tokens")
    token = tokenizer_config.get(name) or (extra.get(name) if isinstance(extra, dict) else None) or default
    return str(token["content"]) if isinstance(token, dict) else str(token)
