"""The thread that decodes images under virtual time: the real decisions, and work that takes a while."""

from __future__ import annotations

from collections.abc import Callable

from core.engine.prepared_images import Preparation
from core.testing.manual_images import ManualImages
from core.testing.sim_loop import Process


class SimImages(ManualImages):
    """Decodes one image after another. ``decode_s`` draws how long one takes."""

    def __init__(self, process: Process, budget_embeds: int, decode_s: Callable[[], float]) -> None:
        super().__init__(budget_embeds)
        self._process = process
        self._decode_s = decode_s
        self._wakeup: Callable[[], None] | None = None
        self._is_busy = False

    def start(self, wakeup: Callable[[], None]) -> None:
        """Receive what wakes the engine when an image is decoded."""
        self._wakeup = wakeup

    def end_step(self) -> None:
        """Choose what is kept, and begin if nothing is in progress."""
        super().end_step()
        self._go_on()

    def _go_on(self) -> None:
        image = None if self._is_busy else self.begin_next()
        if image is not None:
            self._is_busy = True
            self._process.call_later(self._decode_s(), lambda: self._finish(image))

    def _finish(self, image: Preparation) -> None:
        self._is_busy = False
        self.complete(image)
        assert self._wakeup is not None, "it has not been started"
        self._wakeup()
        self._go_on()
