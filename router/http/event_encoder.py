"""Events of plain text, encoded once: in a stream, all but the text is the same in every event of a choice.

Owns which events are such, and the bytes around their text. Does not know the shape of an event: the shaper makes the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from router.dispatch.types import PromptReport
from router.http import sse
from router.openai.postprocess import Delta, RequestOutput
from router.openai.responses import ChatShaper, CompletionShaper
from router.responses_api.shaper import ResponsesShaper

_MARK = "\ue000the text\ue000"  # private characters, which no name or id holds
_encode = msgspec.json.Encoder().encode
_ENCODED_MARK = _encode(_MARK)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The bytes before and after a text, made from what was known of the prompt then."""

    report: PromptReport | None
    head: bytes
    tail: bytes


class EventEncoder:
    """Turns the deltas of one stream into the bytes of its events."""

    def __init__(self, shaper: CompletionShaper | ChatShaper | ResponsesShaper, output: RequestOutput) -> None:
        self._shaper = shaper
        self._prompts = output.prompts
        self._frames: dict[int, _Frame] = {}

    def is_plain(self, index: int) -> bool:
        """Return True if a choice's next event differs from its last one in nothing but text, unless it ends the choice."""
        return index in self._frames or self._shaper.differs_in_text_only(index)

    def encode_text(self, index: int, text: str) -> bytes:
        """Return the event of new text, not empty, of a plain choice."""
        frame = self._frame(index)
        return frame.head + _encode(text) + frame.tail

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new output, one for each delta that is worth one."""
        if len(deltas) == 1 and deltas[0].finish_reason is None and deltas[0].text and self.is_plain(deltas[0].index):
            return self.encode_text(deltas[0].index, deltas[0].text)
        return b"".join([sse.event(chunk) for chunk in self._shaper.chunks(deltas)])

    def _frame(self, index: int) -> _Frame:
        report = self._prompts[0].report
        frame = self._frames.get(index)
        if frame is None or frame.report is not report:
            (chunk,) = self._shaper.chunks([Delta(index, _MARK)])
            head, _, tail = sse.event(chunk).partition(_ENCODED_MARK)
            frame = self._frames[index] = _Frame(report, head, tail)
        return frame
