"""Which images the prompts of a simulated run show, who embeds them, and how much room there is, drawn from the seed.

Drawn apart from everything else, so that a run without images is what it was. Called by ``kvferry.sim.plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from core.testing.hash_encoder import Image, image_feature
from core.wire.media import MMFeature

_SHARE = 0.2  # of runs that have images
_SHOWING_SHARE = 0.7  # of their requests that show some
_PLACES = (5, 17, 30, 52)  # where an image may begin: the same for all, so that they meet in the prefix cache
_NUM_IMAGES = 5


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt with images in it."""

    prompt_token_ids: tuple[int, ...]
    features: tuple[MMFeature, ...]
    media: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The images of a run. A worker keeps ``cache_size`` embeddings and computes at most ``max_embeds_per_step`` in a step."""

    seed: int
    images: tuple[Image, ...]
    cache_size: int
    max_embeds_per_step: int

    def __str__(self) -> str:
        sizes = ", ".join(str(image.num_embeds) for image in self.images)
        return f"images of {sizes} embeddings; {self.cache_size} are kept, {self.max_embeds_per_step} computed in a step"

    def show(self, name: str, prompt_token_ids: Sequence[int]) -> Shown:
        """Return the prompt with images instead of some of its tokens. The same name gets the same ones."""
        random = Random(f"{self.seed}/images/{name}")
        tokens = list(prompt_token_ids)
        features: list[MMFeature] = []
        media: list[bytes] = []
        places = [place for place in _PLACES if random.random() < _SHOWING_SHARE / 2]
        for place, following in zip(places, [*places[1:], len(tokens)], strict=False):
            image = random.choice(self.images)
            span = image.token_ids
            if place + len(span) > min(following, len(tokens)):
                continue
            tokens[place : place + len(span)] = span
            features.append(image_feature(image.media, place, image.num_embeds, len(media), len(span)))
            media.append(image.media)
        return Shown(tuple(tokens), tuple(features), tuple(media))


def draw_images(seed: int) -> ImagePlan | None:
    """Return the images of a seed, if it has some."""
    random = Random(f"{seed}/photos")
    if random.random() >= _SHARE:
        return None
    images = tuple(
        Image(b"image %d" % number, random.randint(2, 12), random.choice((0, 0, 3))) for number in range(_NUM_IMAGES)
    )
    largest = max(image.num_embeds for image in images)
    return ImagePlan(
        seed=seed,
        images=images,
        cache_size=largest + random.choice((0, 5, 100)),
        max_embeds_per_step=largest + random.choice((0, 5, 100)),
    )
