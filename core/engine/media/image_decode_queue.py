"""Which images are decoded and in what order, and which of them stay in memory: the decisions, without a thread.

In every step images are requested in the order in which they will be embedded. The rule:

    requested     | a, ready | b | c |  d is too large for what is left  | e, ready | f |
    kept          |<-- the front of the order that the budget holds ---->|
    prepared next            | b | c |                        not before a step keeps them: d, f

Kept images are decoded in this order and always fit the budget. The first of the order is always kept, even if it is larger.
Ready images that are not kept (e, and images not requested in this step) stay while the budget has room in addition to the kept
ones, and are dropped otherwise. So the first image that a step waits for is decoded next, however many later images are
ready: requests cannot wait for each other's room.

An image that is being decoded is not interrupted and comes on top of the budget. Owns only pixels that are ready. Driven by
``core.engine.media.image_decode_thread`` on two threads, under its lock, and by the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from core.ec_connector import ImageReadiness
from core.errors import KVFerryError
from core.wire.media import MMFeature

Pixels = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class QueuedImage:
    """One image that requests (``users``) have asked for. ``num_bytes`` is an estimate until its pixels are there.

    ``is_claimed``: it is embedded in this step. ``is_surplus``: it lost its room while it is being decoded.
    """

    identifier: bytes
    content: bytes
    num_bytes: int
    users: set[str] = field(default_factory=set)
    is_begun: bool = False
    is_claimed: bool = False
    is_surplus: bool = False
    outcome: Pixels | KVFerryError | None = None


class ImageDecodeQueue(ImageReadiness):
    """The images of one worker between their first question and their embedding.

    ``prepared_bytes`` gives the size of the pixels of an image with so many embeddings.
    """

    def __init__(self, prepared_bytes: Callable[[int], int], budget_bytes: int) -> None:
        self._prepared_bytes = prepared_bytes
        self._budget_bytes = budget_bytes
        self._images: dict[bytes, QueuedImage] = {}
        self._order: dict[bytes, None] = {}  # what this step has asked for, in order
        self._queue: deque[QueuedImage] = deque()  # kept, and not begun

    # ---- of a step ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a new order."""
        self._order.clear()

    def is_ready(self, user: str, feature: MMFeature, content: bytes) -> bool:
        """Return True if an image is decoded or known to be bad; if not, request it, after all earlier requests."""
        image = self._images.get(feature.identifier)
        if image is None:
            image = QueuedImage(feature.identifier, content, self._prepared_bytes(feature.num_embeds))
            self._images[feature.identifier] = image
        image.users.add(user)
        self._order[feature.identifier] = None
        return image.outcome is not None

    def claim(self, identifier: bytes) -> None:
        """Mark a ready image as embedded in this step: it stays until it is taken."""
        self._images[identifier].is_claimed = True

    def end_step(self) -> bool:
        """Choose the kept images, drop ready images without room, and queue the images to decode.

        Returns True if a ready image was dropped.
        """
        if not self._images:
            return False
        num_images = len(self._images)
        kept, room = self._choose_kept()
        self._queue = deque(image for image in kept if not image.is_begun)
        others = [image for image in self._images.values() if image.is_begun and not image.is_claimed and image not in kept]
        for image in sorted(others, key=lambda image: image.identifier not in self._order):
            image.is_surplus = image.num_bytes > room
            if not image.is_surplus:
                room -= image.num_bytes
            elif image.outcome is not None:
                del self._images[image.identifier]
        return len(self._images) < num_images

    def _choose_kept(self) -> tuple[list[QueuedImage], int]:
        """Return the front of the order that fits the budget, and the bytes that are left."""
        claimed = [image for image in self._images.values() if image.is_claimed]
        room = self._budget_bytes - sum(image.num_bytes for image in claimed)
        kept: list[QueuedImage] = []
        for identifier in self._order:
            image = self._images.get(identifier)
            if image is None or image.is_claimed:
                continue
            if image.num_bytes > room and (kept or claimed):  # what is claimed is gone in the next step
                break
            room -= image.num_bytes
            image.is_surplus = False
            kept.append(image)
        return kept, room

    # ---- of an image -------------------------------------------------------------------------------------------------

    @property
    def has_next(self) -> bool:
        """True if something is to be prepared, or was until its requests left."""
        return bool(self._queue)

    def begin_next(self) -> QueuedImage | None:
        """Return what is to be prepared now, None if nothing is. ``end`` follows."""
        while self._queue:
            image = self._queue.popleft()
            if self._images.get(image.identifier) is image:
                image.is_begun = True
                return image
        return None

    def end(self, image: QueuedImage, outcome: Pixels | KVFerryError) -> None:
        """Keep the pixels of an image, or what is wrong with it; nothing if it is not wanted any more."""
        if self._images.get(image.identifier) is not image:
            return
        if image.is_surplus:
            del self._images[image.identifier]
            return
        image.outcome = outcome
        image.num_bytes = 0 if isinstance(outcome, KVFerryError) else outcome.nbytes

    def take(self, identifier: bytes) -> Pixels | KVFerryError | None:
        """Return the outcome of an image and forget the image, for all users; None if it is not ready."""
        image = self._images.get(identifier)
        if image is None or image.outcome is None:
            return None
        del self._images[identifier]
        return image.outcome

    def forget(self, user: str, features: Iterable[MMFeature]) -> None:
        """Forget a request, and its images unless another request wants them."""
        for feature in features:
            image = self._images.get(feature.identifier)
            if image is None:
                continue
            image.users.discard(user)
            if not image.users and not image.is_claimed:
                del self._images[feature.identifier]

    def clear(self) -> None:
        """Forget everything."""
        self._images.clear()
        self._order.clear()
        self._queue.clear()

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def num_images(self) -> int:
        """Images that requests wait for, ready or not."""
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        """Bytes of pixels that are ready."""
        return sum(image.num_bytes for image in self._images.values() if image.outcome is not None)
