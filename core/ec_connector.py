"""The interface of an EC connector: ``ECConnector``, the ``ECContext`` it is made from, its two sides, and ``ImageReadiness``.

EC = encoder cache: the embeddings of media items, computed by the model's encoder and merged into the prompt. An EC connector
moves them between workers, as a KV connector moves KV (``core.connector``). The scheduler side decides what is loaded and for
what a request waits; the worker side moves the bytes. All methods are called on the engine thread and must not block.

One item on its way, where an encode worker has computed it (names as in vLLM's ``ECConnectorBase``):

    scheduler  ensure_cache_available(request)   False: being fetched into host memory, the request waits; then True
               has_cache_item(identifier)        True: fetched and verified, so it need not be computed
               update_state_after_alloc(...)     it gets its place in the encoder cache in this step
               build_connector_meta(...)         → worker
    worker     start_load_caches(...)            copies it into ``encoder_cache`` before the encoder and the decoder run

Every wait has a bound: after its deadline ``ensure_cache_available`` is True without the item, which is then computed here; and
if the image is not at hand either, ``take_unavailable_requests`` ends that request alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.connector import WorkerContext
from core.request import ECConnectorMetadata, ECConnectorOutput, Request, SchedulerOutput
from core.wire.media import ECSource, MMFeature
from core.wire.messages import ErrorInfo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class EmbeddingsLayout:
    """The rows of every entry of an encoder cache: [num_embeds, hidden_size] of ``dtype`` (torch's name) on ``device``."""

    hidden_size: int
    dtype: str
    device: str = "cpu"
    itemsize: int = 4

    def num_bytes(self, num_embeds: int) -> int:
        """Return the size of so many rows."""
        return num_embeds * self.hidden_size * self.itemsize


class ImageReadiness:
    """What has to be done to an image before it can be embedded: decoding, which takes longer than a step
    and runs in parallel with steps.

    The scheduler asks for each image that it would have computed, step by step, in the order in which images get their turn; a
    request whose image is not ready waits like one whose embeddings are on their way. As an engine with nothing else to do
    sleeps, its wakeup must follow when an image has become ready. Engine thread only; no method blocks. This one finds every
    image ready as it is; ``core.engine.media.image_decode_thread`` does the work.
    """

    def begin_step(self) -> None:
        """Begin the questions of a step. Raises the error that has ended the work; it ends the engine."""

    def is_ready(self, user: str, feature: MMFeature, content: bytes) -> bool:
        """Say whether an image can be embedded in this step; if not, it is queued for preparation, after earlier ones.

        ``user`` is the request that wants it, ``content`` its file. A bad file is ready: embedding it fails with the reason.
        """
        return True

    def claim(self, identifier: bytes) -> None:
        """Learn that a ready image is embedded in this step."""

    def end_step(self) -> bool:
        """Continue to prepare, now that all images that this step wants are known.

        True if an image that was ready has made room for others: the next step finds it not ready.
        """
        return False

    def forget(self, user: str, features: Iterable[MMFeature]) -> None:
        """Forget a request with these images, however it ended: images that no other request wants are not prepared."""


class ECConnectorScheduler(ABC):
    """The side inside the scheduler."""

    def bind_encoder_cache(self, holds: Callable[[bytes], bool]) -> None:
        """Receive, once and before any request, what says whether an item is in the encoder cache: it needs no fetch.

        It may be gone the next time: until a request refers to it, it makes room for others.
        """

    @abstractmethod
    def has_cache_item(self, identifier: bytes) -> bool:
        """True if the embeddings are here, verified, and stay until they are loaded in this step."""

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Say whether the request may be scheduled now, as far as embeddings go; start to fetch what it lacks.

        Only features that end behind ``num_computed_tokens`` count. False = ask again in a later step; meanwhile the request
        holds nothing. It may be called many times for one request, and must be True for good after a bounded time. As an
        engine with nothing else to do sleeps, the worker side's wakeup must follow when the answer changes.
        """
        return True

    @abstractmethod
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Learn that feature ``index`` of the request has a place in the encoder cache from this step on.

        It is computed in this step, and can be saved, unless ``has_cache_item`` was True of it: then it must be loaded.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """Return this step's message to the worker side and reset per-step state. Called for empty steps too.

        An item of ``update_state_after_alloc`` is computed or loaded even if its request was preempted within the step.
        """

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """See the worker side's report of a step."""

    def request_finished(self, request: Request) -> None:
        """Forget a request, once, however it ended, also if it never ran."""

    def take_unavailable_requests(self) -> Mapping[str, ErrorInfo]:
        """Return and forget requests that can never run, as embeddings and image are missing. They end with the error."""
        return {}

    def has_pending_push_work(self) -> bool:
        """True if the engine must keep stepping for the connector's sake."""
        return False

    def shutdown(self) -> None:
        """Release everything; nothing is called afterwards."""


class ECConnectorWorker(ABC):
    """The side that serves the model runner.

    Per step: ``start_load_caches`` → for each item that is computed ``save_caches`` → ``get_finished``. Empty steps run the
    same sequence without items. An encode worker, which has no scheduler, uses ``save_caches``, ``get_finished`` and
    ``find_source`` alone.
    """

    @abstractmethod
    def register_caches(self, layout: EmbeddingsLayout) -> None:
        """Learn the form of the embeddings, once, before any step."""

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Receive a thread-safe callback that wakes an idle engine when there is something to report."""

    @abstractmethod
    def start_load_caches(self, encoder_cache: MutableMapping[bytes, Tensor], metadata: ECConnectorMetadata) -> None:
        """Put what the scheduler side asked for into ``encoder_cache``, by identifier, checked, before this returns.

        What cannot be loaded stays out and is reported as failed: the scheduler has it computed in a later step, where the
        image is at hand.
        """

    @abstractmethod
    def save_caches(self, encoder_cache: Mapping[bytes, Tensor], identifier: bytes) -> None:
        """Offer embeddings that were computed just now to others. A no-op unless the connector is a producer."""

    def find_source(self, identifier: bytes) -> ECSource | None:
        """Return where embeddings that were offered earlier can be read, with a new lease; None if they are gone.

        How an encode worker answers for an item that it has computed before; it computes it again if there is none.
        """
        return None

    def get_finished(self, finished_req_ids: set[str]) -> ECConnectorOutput:
        """Report what ended since the last call; each thing once. ``finished_req_ids`` left the scheduler in this step."""
        return ECConnectorOutput()

    def shutdown(self) -> None:
        """Stop threads and release memory; nothing is called afterwards."""


@dataclass(frozen=True, kw_only=True)
class ECContext(WorkerContext):
    """What an EC connector is made from: the worker and the model it has loaded."""

    model_fingerprint: bytes


class ECConnector(ABC):
    """Makes both sides of an EC connector, and runs in the worker's event loop.

    The engine gets ``scheduler`` and ``worker``, and calls them on its thread only; an encode worker uses ``worker`` alone.
    ``worker.register_caches`` comes before ``start``. Workers pair with workers whose connector has the same ``name``.
    """

    name: str
    scheduler: ECConnectorScheduler
    worker: ECConnectorWorker

    @property
    def host_id(self) -> str:
        """Equal on two workers between which the transports of one host work; empty if that plays no part."""
        return ""

    @abstractmethod
    async def start(self) -> None:
        """Bind sockets and start threads.

        Raises:
            ConfigError: an address or size cannot be used.
            ConnectorUnavailable: a library or device is missing.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End threads, close sockets. Idempotent."""

    def release(self, sources: Iterable[ECSource]) -> None:
        """End the leases of these sources: they will not be read. Idempotent. Any thread."""

    def num_leased_chunks(self) -> int:
        """Return how much is held for readers, in chunks of host memory."""
        return 0

    def longest_lease_s(self) -> float:
        """Return how long the last of it is held, unless its reader asks for more time."""
        return 0.0


ECConnectorFactory = Callable[[ECContext], ECConnector]
