"""The model that a router serves: its name, tokenizer, image prompts and sampling defaults.

Owns the reading of ``generation_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.config_workers import ModelSection
from core.errors import ConfigError
from core.model.hub import ModelFiles
from core.model.image_prompt import ImagePrompts, load_image_prompts
from core.model.tokenizer import Tokenizer
from core.wire.limits import Fraction
from core.wire.sampling import Factor, NonNegative, SamplingParams

_NEUTRAL = SamplingParams()


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for missing request fields, named as in ``generation_config.json`` and read from it."""

    temperature: NonNegative = _NEUTRAL.temperature
    top_p: Fraction = _NEUTRAL.top_p
    top_k: int = _NEUTRAL.top_k  # 0 and below: all tokens
    min_p: Fraction = _NEUTRAL.min_p
    repetition_penalty: Factor = _NEUTRAL.repetition_penalty


NEUTRAL_SAMPLING = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model of a router."""

    name: str
    tokenizer: Tokenizer
    image_prompts: ImagePrompts | None = None  # None = text only
    defaults: SamplingDefaults = NEUTRAL_SAMPLING


def served_model(section: ModelSection, files: ModelFiles) -> ServedModel:
    """Return the model described by the settings and the model's files.

    Raises:
        ConfigError: a file is unusable, or the image libraries are missing for a model with image input.
    """
    defaults = sampling_defaults(files.generation_config) if section.generation_config == "auto" else NEUTRAL_SAMPLING
    tokenizer = Tokenizer(files)
    return ServedModel(
        name=section.served_name or section.name,
        tokenizer=tokenizer,
        image_prompts=load_image_prompts(files, tokenizer),
        defaults=defaults,
    )


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling parameters of a ``generation_config.json``; like vLLM, ignores null and other keys.

    Raises:
        ConfigError: a value would be invalid in a request; names it and the workaround.
    """
    named = {key: generation_config.get(key) for key in SamplingDefaults.__struct_fields__}
    try:
        return msgspec.convert({key: value for key, value in named.items() if value is not None}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the model's generation_config.json: {error}; model.generation_config = none ignores the file",
            param="model.generation_config",
        ) from None
