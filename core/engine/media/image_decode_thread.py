"""The thread that decodes images and cuts them into tiles, so that the engine's thread only embeds them.

Owns the thread, its lock and its errors: a bad file is a normal outcome; any other error is a bug, which the engine's next
step raises and which ends the worker. ``core.engine.media.image_decode_queue`` decides the order and what stays in memory;
the model's ``ImageReader`` converts a file to pixels, mostly within Pillow and numpy, which let other threads run.

    engine thread    is_ready? no: others run ............... is_ready? yes, claim     take, embed
    this thread                 decode, cut into tiles │ wakeup
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from core.ec_connector import ImageReadiness
from core.engine.media.image_decode_queue import ImageDecodeQueue, Pixels, QueuedImage
from core.errors import EncoderInputMissing, KVFerryError
from core.log import event
from core.wire.media import MMFeature

THREAD_NAME = "kvferry-images"
# Five images of 17 tiles of 512 x 512 pixels, the most that checkpoints in use cut one into: one that is being embedded, and
# some on which the encoder goes on while the next are decoded.
BUDGET_BYTES = 256 << 20
SHUTDOWN_TIMEOUT_S = 10.0  # many times the longest time to decode an image

_log = logging.getLogger(__name__)


class ImageReader(Protocol):
    """What makes pixels of files, on any thread (``core.model.image_encoder.ImageEncoder``)."""

    def identify(self, content: bytes) -> bytes:
        """Return the identifier of a file's embeddings."""
        ...

    def prepare(self, content: bytes) -> Pixels:
        """Return the pixels of a file as the encoder takes them.

        Raises: InvalidRequest for a bad one, EncoderInputMissing where there is no memory for it.
        """
        ...

    def prepared_bytes(self, num_embeds: int) -> int:
        """Return the size of the pixels of an image with so many embeddings."""
        ...


class ImageDecodeThread(ImageReadiness):
    """Decodes images for one engine: on its own thread once started, before that when they are taken.

    At most ``budget_bytes`` of pixels wait to be embedded, unless a single image has more; the image being decoded comes on
    top. Engine thread only, except for ``num_bytes`` (any thread) and ``start`` (before the engine runs).
    """

    def __init__(self, reader: ImageReader, budget_bytes: int = BUDGET_BYTES) -> None:
        self._reader = reader
        self._images = ImageDecodeQueue(reader.prepared_bytes, budget_bytes)
        self._changed = threading.Condition()  # guards all of the state, and tells the thread of work
        self._wakeup: Callable[[], None] = _no_wakeup
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_stopping = False

    def start(self, wakeup: Callable[[], None]) -> None:
        """Start the thread; ``wakeup`` is called on it whenever an image has become ready, and when it has died.

        The thread may run on the cores of the one that calls this.
        """
        self._wakeup = wakeup
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Forget all images and end the thread after the one in progress, or leave it to that one after ``timeout_s``.

        A thread that is left touches nothing any more, and does not keep the process from ending. Idempotent.
        """
        with self._changed:
            self._is_stopping = True
            self._images.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning(event("image_thread_left", timeout_s=timeout_s, reason="an image is still being decoded"))

    @property
    def num_bytes(self) -> int:
        """Bytes of pixels that wait to be embedded. Any thread."""
        with self._changed:
            return self._images.num_bytes

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """See ``ImageReadiness``. Raises: what has ended the thread, if anything has."""
        if self._failure is not None:
            raise self._failure
        with self._changed:
            self._images.begin_step()

    def is_ready(self, user: str, feature: MMFeature, content: bytes) -> bool:
        """See ``ImageReadiness``."""
        if self._thread is None:
            return True
        with self._changed:
            return self._images.is_ready(user, feature, content)

    def claim(self, identifier: bytes) -> None:
        """See ``ImageReadiness``."""
        if self._thread is not None:
            with self._changed:
                self._images.claim(identifier)

    def end_step(self) -> bool:
        """See ``ImageReadiness``."""
        with self._changed:
            has_dropped = self._images.end_step()
            if self._images.has_next:
                self._changed.notify()
        return has_dropped

    def forget(self, user: str, features: Iterable[MMFeature]) -> None:
        """See ``ImageReadiness``."""
        with self._changed:
            self._images.forget(user, features)

    def take(self, identifier: bytes, content: bytes) -> Pixels:
        """Return the pixels of an image, whose room is free with that; without the thread they are made here.

        Raises:
            InvalidRequest: the file is bad.
            EncoderInputMissing: there was no memory for it, or it is not the one that is named.
        """
        with self._changed:
            outcome = self._images.take(identifier)
        if outcome is None:
            return self._prepare(identifier, content)
        if isinstance(outcome, KVFerryError):
            raise outcome
        return outcome

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (image := self._next()) is not None:
                outcome = self._outcome_of(image)
                with self._changed:
                    self._images.end(image, outcome)
                del image, outcome  # else they stay in memory until the next image
                self._wake()
        except BaseException as bug:  # the thread's main loop: the engine raises it
            self._failure = bug
            self._wake()

    def _wake(self) -> None:
        if not self._is_stopping:  # the engine may be gone
            self._wakeup()

    def _next(self) -> QueuedImage | None:
        """Wait for an image to prepare; None at the end."""
        with self._changed:
            while not self._is_stopping:
                image = self._images.begin_next()
                if image is not None:
                    return image
                self._changed.wait()
            return None

    def _outcome_of(self, image: QueuedImage) -> Pixels | KVFerryError:
        try:
            return self._prepare(image.identifier, image.content)
        except KVFerryError as error:
            return error

    def _prepare(self, identifier: bytes, content: bytes) -> Pixels:
        check_name(self._reader, identifier, content)
        return self._reader.prepare(content)


def check_name(reader: ImageReader, identifier: bytes, content: bytes) -> None:
    """Check that a file is the one that the router named: else other requests with that identifier would get this image.

    Raises:
        EncoderInputMissing: it is not. The client's file is not at fault, and another worker may agree with the router.
    """
    if reader.identify(content) != identifier:
        raise EncoderInputMissing(
            "it is not the image that was announced: this worker and the router have other image settings or releases"
        )


def _no_wakeup() -> None:
    """Do nothing: there is no thread to wake yet."""
