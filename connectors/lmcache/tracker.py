"""The counts of one request, in tokens: what the server has, what is computed, what is saved.

Decides which chunks to save and which to load. A chunk is what the server stores under one key. Only whole chunks are saved
and loaded, so the saved count is a multiple of the chunk size. Modelled on vLLM's ``LMCacheMPRequestTracker``.

    tokens   |------- hits: local, or from the server -------|--- scheduled since ---|     computed after the step
             |---- saved, or already on the server ----|-- chunk --|-- chunk --| ... |     to save now: the whole chunks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from connectors.lmcache.wire import TokenSpan
from core.kv.block import NULL_BLOCK_ID
from core.request import Request


class LMCacheMPRequestState(Enum):
    """The state of a request towards the server.

    PREFETCHING → WAITING_FOR_LOAD → READY, or PREFETCHING → READY if nothing is loaded; READY from the start if another
    connector loads. A request in BYPASS_LMCACHE is not looked up, but is saved.
    """

    PREFETCHING = auto()
    WAITING_FOR_LOAD = auto()
    READY = auto()
    BYPASS_LMCACHE = auto()


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """Sizes in tokens. ``windows`` has one entry per KV cache group: its attention window, -1 = full attention."""

    chunk_size: int
    block_size: int
    windows: tuple[int, ...] = (-1,)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks per chunk in one group."""
        return self.chunk_size // self.block_size

    @property
    def pages_per_chunk(self) -> int:
        """Staging pages that a chunk of all groups takes; fewer if a window has lost blocks of it."""
        return self.blocks_per_chunk * len(self.windows)

    def floor(self, num_tokens: int) -> int:
        """Round down to whole chunks."""
        return num_tokens - num_tokens % self.chunk_size

    @property
    def server_order(self) -> tuple[int, ...]:
        """Group ids in the order of registration with the server.

        The server stores groups whose windows span the same number of chunks in one object, and requires them to be adjacent.
        """

        def num_chunks(group_id: int) -> int:
            window = self.windows[group_id]
            return -1 if window < 0 else -(-window // self.chunk_size)

        return tuple(sorted(range(len(self.windows)), key=lambda group_id: (num_chunks(group_id), group_id)))

    def declared_window(self, window: int) -> int:
        """Return the window for the registration: one below a chunk is rounded up to whole blocks."""
        return window if window < 0 or window >= self.chunk_size else -(-window // self.block_size) * self.block_size


@dataclass(slots=True)
class LMCacheMPRequestTracker:
    """The counts of a request in one session of the server, named ``session_id``.

    ``num_local_hit_tokens`` were in the pool before the request's first step, from any source; the server has
    ``num_lmcache_hit_tokens``. Both count from the start of the prompt, so the larger one applies. ``num_scheduled_tokens``
    follow them.
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
        """Tokens that have KV after the step being scheduled."""
        return max(self.num_local_hit_tokens, self.num_lmcache_hit_tokens) + self.num_scheduled_tokens

    def needs_retrieve(self) -> bool:
        """True if the server has more tokens than the pool and no load has been requested."""
        is_settled = self.state in (LMCacheMPRequestState.READY, LMCacheMPRequestState.BYPASS_LMCACHE)
        return self.num_lmcache_hit_tokens > self.num_local_hit_tokens and not is_settled

    def is_ready_for_retrieving(self) -> bool:
        """True if the blocks to load into are allocated."""
        return self.state is LMCacheMPRequestState.WAITING_FOR_LOAD and self.needs_retrieve()

    def found(self, num_hit_tokens: int, num_local_tokens: int) -> None:
        """Record the answer to a lookup and the local hits at that time. Repeatable."""
        self.num_lmcache_hit_tokens = self.num_stored_tokens = num_hit_tokens
        self.num_local_hit_tokens = num_local_tokens

    def begin(self, num_computed_tokens: int) -> None:
        """Record that the request starts, or restarts, with this many tokens in the pool.

        They replace the expected hits, since a load can fail and another connector can load more.
        """
        self.num_scheduled_tokens = 0
        self.num_local_hit_tokens = num_computed_tokens
        self.num_lmcache_hit_tokens = min(self.num_lmcache_hit_tokens, num_computed_tokens)

    def forget_stored(self, num_tokens: int, chunk_size: int) -> None:
        """Record that no chunk after ``num_tokens`` is saved."""
        self.num_stored_tokens = min(self.num_stored_tokens, num_tokens - num_tokens % chunk_size)


@dataclass(frozen=True, slots=True)
class LMCacheMPRequestMetadata:
    """Chunks of one request to save or to load: tokens [start, end), and the blocks of each group that hold them.

    ``span`` holds the tokens from 0 to at least ``end``. A load does not write the first ``num_skipped_tokens`` after
    ``start``: their blocks are in the pool already and may be shared. In a save, a group's chunk is either whole, or consists
    of null blocks and is not stored.
    """

    request_id: str
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
        max_chunks: int | None = None,
    ) -> LMCacheMPRequestMetadata | None:
        """Return the first ``max_chunks`` of the unsaved chunks, and count them as saved; None if there are none.

        Limited by the computed tokens, the request's tokens, the group with the fewest allocated blocks, and ``max_tokens``.
        ``allocated_block_ids`` are null for blocks that lack tokens (``KVCacheManager.get_complete_block_ids``).
        """
        covered = min(len(ids) for ids in allocated_block_ids) * geometry.block_size
        available = min(tracker.num_computed_tokens, tracker.request.num_tokens, covered)
        if max_tokens is not None:
            available = min(available, max_tokens)
        start, end = tracker.num_stored_tokens, geometry.floor(available)
        if max_chunks is not None:
            end = min(end, start + max_chunks * geometry.chunk_size)
        if end <= start:
            return None
        tracker.num_stored_tokens = end
        block_ids = tuple(
            _whole_chunks(_blocks_of(ids, start, end, geometry), geometry, window)
            for ids, window in zip(allocated_block_ids, geometry.windows, strict=True)
        )
        return LMCacheMPRequestMetadata(tracker.request.request_id, span, start, end, block_ids)

    @staticmethod
    def GetRetrieveMetadata(
        tracker: LMCacheMPRequestTracker,
        geometry: ChunkGeometry,
        allocated_block_ids: Sequence[Sequence[int]],
        span: TokenSpan,
    ) -> LMCacheMPRequestMetadata | None:
        """Return the chunks to load, None if no load is due. The request is READY afterwards.

        The first chunk may overlap local hits. Since the server loads whole chunks, the request names the tokens to skip.
        """
        is_due = tracker.is_ready_for_retrieving()
        tracker.state = LMCacheMPRequestState.READY
        if not is_due:
            return None
        start, end = geometry.floor(tracker.num_local_hit_tokens), tracker.num_lmcache_hit_tokens
        block_ids = tuple(tuple(_blocks_of(ids, start, end, geometry)) for ids in allocated_block_ids)
        num_skipped = tracker.num_local_hit_tokens - start
        return LMCacheMPRequestMetadata(tracker.request.request_id, span, start, end, block_ids, num_skipped)


def _blocks_of(block_ids: Sequence[int], start: int, end: int, geometry: ChunkGeometry) -> Sequence[int]:
    return block_ids[start // geometry.block_size : end // geometry.block_size]


def _whole_chunks(block_ids: Sequence[int], geometry: ChunkGeometry, window: int) -> tuple[int, ...]:
    """Replace every chunk that lacks a needed block, because it left the window or is not complete, with null blocks.

    The server stores the whole chunk, or the part of it that a shorter window covers, and would store the content of the null
    page in place of the missing block.
    """
    per_chunk = geometry.blocks_per_chunk
    num_needed = per_chunk if window < 0 else min(per_chunk, -(-window // geometry.block_size))
    found: list[int] = []
    for first in range(0, len(block_ids), per_chunk):
        chunk = block_ids[first : first + per_chunk]
        is_whole = NULL_BLOCK_ID not in chunk[per_chunk - num_needed :]
        found += chunk if is_whole else [NULL_BLOCK_ID] * per_chunk
    return tuple(found)
