"""What is known of one request: what the server has of it, what has been computed, what has been saved.

Counts only, all in tokens; decides which chunks are saved and which are loaded. Whole chunks are saved and loaded, a chunk
being what the server keeps under one key, so the saved count is a multiple of it. Knows no server, no blocks' content, no
steps: the scheduler side calls it. After vLLM's ``LMCacheMPRequestTracker``.

    tokens   |--- hits: here already, or from the server ---|--- scheduled since ---|      computed, when the step has run
             |------------ saved, or there before ------------|-- chunk --|- ... |         to save now: the whole chunks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from connectors.lmcache.wire import TokenSpan
from core.kv.block import NULL_BLOCK_ID
from core.request import Request

Direction = Literal["STORE", "RETRIEVE"]


class LMCacheMPRequestState(Enum):
    """How far a request is with the server.

    PREFETCHING → WAITING_FOR_LOAD → READY, or PREFETCHING → READY if nothing is loaded; READY from the beginning if another
    connector loads. BYPASS_LMCACHE asks the server for nothing, but may save.
    """

    PREFETCHING = auto()
    WAITING_FOR_LOAD = auto()
    READY = auto()
    BYPASS_LMCACHE = auto()


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """Sizes in tokens. ``windows`` has one entry per KV cache group: how far back it looks, -1 = to the beginning."""

    chunk_size: int
    block_size: int
    windows: tuple[int, ...] = (-1,)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a chunk in one group."""
        return self.chunk_size // self.block_size

    def floor(self, num_tokens: int) -> int:
        """Round down to whole chunks."""
        return num_tokens - num_tokens % self.chunk_size

    @property
    def server_order(self) -> tuple[int, ...]:
        """Groups in the order in which the server is told of them.

        It keeps those with windows of as many chunks in one object, and takes for granted that they follow each other.
        """

        def num_chunks(group_id: int) -> int:
            window = self.windows[group_id]
            return -1 if window < 0 else -(-window // self.chunk_size)

        return tuple(sorted(range(len(self.windows)), key=lambda group_id: (num_chunks(group_id), group_id)))

    def declared_window(self, window: int) -> int:
        """Return the window as the server is told: one below a chunk must be whole blocks."""
        return window if window < 0 or window >= self.chunk_size else -(-window // self.block_size) * self.block_size


@dataclass(slots=True)
class LMCacheMPRequestTracker:
    """The counts of a request in one session of the server, named ``session_id``.

    ``num_local_hit_tokens`` were in the pool before the request's first step, whoever brought them; ``num_lmcache_hit_tokens``
    the server has. Both count from the beginning, so the larger one counts. ``num_scheduled_tokens`` came after them.
    """

    request: Request
    session_id: str
    state: LMCacheMPRequestState = LMCacheMPRequestState.PREFETCHING
    num_scheduled_tokens: int = 0
    num_local_hit_tokens: int = 0
    num_lmcache_hit_tokens: int = 0
    num_stored_tokens: int = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that have KV once the step being scheduled has run."""
        return max(self.num_local_hit_tokens, self.num_lmcache_hit_tokens) + self.num_scheduled_tokens

    def needs_retrieve(self) -> bool:
        """True if the server has more than is here, and it has not been asked for."""
        is_settled = self.state in (LMCacheMPRequestState.READY, LMCacheMPRequestState.BYPASS_LMCACHE)
        return self.num_lmcache_hit_tokens > self.num_local_hit_tokens and not is_settled

    def is_ready_for_retrieving(self) -> bool:
        """True if the blocks to load into are there."""
        return self.state is LMCacheMPRequestState.WAITING_FOR_LOAD and self.needs_retrieve()

    def found(self, num_hit_tokens: int, num_local_tokens: int) -> None:
        """Note the answer to a lookup and what was in the pool then. It may be told many times."""
        self.num_lmcache_hit_tokens = self.num_stored_tokens = num_hit_tokens
        self.num_local_hit_tokens = num_local_tokens

    def begin(self, num_computed_tokens: int) -> None:
        """Note that the request starts to run, anew or again, with this many tokens in the pool.

        Whatever was hoped for before, these are the hits: a load may have failed, or somebody else's have succeeded.
        """
        self.num_scheduled_tokens = 0
        self.num_local_hit_tokens = num_computed_tokens
        self.num_lmcache_hit_tokens = min(self.num_lmcache_hit_tokens, num_computed_tokens)

    def forget_stored(self, num_tokens: int, chunk_size: int) -> None:
        """Note that nothing behind ``num_tokens`` has been saved after all."""
        self.num_stored_tokens = min(self.num_stored_tokens, num_tokens - num_tokens % chunk_size)


@dataclass(frozen=True, slots=True)
class LMCacheMPRequestMetadata:
    """Chunks of one request to save or to load: tokens [start, end), and the blocks of each group that hold them.

    ``span`` holds tokens from the beginning to the end, or beyond. A load leaves the first ``num_skipped_tokens`` from
    ``start`` on alone, which are in the pool already and may be shared. In a save, a group's chunk is whole, or null blocks
    only: then the group does not have it, and nothing of it is kept.
    """

    request_id: str
    direction: Direction
    span: TokenSpan
    start: int
    end: int
    block_ids: tuple[tuple[int, ...], ...]
    num_skipped_tokens: int = 0

    @staticmethod
    def GetStoreMetadata(
        tracker: LMCacheMPRequestTracker,
        geometry: ChunkGeometry,
        allocated_block_ids: Sequence[Sequence[int]],
        span: TokenSpan,
        max_tokens: int | None = None,
    ) -> LMCacheMPRequestMetadata | None:
        """Return the chunks that the step completes and that are not saved yet, and count them as saved; None if none is.

        What is computed bounds it, what is hashed and what is allocated: of all groups the one that covers least.
        ``max_tokens`` bounds it too, if given.
        """
        covered = min(len(ids) for ids in allocated_block_ids) * geometry.block_size
        available = min(tracker.num_computed_tokens, tracker.request.num_tokens, covered)
        if max_tokens is not None:
            available = min(available, max_tokens)
        start, end = tracker.num_stored_tokens, geometry.floor(available)
        if end <= start:
            return None
        tracker.num_stored_tokens = end
        block_ids = tuple(
            _whole_chunks(_blocks_of(ids, start, end, geometry), geometry, window)
            for ids, window in zip(allocated_block_ids, geometry.windows, strict=True)
        )
        return LMCacheMPRequestMetadata(tracker.request.request_id, "STORE", span, start, end, block_ids)

    @staticmethod
    def GetRetrieveMetadata(
        tracker: LMCacheMPRequestTracker,
        geometry: ChunkGeometry,
        allocated_block_ids: Sequence[Sequence[int]],
        span: TokenSpan,
    ) -> LMCacheMPRequestMetadata | None:
        """Return the chunks to load, None if it is not the time; the request is READY afterwards in any case.

        The first chunk may overlap local hits: the server knows whole chunks only, so it is told to skip these tokens.
        """
        is_due = tracker.is_ready_for_retrieving()
        tracker.state = LMCacheMPRequestState.READY
        if not is_due:
            return None
        start, end = geometry.floor(tracker.num_local_hit_tokens), tracker.num_lmcache_hit_tokens
        block_ids = tuple(tuple(_blocks_of(ids, start, end, geometry)) for ids in allocated_block_ids)
        num_skipped = tracker.num_local_hit_tokens - start
        return LMCacheMPRequestMetadata(tracker.request.request_id, "RETRIEVE", span, start, end, block_ids, num_skipped)


def _blocks_of(block_ids: Sequence[int], start: int, end: int, geometry: ChunkGeometry) -> Sequence[int]:
    return block_ids[start // geometry.block_size : end // geometry.block_size]


def _whole_chunks(block_ids: Sequence[int], geometry: ChunkGeometry, window: int) -> tuple[int, ...]:
    """Make every chunk null of which a needed block has left the window.

    The server keeps all of a chunk, or the end of it that a window shorter than the chunk still covers, and would take the null
    block's content for that of the blocks that are gone.
    """
    per_chunk = geometry.blocks_per_chunk
    num_needed = per_chunk if window < 0 else min(per_chunk, -(-window // geometry.block_size))
    found: list[int] = []
    for first in range(0, len(block_ids), per_chunk):
        chunk = block_ids[first : first + per_chunk]
        is_whole = NULL_BLOCK_ID not in chunk[per_chunk - num_needed :]
        found += chunk if is_whole else [NULL_BLOCK_ID] * per_chunk
    return tuple(found)
