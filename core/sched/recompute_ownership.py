"""Who recomputes which invalid block, and who waits for it.

Requests that share a prefix share its blocks. If one of these turns out to be invalid, the first of them (the claimant)
recomputes it in place; the others are held back until it has, since what they compute would rest on it. Only blocks that
somebody waits for are kept here; without failed loads there are none. Knows no policy and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from core.request import Request
from core.wire.messages import ErrorInfo


@dataclass(frozen=True, slots=True)
class Claim:
    """``claimant`` recomputes a block, which is whole again once ``num_tokens`` of its tokens are computed.

    ``error`` is why the block was invalid, for the one who has to do it if the claimant leaves.
    """

    claimant: Request
    num_tokens: int
    error: ErrorInfo


class BlockClaims:
    """The claims of one engine. True in a boolean context if anybody waits."""

    def __init__(self) -> None:
        self._claims: dict[int, Claim] = {}
        self._awaited: dict[str, set[int]] = {}  # by the id of the request that is held back

    def __bool__(self) -> bool:
        return bool(self._awaited)

    @property
    def claimants(self) -> dict[int, str]:
        """Return the id of the request that recomputes it, by block."""
        return {block_id: claim.claimant.request_id for block_id, claim in self._claims.items()}

    def holds_back(self, request_id: str) -> bool:
        """True if the request must not be scheduled now."""
        return request_id in self._awaited

    def of(self, request: Request) -> set[int]:
        """Return the blocks that this request recomputes for others, too."""
        return {block_id for block_id, claim in self._claims.items() if claim.claimant is request}

    def add(self, claims: Mapping[int, Claim], awaited: Mapping[str, set[int]]) -> None:
        """Note who waits for which blocks, and who recomputes these."""
        for request_id, block_ids in awaited.items():
            self._awaited.setdefault(request_id, set()).update(block_ids)
        wanted: set[int] = set().union(*self._awaited.values())
        self._claims.update({block_id: claim for block_id, claim in claims.items() if block_id in wanted})

    def release_recomputed(self, is_whole: Callable[[int, Claim], bool]) -> None:
        """Let those go on whose blocks are whole again, of which ``is_whole(block_id, claim)`` decides."""
        self._keep(block_id for block_id, claim in self._claims.items() if not is_whole(block_id, claim))

    def take_orphans(self, block_ids_of: Callable[[str], Iterable[int]]) -> dict[int, ErrorInfo]:
        """Forget requests that have left, and return the blocks that are still waited for although their claimant has.

        ``block_ids_of(request_id)`` are the blocks that a live request holds.
        """
        held = {request_id: set(block_ids_of(request_id)) for request_id in self._awaited}
        self._awaited = {request_id: left for request_id, ids in self._awaited.items() if (left := ids & held[request_id])}
        wanted: set[int] = set().union(*self._awaited.values())
        orphans = {
            block_id: claim.error
            for block_id, claim in self._claims.items()
            if block_id in wanted and block_id not in set(block_ids_of(claim.claimant.request_id))
        }
        self._keep(wanted - orphans.keys())
        return orphans

    def _keep(self, block_ids: Iterable[int]) -> None:
        kept = set(block_ids)
        self._claims = {block_id: claim for block_id, claim in self._claims.items() if block_id in kept}
        self._awaited = {request_id: left for request_id, awaited in self._awaited.items() if (left := awaited & kept)}
