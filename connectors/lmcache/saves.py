"""Saves: chunks that have been copied to staging pages, on their way to the server.

    copied ──judged good──▶ sealed ──▶ sent ──reply──▶ over          judged bad, or the server lost: over

No request waits for a save, and a failed save is not retried: missing blocks are recomputed when needed. A server that is full
reports a save as stored and drops it; the next lookup is then a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.lmcache.actions import SavePages, SealPages
from connectors.lmcache.pending_requests import PendingRequests
from connectors.lmcache.sessions import ServerSessions
from connectors.lmcache.wire import is_done, store_call


class PageSaves:
    """The saves of all requests. ``has_doubt`` is set when the server refuses one."""

    def __init__(self, calls: PendingRequests, sessions: ServerSessions) -> None:
        self._calls = calls
        self._sessions = sessions
        self._copied: dict[int, SavePages] = {}  # by number, until they are judged
        self.has_doubt = False

    def on_copied(self, saves: Sequence[SavePages]) -> None:
        """Keep what a step has copied."""
        self._copied.update((save.number, save) for save in saves)

    def judge(self, number: int, is_good: bool) -> None:
        """Go on with blocks that have turned out good; forget the others."""
        save = self._copied.pop(number)
        if not is_good:
            self._calls.count("saves_of_bad_blocks")
        if is_good and self._is_current(save):
            self._sessions.hold(save.transfer.chunks.span)
            self._calls.act(SealPages(save))
        else:
            self._give_back(save)

    def send(self, save: SavePages) -> None:
        """Send what has been sealed."""
        if not self._is_current(save):
            self._give_back(save)
            return
        calls, chunks = self._calls, save.transfer.chunks
        key = calls.settings.namespace.key(chunks.span, chunks.start, chunks.end)
        pages, instance_id = save.transfer.page_lists(save.pages), calls.instance_id
        calls.send(
            lambda uid: store_call(uid, key, instance_id, pages),
            lambda result: self._on_reply(save, result),
            what="a save",
            timeout_s=calls.settings.transfer_deadline_s,
            is_vital=True,  # as long as it is open, the server may read these pages
        )

    def fail_all(self) -> None:
        """Reset the doubt for the next session. Saves without a verdict are kept until their verdict."""
        self.has_doubt = False

    def _on_reply(self, save: SavePages, result: object) -> None:
        chunks = save.transfer.chunks
        self._sessions.let_go(chunks.span.session_id)
        self._give_back(save)
        if is_done(result):
            self._calls.count("saves")
            self._calls.count("saved_tokens", chunks.end - chunks.start)
        else:
            self._calls.count("refused_saves")
            self.has_doubt = True

    def _is_current(self, save: SavePages) -> bool:
        return save.transfer.server is self._calls.server

    def _give_back(self, save: SavePages) -> None:
        save.transfer.server.staging.give_back(save.pages)
