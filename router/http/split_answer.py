"""An answer to a chat whose text, reasoning and tool calls an engine's API separates."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from litestar.response.base import ASGIResponse

from router.dispatch.worker_gateway import Generation
from router.http import sse
from router.http.caller import Caller
from router.http.direct_write import DirectWriter
from router.http.errors import RequestFailure
from router.http.streaming import HttpAnswer
from router.openai.postprocess import Delta, RequestOutput
from router.openai.responses import ChatShaper
from router.openai.text_pool import TextPool
from router.rendered.renderer import EngineRefusal
from router.rendered.splitting import OutputSplitter

_encoder = msgspec.json.Encoder()


class SplitAnswer(HttpAnswer):
    """As ``HttpAnswer``; ids, counts and usage are the router's, the choices are the engine's."""

    def __init__(
        self,
        generation: Generation,
        output: RequestOutput,
        shaper: ChatShaper,
        caller: Caller,
        pool: TextPool,
        splitter: OutputSplitter,
    ) -> None:
        super().__init__(generation, output, shaper, caller, pool)
        self._chat_shaper = shaper
        self._splitter = splitter

    async def whole(self) -> ASGIResponse:
        """Wait for the whole output, have it split, and return the response. Raises as ``HttpAnswer.whole``."""
        while not self.is_finished:
            self._hold(self._chat_shaper.gather(await self._deltas()))
        choices = await self._split(self._splitter.whole(self._chat_shaper.merged()))
        rest: dict[str, Any] = msgspec.to_builtins(self._chat_shaper.body([]))
        body = await self._shaped(lambda: _encoder.encode(rest | {"choices": choices}))
        return ASGIResponse(body=body, media_type="application/json")

    async def next(self) -> bytes:
        """Wait for updates and return their events, possibly none. Raises as ``HttpAnswer.next``."""
        events = []
        for delta in _joined(await self._deltas()):
            choices = await self._split(self._splitter.part(delta))
            if choices:
                chunk: dict[str, Any] = msgspec.to_builtins(self._chat_shaper.empty_chunk())
                events.append(sse.event(chunk | {"choices": choices}))
        return b"".join(events)

    async def _split(self, splitting: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the choices that the engine makes of output; it stops when the client leaves."""
        try:
            return await self._unless_left(splitting)
        except EngineRefusal as refusal:
            raise RequestFailure(refusal.info) from None

    def write_to(self, writer: DirectWriter | None) -> None:
        """Do nothing: the engine is asked about every piece, which takes a task."""


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Return one delta for each choice."""
    joined: dict[int, Delta] = {}
    for delta in deltas:
        if delta.index in joined:
            joined[delta.index].add(delta)
        else:
            joined[delta.index] = delta
    return list(joined.values())
