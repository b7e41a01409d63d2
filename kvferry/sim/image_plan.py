"""The images in the prompts of a simulated run, their encode workers, and the room for them, drawn from the seed.

Drawn separately from everything else, so that runs without images stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from connectors.ec.chunks import CHUNK_EMBEDS
from core.testing.hash_encoder import Image, image_feature
from core.wire.media import MMFeature
from kvferry.sim.faults import Fault, FaultEvent

_SHARE = 0.2  # of runs that have images, most of them with encode workers whose memory is read
_SHARED_SHARE = 0.15  # of the others: images with a store for embeddings
_SHOWING_SHARE = 0.7  # of their requests that show images
_PLACES = (5, 17, 30, 52)  # where an image may begin: the same positions for all, so that prompts share prefixes
_NUM_IMAGES = 5
_LARGE_EMBEDS = (CHUNK_EMBEDS + 1, CHUNK_EMBEDS + 6)  # of an image that takes two chunks, and most of a long prompt
_LARGE_SHARE = 0.5  # of runs with a store for embeddings that have one, and of the prompts with room for it that show it
_GENTLE_SHARE = 0.3
_ABSENT_SHARE = 0.3  # of runs with encode workers in which no other worker gets the files of some images
_BEFALLS = (  # kind, how often at most, for how long at most
    (Fault.CRASH, 2, 3.0),
    (Fault.FREEZE, 2, 6.0),
    (Fault.DRAIN, 1, 2.0),
    (Fault.STORE_CORRUPT, 10, 0.0),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt with images in it."""

    prompt_token_ids: tuple[int, ...]
    features: tuple[MMFeature, ...]
    media: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The images of a run. A worker keeps ``cache_size`` embeddings and computes at most ``max_embeds_per_step`` in a step.

    ``connector`` names the EC connector; "" = none. Decoding an image takes up to ``decode_s``, 0 = no time at all; the decoded
    images that are kept have at most ``decoded_embeds`` embeddings together.
    """

    seed: int
    connector: str
    images: tuple[Image, ...]
    large_image: Image | None = None
    cache_size: int
    max_embeds_per_step: int
    num_encoders: int
    encode_s: float  # of a batch, up to
    num_encoder_chunks: int  # of memory, on each encode worker; an image takes one, a large one two
    num_reader_chunks: int  # and on each worker that fetches
    deadline_s: float  # of a request's wait for embeddings
    lease_s: float
    encode_timeout_s: float  # that a router waits for encode workers
    is_gentle: bool  # there are no faults of encode workers in particular
    absent: frozenset[bytes] = frozenset()  # files that only encode workers get
    decode_s: float = 0.0
    decoded_embeds: int = 1

    def __str__(self) -> str:
        sizes = ", ".join(str(image.num_embeds) for image in self.all_images)
        kept = f"{self.cache_size} are kept, {self.max_embeds_per_step} computed in a step"
        if self.decode_s:
            kept += f", {self.decoded_embeds} decoded in {self.decode_s:.3g} s each"
        waits = f"waits of {self.encode_timeout_s:.3g} and {self.deadline_s:.3g} s"
        times = f"batches of {self.encode_s:.3g} s, {waits}, leases of {self.lease_s:.3g} s"
        room = f"{self.num_encoder_chunks} and {self.num_reader_chunks} chunks"
        room += f", without {', '.join(sorted(map(bytes.decode, self.absent)))}" if self.absent else ""
        shared = f" by {self.connector}" if self.connector == "shared" else ""
        return f"images of {sizes} embeddings{shared}; {kept}; {self.num_encoders} encode workers, {times}, {room}"

    @property
    def all_images(self) -> tuple[Image, ...]:
        """Return every image that a prompt of this run may show."""
        return self.images if self.large_image is None else (*self.images, self.large_image)

    def show(self, name: str, prompt_token_ids: Sequence[int]) -> Shown:
        """Return the prompt with images instead of some of its tokens. The same name gets the same ones."""
        random = Random(f"{self.seed}/images/{name}")
        tokens = list(prompt_token_ids)
        features: list[MMFeature] = []
        media: list[bytes] = []
        places = [place for place in _PLACES if random.random() < _SHOWING_SHARE / 2]
        images = [random.choice(self.images) for _ in places]
        if self.large_image is not None and len(tokens) > _PLACES[0] + _LARGE_EMBEDS[1] and random.random() < _LARGE_SHARE:
            places, images = [_PLACES[0]], [self.large_image]
        for image, place, following in zip(images, places, [*places[1:], len(tokens)], strict=False):
            span = image.token_ids
            if place + len(span) > min(following, len(tokens)):
                continue
            tokens[place : place + len(span)] = span
            features.append(image_feature(image.media, place, image.num_embeds, len(media), len(span)))
            media.append(image.media)
        return Shown(tuple(tokens), tuple(features), tuple(media))

    def draw_events(self, encoders: Sequence[str], moments: Sequence[float]) -> list[FaultEvent]:
        """Draw the faults of encode workers at fixed times, shortly after something has begun."""
        random = Random(f"{self.seed}/image events")
        events: list[FaultEvent] = []
        if self.is_gentle or not encoders:
            return events
        for kind, most, longest_s in _BEFALLS:
            if kind is Fault.STORE_CORRUPT and self.connector != "p2p":
                continue  # they hold nothing for readers
            for _ in range(random.randint(0, most)):
                at = random.choice(moments) + random.choice((0.05, 0.2, 1.0)) * random.random()
                seconds = random.uniform(0.1, longest_s) if longest_s else 0.0
                events.append(FaultEvent(at, kind, (random.choice(encoders),), seconds))
        return events


def draw_images(seed: int) -> ImagePlan | None:
    """Return the images of a seed, if it has some."""
    random = Random(f"{seed}/photos")
    if random.random() < _SHARE:
        plan = _draw_plan(random, seed, "p2p")
        return _withhold_files(plan) if plan.num_encoders else replace(plan, connector="")
    random = Random(f"{seed}/stored photos")
    return _withhold_files(_draw_plan(random, seed, "shared")) if random.random() < _SHARED_SHARE else None


def _withhold_files(plan: ImagePlan) -> ImagePlan:
    """Return the plan; in some runs, some files are not sent to the workers that compute prompts."""
    random = Random(f"{plan.seed}/absent files")
    if not plan.num_encoders or random.random() >= _ABSENT_SHARE:
        return plan
    return replace(plan, absent=frozenset(image.media for image in random.sample(plan.images, random.randint(1, 2))))


def _draw_plan(random: Random, seed: int, connector: str) -> ImagePlan:
    images = tuple(
        Image(b"image %d" % number, random.randint(2, 12), random.choice((0, 0, 3))) for number in range(_NUM_IMAGES)
    )
    large = None
    if connector == "shared" and random.random() < _LARGE_SHARE:
        large = Image(b"large image", random.randint(*_LARGE_EMBEDS))
    largest = max(image.num_embeds for image in (*images, *([large] if large is not None else [])))
    decoding = Random(f"{seed}/decoding")
    return ImagePlan(
        seed=seed,
        connector=connector,
        images=images,
        large_image=large,
        cache_size=largest + random.choice((0, 5, 100)),
        max_embeds_per_step=largest + random.choice((0, 5, 100)),
        num_encoders=random.choice((0, 1, 1, 2)),
        encode_s=random.choice((0.01, 0.05, 0.3, 1.5)),
        num_encoder_chunks=random.choice((1, 3, 20)),
        num_reader_chunks=random.choice((1, 3, 20)),
        deadline_s=random.choice((0.05, 0.5, 3.0)),
        lease_s=random.choice((0.3, 2.0, 8.0)),
        encode_timeout_s=random.choice((0.2, 2.0, 20.0)),
        is_gentle=random.random() < _GENTLE_SHARE,
        decode_s=decoding.choice((0.0, 0.0, 0.01, 0.1, 1.0)),
        decoded_embeds=decoding.choice((1, largest, 3 * largest)),
    )
