"""Which ranks of P hold the KV heads of a rank of D, when the two engines differ in tensor parallelism. Pure.

vLLM splits the KV heads of a model among its ranks. With more ranks than heads, each head is on several ranks:

    4 heads    1 rank: 0 1 2 3    2 ranks: 0 1 | 2 3    8 ranks: 0 | 0 | 1 | 1 | 2 | 2 | 3 | 3

Models whose attention has one latent instead of heads (MLA) count as models with one head.
"""

from __future__ import annotations

from typing import NamedTuple

from core.kv.block_form import HeadRange


class HeadSource(NamedTuple):
    """A rank of P from which heads are read; ``heads`` is None if its blocks hold the heads of ours, and no other."""

    peer_rank: int
    heads: HeadRange | None


def can_split(num_ranks: int, num_heads: int) -> bool:
    """Return whether vLLM runs a model with this many KV heads on this many ranks. If not, a head may have no holder."""
    return num_heads % num_ranks == 0 or num_ranks % num_heads == 0


def heads_of(rank: int, num_ranks: int, num_heads: int) -> range:
    """Return the KV heads of a rank; the ranks can split the heads."""
    if num_ranks <= num_heads:
        per_rank = num_heads // num_ranks
        return range(rank * per_rank, (rank + 1) * per_rank)
    head = rank * num_heads // num_ranks
    return range(head, head + 1)


def head_sources(rank: int, num_ranks: int, num_peers: int, num_heads: int) -> tuple[HeadSource, ...]:
    """Return the ranks of P that together hold the heads of our ``rank``, each head once; both sides can split the heads.

    Readers are spread over the ranks that hold a head; engines of one size read rank by rank.
    """
    ours = heads_of(rank, num_ranks, num_heads)
    found: list[HeadSource] = []
    head = ours.start
    while head < ours.stop:
        holders = [peer for peer in range(num_peers) if head in heads_of(peer, num_peers, num_heads)]
        peer = holders[rank % len(holders)]
        theirs = heads_of(peer, num_peers, num_heads)
        end = min(theirs.stop, ours.stop)
        heads = HeadRange(head - theirs.start, head - ours.start, end - head)
        found.append(HeadSource(peer, None if theirs == ours else heads))
        head = end
    return tuple(found)


def leased_peers(rank: int, num_ranks: int, num_peers: int, num_heads: int) -> tuple[int, ...]:
    """Return the ranks of P whose leases our ``rank`` holds and releases.

    They are those that it reads, and its share of all: a lease must be released on every rank of P, read or not. From ranks
    that cannot split our heads nothing is read: P runs another model.
    """
    leased = set(range(rank, num_peers, num_ranks))
    if can_split(num_peers, num_heads):
        leased.update(source.peer_rank for source in head_sources(rank, num_ranks, num_peers, num_heads))
    return tuple(sorted(leased))
