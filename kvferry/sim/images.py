"""The thread that decodes images under virtual time: the real decisions, and decoding that takes a while."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from core.engine.media.image_decode_queue import Pixels, QueuedImage
from core.engine.media.image_decode_thread import ImageReader
from kvferry.sim.loop import Process
from kvferry.sim.manual_images import ManualImages


class SimImages(ManualImages):
    """Decodes one image after another. ``decode_s`` draws how long one takes."""

    def __init__(self, process: Process, budget_embeds: int, decode_s: Callable[[], float]) -> None:
        super().__init__(budget_embeds)
        self._process = process
        self._decode_s = decode_s
        self._wakeup: Callable[[], None] | None = None
        self._is_busy = False

    def start(self, wakeup: Callable[[], None]) -> None:
        """Set the function that wakes the engine when an image is decoded."""
        self._wakeup = wakeup

    def shutdown(self) -> None:
        """Forget all images."""
        self.clear()

    @property
    def is_idle(self) -> bool:
        """True if no image is being decoded, nor will be before the next step."""
        return not self._is_busy

    def end_step(self) -> bool:
        """Choose what is kept, and begin if nothing is in progress."""
        has_dropped = super().end_step()
        self._continue()
        return has_dropped

    def _continue(self) -> None:
        image = None if self._is_busy else self.begin_next()
        if image is not None:
            self._is_busy = True
            self._process.call_later(self._decode_s(), lambda: self._finish(image))

    def _finish(self, image: QueuedImage) -> None:
        self._is_busy = False
        self.complete(image)
        assert self._wakeup is not None, "it has not been started"
        self._wakeup()
        self._continue()


class SimPixels(SimImages):
    """The same for an encode worker, whose encoder uses the pixels: they are made from the file when they are taken."""

    def __init__(self, process: Process, budget_embeds: int, decode_s: Callable[[], float], reader: ImageReader) -> None:
        super().__init__(process, budget_embeds, decode_s)
        self._reader = reader

    def take(self, identifier: bytes, content: bytes = b"") -> Pixels:
        """Return the pixels of an image that is ready, and forget it."""
        assert super().take(identifier) is not None, "it is not ready"
        return self._reader.prepare(content)


def draw_decode_s(longest_s: float, incarnation: int) -> Callable[[], float]:
    """Return a function that draws the decoding time of an image, for one incarnation of a worker."""
    random = Random(f"{incarnation}/decoding")
    return lambda: random.uniform(0.1, 1.0) * longest_s
