"""The interface of an EC connector: ``ECConnector``, the ``ECContext`` it is made from, its two sides, and ``ImageReadiness``.

EC = encoder cache: the embeddings of media items, computed by the model's encoder and merged into the prompt. An EC connector
moves them between workers, as a KV connector moves KV (``core.connector``). The scheduler side decides what is loaded and for
what a request waits; the worker side moves the bytes. All methods are called on the engine thread and must not block.

The steps of one item that an encode worker has computed (names as in vLLM's ``ECConnectorBase``):

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

from core.connector import WorkerContext, check_made
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
    """Prepares images for embedding: decodes them, which takes longer than a step and runs in parallel with steps.

    The scheduler requests each image that it would have computed, step by step, in the order in which images get their turn; a
    request whose image is not ready waits like one whose embeddings are on their way. Because an engine without other work
    sleeps, its wakeup must follow when an image has become ready. Engine thread only; no method blocks. This class finds every
    image ready at once; ``core.engine.media.image_decode_thread`` decodes.
    """

    def begin_step(self) -> None:
        """Begin a step. Raises the error that ended the decode thread; it ends the engine."""

    def is_ready(self, user: str, feature: MMFeature, content: bytes) -> bool:
        """Return True if an image can be embedded in this step; if not, queue it for decoding, after earlier ones.

        ``user`` is the request that needs it, ``content`` its file. A bad file is ready: embedding it fails with the reason.
        """
        return True

    def claim(self, identifier: bytes) -> None:
        """Mark a ready image as embedded in this step."""

    def end_step(self) -> bool:
        """Continue decoding, after the step has requested all its images.

        True if a ready image was dropped to make room for others: the next step finds it not ready.
        """
        return False

    def forget(self, user: str, features: Iterable[MMFeature]) -> None:
        """Forget an ended request with these images: images that no other request needs are not decoded."""


class ECConnectorScheduler(ABC):
    """The side inside the scheduler."""

    def bind_encoder_cache(self, holds: Callable[[bytes], bool]) -> None:
        """Set the predicate for items in the encoder cache, which need no fetch. Called once, before any request.

        Such an item may be gone at the next call: until a request refers to it, it may be evicted.
        """

    @abstractmethod
    def has_cache_item(self, identifier: bytes) -> bool:
        """True if the embeddings are here, verified, and stay until they are loaded in this step."""

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return True if the request may be scheduled now, as far as embeddings go; start to fetch the missing ones.

        Only features that end after ``num_computed_tokens`` count. False = ask again in a later step; meanwhile the request
        holds nothing. It may be called many times for one request, and must become True after a bounded time and stay so.
        Because an engine without other work sleeps, the worker side's wakeup must follow when the answer changes.
        """
        return True

    @abstractmethod
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Feature ``index`` of the request has room in the encoder cache from this step on.

        It is computed in this step, and can be saved, unless ``has_cache_item`` was True for it: then it must be loaded.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """Return this step's message to the worker side and reset per-step state. Called for empty steps too.

        An allocated item is computed or loaded even if its request was preempted within the step.
        """

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Process the worker side's report of a step."""

    def request_finished(self, request: Request) -> None:
        """Forget an ended request. Called once, also for a request that never ran."""

    def take_unavailable_requests(self) -> Mapping[str, ErrorInfo]:
        """Return and forget requests that can never run, because embeddings and image are missing. They end with the error."""
        return {}

    def has_pending_push_work(self) -> bool:
        """True if the engine must keep stepping for the connector's sake."""
        return False

    def shutdown(self) -> None:
        """Release everything; nothing is called afterwards."""


class ECConnectorWorker(ABC):
    """The side that serves the model runner.

    Per step: ``start_load_caches`` → for each computed item ``save_caches`` → ``get_finished``. Empty steps run the
    same sequence without items. An encode worker, which has no scheduler, uses only ``has_room``, ``save_caches``,
    ``get_finished`` and ``find_source``.
    """

    @abstractmethod
    def register_caches(self, layout: EmbeddingsLayout) -> None:
        """Set the shape of the embeddings. Called once, before any step."""

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set a thread-safe callback that wakes an idle engine when there is a report."""

    @abstractmethod
    def start_load_caches(self, encoder_cache: MutableMapping[bytes, Tensor], metadata: ECConnectorMetadata) -> None:
        """Copy the items that the scheduler side ordered into ``encoder_cache``, by identifier and verified.

        They are there when this returns. An item that cannot be loaded is left out and reported as failed: the scheduler orders
        its computation in a later step, where the image is at hand.
        """

    @abstractmethod
    def save_caches(self, encoder_cache: Mapping[bytes, Tensor], identifier: bytes) -> None:
        """Offer embeddings that were computed just now to other workers. Does nothing unless the connector is a producer."""

    def has_room(self, num_embeds: int) -> bool:
        """Return False if embeddings of so many rows would be refused now. An encode worker does not compute them then."""
        return True

    def find_source(self, identifier: bytes) -> ECSource | None:
        """Return where embeddings that were offered earlier can be read, with a new lease; None if they are gone.

        For an encode worker's answer about an item that it has computed before; without a source it computes the item again.
        """
        return None

    def get_finished(self, finished_req_ids: set[str]) -> ECConnectorOutput:
        """Report what ended since the last call, each item once. ``finished_req_ids`` left the scheduler in this step."""
        return ECConnectorOutput()

    def shutdown(self) -> None:
        """Stop threads and release memory; nothing is called afterwards."""


@dataclass(frozen=True, kw_only=True)
class ECContext(WorkerContext):
    """The inputs of an EC connector: the worker and its loaded model."""

    model_fingerprint: bytes


class ECConnector(ABC):
    """Makes both sides of an EC connector, and runs in the worker's event loop.

    The engine uses ``scheduler`` and ``worker``, and calls them on its thread only; an encode worker uses only ``worker``.
    ``worker.register_caches`` comes before ``start``. Workers pair with workers whose connector has the same ``name``.
    """

    name: str
    scheduler: ECConnectorScheduler
    worker: ECConnectorWorker

    @property
    def host_id(self) -> str:
        """Equal on two workers that can use transports for one host; empty if the connector has no such transports."""
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
        """Return how many chunks of host memory are leased to readers."""
        return 0

    def longest_lease_s(self) -> float:
        """Return how long the longest of these leases lasts unless its reader renews it."""
        return 0.0


ECConnectorFactory = Callable[[ECContext], ECConnector]


def check_ec_connector(made: object, name: str, *, only_computes: bool = False) -> ECConnector:
    """Return what a factory of an EC connector has made. Without one a worker would compute every image itself, silently.

    ``only_computes`` is True for an encode worker, which uses ``worker`` alone.

    Raises:
        ConfigError: it is no EC connector, or has not the sides; names the setting and the fix.
    """
    kinds: dict[str, type] = {"worker": ECConnectorWorker}
    if not only_computes:
        kinds = {"scheduler": ECConnectorScheduler, **kinds}
    check_made(made, ECConnector, kinds, "ec_connector.name", name)
    assert isinstance(made, ECConnector)
    return made
