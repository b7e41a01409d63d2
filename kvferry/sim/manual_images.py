"""Decoding of images for a ``HashModel``: the real decisions, and decoding at a test's command.

Claimed images keep their room until a ``HashEncoder`` embeds them. An image has one pixel for each embedding.
"""

from __future__ import annotations

import numpy as np

from core.engine.media.image_decode_queue import ImageDecodeQueue, QueuedImage

PIXEL_BYTES = 4


class ManualImages(ImageDecodeQueue):
    """Decodes an image with each call of ``work``. ``prepared`` are their files, in order."""

    def __init__(self, budget_embeds: int) -> None:
        super().__init__(lambda num_embeds: num_embeds * PIXEL_BYTES, budget_embeds * PIXEL_BYTES)
        self.prepared: list[bytes] = []

    def work(self) -> bool:
        """Decode the next image; False if there is none."""
        image = self.begin_next()
        if image is not None:
            self.complete(image)
        return image is not None

    def complete(self, image: QueuedImage) -> None:
        """Finish the image that ``begin_next`` has returned."""
        self.prepared.append(image.content)
        self.end(image, np.zeros(image.num_bytes // PIXEL_BYTES, dtype=np.float32))
