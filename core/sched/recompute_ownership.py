"""Which request recomputes each invalid block that several requests share, and which requests wait for it.

Requests that share a prefix share its blocks. If a shared block turns out to be invalid, the first of the requests (the
owner) recomputes it in place. The others are held back until the block is whole, because their next tokens depend on it.
Only blocks with a waiting request are kept here; without failed loads there are none. Knows no policy and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from core.request import Request
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True)
class OwnedBlock:
    """A block that ``owner`` recomputes; it is whole again once ``num_tokens`` of the owner's tokens are computed.

    ``error`` is why the block was invalid. If the owner leaves, the next owner falls back with this error.
    """

    owner: Request
    num_tokens: int
    error: ErrorInfo


class RecomputeOwnership:
    """The owned blocks of one engine and the requests that wait for them. True in a boolean context if a request waits."""

    def __init__(self) -> None:
        self._owned: dict[int, OwnedBlock] = {}
        self._awaited: dict[str, set[int]] = {}  # by id of the waiting request

    def __bool__(self) -> bool:
        return bool(self._awaited)

    @property
    def owners(self) -> dict[int, str]:
        """Return the id of each block's owner."""
        return {block_id: owned.owner.request_id for block_id, owned in self._owned.items()}

    def holds_back(self, request_id: str) -> bool:
        """Return True if the request waits for a block and must not be scheduled."""
        return request_id in self._awaited

    def blocks_of(self, request: Request) -> set[int]:
        """Return the blocks of which this request is the owner."""
        return {block_id for block_id, owned in self._owned.items() if owned.owner is request}

    def add(self, owned_blocks: Mapping[int, OwnedBlock], awaited: Mapping[str, set[int]]) -> None:
        """Record which blocks each request waits for (``awaited``), and the owners of these blocks."""
        for request_id, block_ids in awaited.items():
            self._awaited.setdefault(request_id, set()).update(block_ids)
        wanted: set[int] = set().union(*self._awaited.values())
        self._owned.update({block_id: owned for block_id, owned in owned_blocks.items() if block_id in wanted})

    def release_recomputed(self, is_whole: Callable[[int, OwnedBlock], bool]) -> None:
        """Release the requests whose awaited blocks are all whole; ``is_whole(block_id, owned)`` checks one block."""
        self._keep(block_id for block_id, owned in self._owned.items() if not is_whole(block_id, owned))

    def take_orphans(self, block_ids_of: Callable[[str], Iterable[int]]) -> dict[int, ErrorInfo]:
        """Forget requests that have left; return the blocks that are awaited but have lost their owner, with their errors.

        ``block_ids_of(request_id)`` returns the blocks that a live request holds, none of one that has left.
        """
        held = {request_id: set(block_ids_of(request_id)) for request_id in self._awaited}
        self._awaited = {request_id: left for request_id, ids in self._awaited.items() if (left := ids & held[request_id])}
        wanted: set[int] = set().union(*self._awaited.values())
        orphans = {
            block_id: owned.error
            for block_id, owned in self._owned.items()
            if block_id in wanted and block_id not in set(block_ids_of(owned.owner.request_id))
        }
        self._keep(wanted - orphans.keys())
        return orphans

    def _keep(self, block_ids: Iterable[int]) -> None:
        kept = set(block_ids)
        self._owned = {block_id: owned for block_id, owned in self._owned.items() if block_id in kept}
        self._awaited = {request_id: left for request_id, awaited in self._awaited.items() if (left := awaited & kept)}
