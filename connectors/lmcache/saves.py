"""Saves: chunks that have been copied to staging pages, on their way to the server.

    copied ──judged good──▶ sealed ──▶ sent ──reply──▶ over          judged bad, or the server left: over

No request waits for a save, and a failed save is not retried: missing blocks are recomputed when needed. A server that is full
reports a save as stored and drops it; the next lookup is then a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from connectors.lmcache.messages import SavePages, ServerSession
from connectors.lmcache.registered_server import PromptSession, RegisteredServer
from connectors.lmcache.wire import is_done
from core.errors import PeerUnreachable

SealPages = Callable[[SavePages], Awaitable[None]]


class PageSaves:
    """The saves of all requests. ``seal`` seals what has been copied."""

    def __init__(self, seal: SealPages, counts: Counter[str]) -> None:
        self._seal = seal
        self._counts = counts
        self._copied: dict[int, SavePages] = {}  # by number, until they are judged

    def on_copied(self, saves: Sequence[SavePages]) -> None:
        """Keep what a step has copied."""
        self._copied.update((save.number, save) for save in saves)

    def judge(self, number: int, is_good: bool, server_of: Callable[[ServerSession], RegisteredServer | None]) -> None:
        """Go on with blocks that have turned out good, if the server that they were copied for is not left; forget others."""
        save = self._copied.pop(number)
        if not is_good:
            self._counts["saves_of_bad_blocks"] += 1
        server = server_of(save.transfer.server) if is_good else None
        if server is None:
            save.transfer.server.staging.give_back(save.pages)
            return
        session = server.open_for_save(save.transfer.chunks.span)
        server.spawn(self._run(save, server, session))

    async def _run(self, save: SavePages, server: RegisteredServer, session: PromptSession) -> None:
        chunks, is_sent = save.transfer.chunks, False
        key = server.settings.namespace.key(chunks.span, chunks.start, chunks.end)
        try:
            await self._seal(save)
            is_sent = True
            result = await server.store(key, save.transfer.page_lists(save.pages))
            is_sent = False
        finally:
            session.let_go()
            if not is_sent:  # else the server may still read the pages, and they stay taken
                save.transfer.server.staging.give_back(save.pages)
        if is_done(result):
            self._counts["saves"] += 1
            self._counts["saved_tokens"] += chunks.end - chunks.start
        else:
            self._counts["refused_saves"] += 1
            server.leave(PeerUnreachable("the LMCache server has refused to keep blocks: it may know this worker no more"))
