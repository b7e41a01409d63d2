"""What the scheduler side of the LMCache connector and its event loop tell each other. Plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from connectors.lmcache.staging import NULL_PAGE, PageIdentity, Staging
from connectors.lmcache.tracker import ChunkGeometry, LMCacheMPRequestMetadata
from connectors.lmcache.wire import TokenSpan
from core.kv.block import NULL_BLOCK_ID
from core.request import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class ServerSession:
    """The server as it is reached now: from a registration until the first doubt. ``number`` tells them apart."""

    number: int
    staging: Staging
    geometry: ChunkGeometry


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block of the pool, what it is, and where it is in the order of its group's chunks."""

    block_id: int
    identity: PageIdentity
    index: int


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Chunks to save or to load, in one session of the server, and which blocks are to be moved."""

    chunks: LMCacheMPRequestMetadata
    server: ServerSession
    moves: tuple[BlockMove, ...]

    def page_lists(self, pages: Sequence[int]) -> list[list[int]]:
        """Return the pages of each group, in the server's order of groups, the null page where nothing is moved.

        ``pages[i]`` is of move i.
        """
        lists = [[NULL_PAGE] * len(ids) for ids in self.chunks.block_ids]
        for move, page in zip(self.moves, pages, strict=True):
            lists[move.identity.group_id][move.index] = page
        return [lists[group_id] for group_id in self.server.geometry.server_order]


def moves_of(
    chunks: LMCacheMPRequestMetadata, block_size: int, block_hashes: Sequence[bytes], per_block: int
) -> Iterator[BlockMove]:
    """Yield the blocks that are there and not skipped. ``block_hashes`` has ``per_block`` values for each block of a table."""
    first_block, num_skipped = chunks.start // block_size, chunks.num_skipped_tokens // block_size
    for group_id, block_ids in enumerate(chunks.block_ids):
        for index, block_id in enumerate(block_ids):
            if index >= num_skipped and block_id != NULL_BLOCK_ID:
                block_hash = block_hashes[(first_block + index + 1) * per_block - 1]
                yield BlockMove(block_id, PageIdentity(group_id, block_hash), index)


@dataclass(frozen=True, slots=True)
class LookupPages:
    """Ask for the longest prefix of these tokens, at most ``num_tokens`` of them."""

    span: TokenSpan
    num_tokens: int
    server: ServerSession


@dataclass(frozen=True, slots=True)
class LoadPages:
    """Fill blocks of a request, which makes ``num_tokens`` computed. ``deadline`` is its own, on the worker's clock."""

    transfer: PageTransfer
    num_tokens: int
    deadline: float | None = None

    @property
    def request_id(self) -> str:
        """The engine's name of the request."""
        return self.transfer.chunks.request_id


@dataclass(frozen=True, slots=True)
class SavePages:
    """Blocks that have been copied to ``pages``; sent only once the engine has sealed them."""

    number: int
    transfer: PageTransfer
    pages: tuple[int, ...]


@dataclass(slots=True)
class LMCacheMPConnectorMetadata(KVConnectorMetadata):
    """One step's news from the scheduler side, carried out in the order of the fields; ``saves`` after the step has run."""

    verdicts: dict[int, bool] = field(default_factory=dict)  # by number of an earlier save: are its blocks good?
    lookups: list[LookupPages] = field(default_factory=list)
    loads: list[LoadPages] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)  # sessions of which nothing, or nothing more, is loaded
    aborts: list[str] = field(default_factory=list)  # request ids whose load is not wanted any more
    ended: list[str] = field(default_factory=list)  # sessions that are over
    saves: list[SavePages] = field(default_factory=list)

    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.verdicts or self.lookups or self.loads or self.unclaimed or self.aborts or self.ended or self.saves)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the admin port says."""

    version: str
    chunk_size: int
    separate_object_groups: bool
