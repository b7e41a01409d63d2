"""The smallest engine that can drive an EC connector: an encoder cache, no model, no scheduler.

Owns the encoder cache and the requests, and calls both sides of a connector in the order of the scheduler and the runner.
"Computing" an image makes rows that follow from its identifier, so that any wrong row shows.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from connectors.testing.stepping import call_if_open, step_until
from core.ec_connector import ECConnectorScheduler, ECConnectorWorker, EmbeddingsLayout
from core.request import ECConnectorOutput, NewRequest, Request, RequestStatus, SchedulerOutput
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams

LAYOUT = EmbeddingsLayout(hidden_size=8, dtype="float32", itemsize=4)
IMAGE_FILE = b"an image"
TIMEOUT_S = 20.0
_WHERE = "does the connector call the wakeup, and what has it written to the log?"


def identifier_of(name: str) -> bytes:
    """Return the identifier of the image of this name."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def embed(identifier: bytes, num_embeds: int, layout: EmbeddingsLayout = LAYOUT) -> torch.Tensor:
    """Return the embeddings of an image: [num_embeds, hidden_size], different rows for every image."""
    generator = torch.Generator().manual_seed(int.from_bytes(identifier[:6], "little"))
    rows = torch.randn(num_embeds, layout.hidden_size, generator=generator)
    return rows.to(getattr(torch, layout.dtype))


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image in a prompt: its name stands for its content."""

    name: str
    num_embeds: int = 64

    @property
    def identifier(self) -> bytes:
        """The name of its embeddings."""
        return identifier_of(self.name)


@dataclass(slots=True)
class ECEngine:
    """Both sides of a connector and an encoder cache. All calls come from one thread; make it inside an event loop.

    ``ran`` are requests whose embeddings are all in the cache, ``errors`` those that cannot have them. ``computed`` names the
    images that were computed here, in order.
    """

    scheduler: ECConnectorScheduler
    worker: ECConnectorWorker
    layout: EmbeddingsLayout = LAYOUT
    encoder_cache: dict[bytes, torch.Tensor] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)
    ran: dict[str, Request] = field(default_factory=dict)
    errors: dict[str, ErrorInfo] = field(default_factory=dict)
    computed: list[bytes] = field(default_factory=list)
    loaded: list[bytes] = field(default_factory=list)
    saved: dict[bytes, ECSource] = field(default_factory=dict)
    not_saved: dict[bytes, ErrorInfo] = field(default_factory=dict)
    num_steps: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def register(self) -> None:
        """Make the calls that precede the connector's start."""
        loop = asyncio.get_running_loop()
        self.worker.register_caches(self.layout)
        self.worker.set_wakeup(lambda: call_if_open(loop, self._wake.set))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(
        self, request_id: str, images: Sequence[NamedImage], sources: Sequence[ECSource] = (), *, has_images: bool = True
    ) -> Request:
        """Queue a request; without ``has_images`` its embeddings can only come by the connector."""
        features, offset = [], 1
        for index, image in enumerate(images):
            features.append(
                MMFeature(
                    identifier=image.identifier,
                    offset=offset,
                    length=image.num_embeds,
                    num_embeds=image.num_embeds,
                    media_index=index,
                )
            )
            offset += image.num_embeds + 1
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=[0] * offset,
            sampling=SamplingParams(max_tokens=1),
            mm_features=features,
            media=[IMAGE_FILE] * len(images) if has_images else [],
            ec_sources=sources,
        )
        request = self.waiting[request_id] = Request(new, None)
        return request

    def preempt(self, request: Request) -> None:
        """Preempt a running request: it must find its embeddings again."""
        request.status = RequestStatus.PREEMPTED
        self.waiting[request.request_id] = self.ran.pop(request.request_id)

    def finish(self, request: Request) -> None:
        """End a request in any state, as the scheduler does."""
        for requests in (self.waiting, self.ran):
            requests.pop(request.request_id, None)
        self.scheduler.request_finished(request)

    def forget(self) -> None:
        """Evict everything from the encoder cache."""
        self.encoder_cache.clear()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run the requests that need not wait, in order; load and compute their missing embeddings; apply the reports."""
        self.num_steps += 1
        ready = [request for request in self.waiting.values() if self.scheduler.ensure_cache_available(request, 0)]
        to_compute: dict[bytes, int] = {}
        coming = set(self.encoder_cache)
        for request in ready:
            self._schedule(request, coming, to_compute)
        for request_id, error in self.scheduler.take_unavailable_requests().items():
            self.errors[request_id] = error
            self.finish(self.waiting[request_id])
        metadata = self.scheduler.build_connector_meta(SchedulerOutput())
        self.worker.start_load_caches(self.encoder_cache, metadata)
        for identifier, num_embeds in to_compute.items():
            self.encoder_cache[identifier] = embed(identifier, num_embeds, self.layout)
            self.computed.append(identifier)
            self.worker.save_caches(self.encoder_cache, identifier)
        self._take(self.worker.get_finished(set()))
        for request in ready:
            self.check(request)

    def check(self, request: Request) -> None:
        """Check every row that a request would compute on."""
        for feature in request.mm_features:
            rows = self.encoder_cache[feature.identifier]
            assert torch.equal(rows, embed(feature.identifier, feature.num_embeds, self.layout)), "rows of something else"

    async def until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Step until the condition holds; sleep while the connector reports nothing.

        Raises:
            TimeoutError: it does not hold after ``timeout_s``. The message names the requests that still wait.
        """
        try:
            await step_until(condition, self.step, self._wake, timeout_s=timeout_s)
        except TimeoutError:
            owed = [f"the embeddings of {request_id!r} are neither loaded nor unavailable" for request_id in self.waiting]
            owed = owed or ["the connector has not done what the test waits for"]
            raise TimeoutError(f"after {timeout_s:g} s {'; '.join(owed)}: {_WHERE}") from None

    async def run(self, request: Request, timeout_s: float = TIMEOUT_S) -> None:
        """Step until a request has its embeddings, or has failed; see ``until``."""
        await self.until(lambda: request.request_id in self.ran or request.request_id in self.errors, timeout_s)

    async def save(self, image: NamedImage, timeout_s: float = TIMEOUT_S) -> ECSource:
        """Compute an image as an encode worker does, and return where other workers find it.

        Raises:
            TimeoutError: the connector has not reported the end of the save after ``timeout_s``.
        """
        held = self.worker.find_source(image.identifier)
        if held is not None:
            return held
        self.saved.pop(image.identifier, None)
        self.encoder_cache[image.identifier] = embed(image.identifier, image.num_embeds, self.layout)
        self.computed.append(image.identifier)
        self.worker.save_caches(self.encoder_cache, image.identifier)
        del self.encoder_cache[image.identifier]
        try:
            await step_until(
                lambda: image.identifier in self.saved or image.identifier in self.not_saved,
                lambda: self._take(self.worker.get_finished(set())),
                self._wake,
                timeout_s=timeout_s,
            )
        except TimeoutError:
            raise TimeoutError(f"after {timeout_s:g} s the save of image {image.name!r} has not ended: {_WHERE}") from None
        return self.saved[image.identifier]

    def _schedule(self, request: Request, coming: set[bytes], to_compute: dict[bytes, int]) -> None:
        """Find a source for each feature without embeddings, as the scheduler does; after the step none is missing."""
        for index, feature in enumerate(request.mm_features):
            if feature.identifier in coming:
                continue
            coming.add(feature.identifier)
            if self.scheduler.has_cache_item(feature.identifier):
                self.loaded.append(feature.identifier)
            else:
                assert request.has_media(index), "it was let through without image and embeddings"
                to_compute[feature.identifier] = feature.num_embeds
            self.scheduler.update_state_after_alloc(request, index)
        request.status = RequestStatus.RUNNING
        self.ran[request.request_id] = self.waiting.pop(request.request_id)

    def _take(self, output: ECConnectorOutput) -> None:
        assert not output.failed_loading, "what was here could not be loaded"
        if not output.is_empty():
            self._wake.set()  # as the engine does, which continues until nothing happens
        self.saved.update(output.finished_saving)
        self.not_saved.update(output.failed_saving)
        self.scheduler.update_connector_output(output)
