"""An answer of the responses endpoint: named events, the last of which is the whole answer or the failure."""

from __future__ import annotations

from collections.abc import Sequence

from core.wire.messages import ErrorInfo
from router.dispatch.worker_gateway import Generation
from router.http import sse
from router.http.caller import Caller
from router.http.streaming import HttpAnswer
from router.openai.postprocess import Delta, RequestOutput
from router.openai.text_pool import TextPool
from router.responses_api.bodies import ResponseEvent
from router.responses_api.shaper import ResponsesShaper
from router.responses_api.translation import failure_in_words_of_responses


class ResponsesAnswer(HttpAnswer):
    """As ``HttpAnswer``, with the events of this endpoint."""

    def __init__(
        self, generation: Generation, output: RequestOutput, shaper: ResponsesShaper, caller: Caller, pool: TextPool
    ) -> None:
        super().__init__(generation, output, shaper, caller, pool)
        self._responses_shaper = shaper

    def _events(self, deltas: Sequence[Delta]) -> bytes:
        return _named(self._responses_shaper.chunks(deltas))

    def last(self) -> bytes:
        """Return nothing: the event with the whole answer was the last."""
        return b""

    def failed(self, info: ErrorInfo) -> bytes:
        """Return the event that ends a stream which has failed."""
        return _named(self._responses_shaper.failure(failure_in_words_of_responses(info)))


def _named(events: list[ResponseEvent]) -> bytes:
    return b"".join([sse.event(event, event.type) for event in events])
