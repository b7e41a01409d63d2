"""The engine of an encode worker: images in, sources of their embeddings out.

Owns the queue of images and the requests that wait for each: requests for the same image are answered together, and known
embeddings are not computed again. There is no KV cache and no scheduler; the EC connector keeps the embeddings and knows their
sources. ``core.model.image_encoder`` computes embeddings, ``core.engine.media.image_decode_thread`` delivers the pixels.
Runs on the worker's engine thread, like ``core.engine.core``.

    queued ──► known to the connector ──────────────────────────────────────────────────────────────► answered
       └─────► decoded, in the order of the queue ──► computed, handed to the connector: being saved ──┘
                                └─────► no room for its embeddings at the connector ────────────────► failed
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from core.clock import Clock
from core.ec_connector import ECConnectorWorker, EmbeddingsLayout
from core.engine.media.image_decode_queue import Pixels
from core.engine.media.image_decode_thread import ImageReader, check_name
from core.engine.step_watch import StepSize
from core.errors import EncoderInputMissing, Full, InvalidRequest, KVFerryError
from core.log import event
from core.request import EncodedImage, EngineCoreOutput, NewRequest
from core.sched.stats import EngineStats
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo
from encode.metrics import EncodeMetrics

if TYPE_CHECKING:
    from torch import Tensor


class Encoder(ImageReader, Protocol):
    """Computes embeddings (``core.model.image_encoder.ImageEncoder``)."""

    @property
    def layout(self) -> EmbeddingsLayout:
        """The shape and type of the rows."""
        ...

    def embed(self, tiles: Pixels) -> Tensor:
        """Return the embeddings ``[num_embeds, hidden_size]`` of the pixels of an image."""
        ...


class PixelSource(Protocol):
    """Decodes images for the engine (``ImageDecodeThread``, ``ImageReadiness``)."""

    def begin_step(self) -> None:
        """Begin a step. Raises: the error that ended the thread, which ends the engine."""

    def is_ready(self, user: str, feature: MMFeature, content: bytes) -> bool:
        """Return True if an image can be embedded in this step; if not, request it, after all earlier requests."""
        ...

    def claim(self, identifier: bytes) -> None:
        """Mark a ready image as embedded in this step."""

    def end_step(self) -> bool:
        """Start decoding the requested images. Claimed images keep their room until they are taken.

        Returns True if a ready image was dropped.
        """
        ...

    def take(self, identifier: bytes, content: bytes) -> Pixels:
        """Return the pixels of an image and release their room. Raises: InvalidRequest if the file is bad."""
        ...

    def forget(self, user: str, features: Iterable[MMFeature]) -> None:
        """Forget the user's requests for these images; images without another user are not decoded."""

    def shutdown(self) -> None:
        """End the work, and forget all images. Idempotent."""


_log = logging.getLogger(__name__)

_USER = "engine"  # of every image, for the pixel source: the engine counts the requests itself
_Entry = tuple[int, int, bytes]  # (priority, arrival, identifier)


@dataclass(slots=True)
class _Image:
    """One image that requests wait for, by their arrival; ``started_at`` is set once it was computed."""

    feature: MMFeature
    content: bytes
    waiting: dict[str, float] = field(default_factory=dict)
    started_at: float | None = None

    @property
    def identifier(self) -> bytes:
        """The connector's name of its embeddings."""
        return self.feature.identifier


class EncodeEngine:
    """One thread only, except for ``stats``.

    At most ``max_batch_images`` are computed in a step, so that aborts get their turn. First come, first served among those
    that are decoded; with ``by_priority`` the smallest priority first. The engine shuts ``image_decode_thread`` down but does
    not start it; the thread has to ``wake`` the engine whenever an image is decoded.
    """

    def __init__(  # noqa: PLR0913
        self,
        encoder: Encoder,
        connector: ECConnectorWorker,
        image_decode_thread: PixelSource,
        metrics: EncodeMetrics,
        clock: Clock,
        *,
        max_batch_images: int,
        by_priority: bool = False,
    ) -> None:
        connector.register_caches(encoder.layout)
        self._encoder = encoder
        self._connector = connector
        self._image_decode_thread = image_decode_thread
        self._metrics = metrics
        self._clock = clock
        self._max_batch_images = max_batch_images
        self._by_priority = by_priority
        self._images: dict[bytes, _Image] = {}  # queued and being saved
        self._queue: list[_Entry] = []  # some may be outdated
        self._requests: dict[str, bytes] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._must_step = False
        self._is_shut_down = False
        self._has_warned = False
        self._stats = EngineStats()
        self._step_size = StepSize()

    @property
    def step_size(self) -> StepSize:
        """Number of images of the current step, once it is chosen. Any thread."""
        return self._step_size

    @property
    def stats(self) -> EngineStats:
        """The counts after the last step; images that are being saved count as running."""
        return self._stats

    def add_request(self, new: NewRequest) -> None:
        """Queue the one image of a request.

        Raises:
            EncoderInputMissing: the file did not come with it, or is not the named one.
        """
        (feature,) = new.mm_features
        content = new.media[feature.media_index] if feature.media_index < len(new.media) else b""
        if not content:
            raise EncoderInputMissing("the image file did not come with the request")
        image = self._images.get(feature.identifier)
        if image is None:
            self._check_name(feature, content)
            image = self._images[feature.identifier] = _Image(feature, content)
        image.waiting[new.request_id] = self._clock.now()
        self._requests[new.request_id] = feature.identifier
        self._num_arrived += 1
        if image.started_at is None:  # again, as the new request may be more urgent
            priority = new.priority if self._by_priority else 0
            self._queue.append((priority, self._num_arrived, feature.identifier))
        self._must_step = True

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; an image without a request is not computed. Returns the ids of those that had not ended."""
        alive = [request_id for request_id in request_ids if request_id in self._requests]
        for request_id in alive:
            image = self._images[self._requests.pop(request_id)]
            del image.waiting[request_id]
            if not image.waiting:
                self._forget(image)
        self._must_step |= bool(alive)  # other images may be decoded in their place
        return alive

    def step(self) -> list[EngineCoreOutput]:
        """Compute a batch of decoded images, and answer the requests whose embeddings can be read.

        Raises: the error of a dead connector, or the error that ended the image decode thread.
        """
        self._must_step = False
        outputs: list[EngineCoreOutput] = []
        batch = self._choose_batch(outputs)
        self._step_size = StepSize(num_images=len(batch))
        for image in batch:
            error = self._compute(image)
            if error is not None:
                is_bad = isinstance(error, InvalidRequest)
                outputs += self._fail(image, ErrorInfo.of(error), "bad" if is_bad else "failed")
        outputs += self._take_report()
        self._num_steps += 1
        self._stats = EngineStats(
            num_running=sum(image.started_at is not None for image in self._images.values()),
            num_waiting=sum(image.started_at is None for image in self._images.values()),
            num_steps=self._num_steps,
        )
        return outputs

    def wake(self) -> None:
        """Request one more step, because the connector has something to report or an image is decoded."""
        self._must_step = True

    def has_work(self) -> bool:
        """True if anything has arrived since the last step, or if that left decoded images."""
        return self._must_step

    def shutdown(self) -> None:
        """Stop the decoding of images and the connector's worker side. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._image_decode_thread.shutdown()
            self._connector.shutdown()

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def _choose_batch(self, outputs: list[EngineCoreOutput]) -> list[_Image]:
        """Return the images to compute, start decoding the next ones, and answer requests with known embeddings."""
        batch: list[_Image] = []
        left: list[_Entry] = []
        self._image_decode_thread.begin_step()
        for image, entry in self._take_queue():
            source = self._connector.find_source(image.identifier)
            if source is not None:
                outputs += self._answer(image, source, was_cached=True)
                continue
            is_ready = self._image_decode_thread.is_ready(_USER, image.feature, image.content)
            if is_ready and len(batch) < self._max_batch_images:
                self._image_decode_thread.claim(image.identifier)
                batch.append(image)
                continue
            self._must_step |= is_ready
            left.append(entry)
        self._image_decode_thread.end_step()
        self._queue = left
        # Images claimed by this step take room, in which others are queued once they are embedded; no event would say so.
        self._must_step |= bool(batch and left)
        return batch

    def _take_queue(self) -> Iterator[tuple[_Image, _Entry]]:
        """Empty the queue: return each image that is still wanted and not begun once, with its most urgent entry."""
        queue, self._queue = sorted(self._queue), []
        seen: set[bytes] = set()
        for entry in queue:
            image = self._images.get(entry[2])
            if image is not None and image.started_at is None and entry[2] not in seen:
                seen.add(entry[2])
                yield image, entry

    def _check_name(self, feature: MMFeature, content: bytes) -> None:
        """Check that a file is the named one. The first that is not is logged: it may be so with every image."""
        try:
            check_name(self._encoder, feature.identifier, content)
        except EncoderInputMissing as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(event("image_named_otherwise", reason=error.message))
            raise

    # ---- one image ---------------------------------------------------------------------------------------------------

    def _compute(self, image: _Image) -> KVFerryError | None:
        """Embed an image and pass it to the connector; return the error of the image, if there is one.

        Room is asked for here, as readers may release it until then, and the images before this one may have taken it.
        """
        image.started_at = self._clock.now()
        num_embeds = image.feature.num_embeds
        try:
            pixels = self._image_decode_thread.take(image.identifier, image.content)
            if not self._connector.has_room(num_embeds):  # the worker that computes the prompt embeds it: once, not twice
                raise Full(f"the EC connector has no room for {num_embeds} rows of embeddings at the moment")
            embeddings = self._encoder.embed(pixels)
            if len(embeddings) != num_embeds:
                raise EncoderInputMissing(f"it has {len(embeddings)} embeddings, {num_embeds} were announced")
        except KVFerryError as error:
            return error
        self._metrics.count_computed(len(embeddings), self._clock.now() - image.started_at)
        self._connector.save_caches({image.identifier: embeddings}, image.identifier)
        return None

    def _take_report(self) -> list[EngineCoreOutput]:
        """Answer requests for images whose save has ended since the last step, successfully or not."""
        outputs: list[EngineCoreOutput] = []
        report = self._connector.get_finished(set())
        for identifier, source in report.finished_saving.items():
            image = self._images.get(identifier)
            outputs += self._answer(image, source, was_cached=False) if image is not None else []
        for identifier, error in report.failed_saving.items():
            image = self._images.get(identifier)
            outputs += self._fail(image, error, "failed") if image is not None else []
        return outputs

    def _answer(self, image: _Image, source: ECSource, *, was_cached: bool) -> list[EngineCoreOutput]:
        """Answer all requests for an image with its source, each with a lease of its own."""
        now, outputs = self._clock.now(), []
        started_at = now if image.started_at is None else image.started_at
        for number, (request_id, arrival) in enumerate(image.waiting.items()):
            lease = source if number == 0 else self._connector.find_source(image.identifier) or source
            is_second_hand = was_cached or number > 0
            if is_second_hand:
                self._metrics.count("cached")
            encoded = EncodedImage(lease, is_second_hand, max(0.0, started_at - arrival), now - max(started_at, arrival))
            outputs.append(EngineCoreOutput(request_id, [], finish_reason="stop", encoded=encoded))
        self._forget(image)
        return outputs

    def _fail(self, image: _Image, error: ErrorInfo, outcome: str) -> list[EngineCoreOutput]:
        self._metrics.count(outcome)
        outputs = [EngineCoreOutput(request_id, [], finish_reason="error", error=error) for request_id in image.waiting]
        self._forget(image)
        return outputs

    def _forget(self, image: _Image) -> None:
        del self._images[image.identifier]
        for request_id in image.waiting:
            del self._requests[request_id]
        self._image_decode_thread.forget(_USER, [image.feature])
