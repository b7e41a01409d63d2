"""The rule of invalid blocks: which requests rely on one, from where each has to compute again, and who waits for whom.

One rule for synchronous and asynchronous loads, for any number of KV cache groups. Decides; changes nothing. Called by
``core.sched.load_failures`` with what a connector has reported. After vLLM's ``_update_requests_with_invalid_blocks``:

    table   | 0 | 1 | X | 3 | 4 |      looked at: the blocks of tokens that were valid before the step, ceil(C / block_size)
    tokens  |---- C ------|-- n -|     n = scheduled in the step, whose output must not be used if X is found

It is stricter in that what follows an invalid block, in any table, is as invalid: it may have been computed from it. In vLLM
blocks are shared before they are known to be good, so that a report comes before anybody has built on them; here a block can be
shared only after it has passed for good once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from core.kv.block import NULL_BLOCK_ID
from core.kv.manager import KVCacheManager
from core.kv.spec import ceil_div
from core.request import Request
from core.sched.state import Departure


@dataclass(slots=True)
class Holder:
    """A request that holds blocks: one table of block ids per KV cache group.

    ``num_valid`` tokens had KV before the step, ``num_computed`` have it behind the step and those in flight behind it.
    """

    request: Request
    num_valid: int
    num_computed: int
    tables: tuple[list[int], ...]
    block_sizes: tuple[int, ...]

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    def entries(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        """Yield position, in tokens, and id of every block that holds one of the tokens [start, end)."""
        for ids, block_size in zip(self.tables, self.block_sizes, strict=True):
            for index in range(start // block_size, min(ceil_div(end, block_size), len(ids))):
                if ids[index] != NULL_BLOCK_ID:
                    yield index * block_size, ids[index]

    @property
    def num_slots(self) -> int:
        """Tokens that the longest table has room for."""
        return max(len(ids) * block_size for ids, block_size in zip(self.tables, self.block_sizes, strict=True))

    def first_of(self, block_ids: Container[int]) -> int | None:
        """Return the first position, in tokens, of one of these blocks among the valid ones; None if there is none."""
        return min((token for token, block_id in self.entries(0, self.num_valid) if block_id in block_ids), default=None)


@dataclass(slots=True)
class AffectedRequest:
    """A request that relies on invalid blocks.

    ``first_invalid`` is the position, in tokens, of the first of them. The request keeps ``num_kept`` tokens and computes all
    behind them again, the blocks ``claimed`` in place; these map to the number of tokens at their ends. It must not be
    scheduled before the blocks ``awaited``, which others recompute, are whole again.
    """

    request: Request
    num_valid: int
    first_invalid: int
    num_kept: int
    claimed: dict[int, int] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)


def find_holders(manager: KVCacheManager, requests: Iterable[Request], num_in_flight_tokens: Mapping[str, int]) -> list[Holder]:
    """Return the requests that hold blocks, in the given order, and by id how many of their tokens no step has computed yet."""
    block_sizes = tuple(group.spec.block_size for group in manager.kv_cache_config.groups)
    holders = []
    for request in requests:
        tables = manager.get_block_ids(request.request_id)
        if any(tables):
            num_computed = request.num_computed_tokens
            num_valid = num_computed - num_in_flight_tokens.get(request.request_id, 0)
            holders.append(Holder(request, num_valid, num_computed, tables, block_sizes))
    return holders


def find_departed(manager: KVCacheManager, departures: Iterable[Departure]) -> list[Holder]:
    """Return those that have left while a step computes for them, as the step sees them."""
    block_sizes = tuple(group.spec.block_size for group in manager.kv_cache_config.groups)
    return [Holder(left.request, left.start, left.end, left.live_block_ids(), block_sizes) for left in departures]


def spread_invalidity(
    manager: KVCacheManager, holders: Sequence[Holder], reported: Iterable[int], departed: Sequence[Holder] = ()
) -> set[int]:
    """Return the reported blocks and all that follow one of them in a table, those of the ``departed`` included.

    A block that the step has begun to fill for a holder is nobody's load, so a report about it means nothing.
    """
    fresh = {
        block_id
        for holder in holders
        for token, block_id in holder.entries(holder.num_valid, holder.num_computed)
        if token >= holder.num_valid
    }
    invalid = set(reported) - fresh
    num_known = -1
    while len(invalid) > num_known:
        num_known = len(invalid)
        for holder in chain(holders, departed):
            first = holder.first_of(invalid)
            if first is not None:
                start = manager.floor_to_boundary(first)
                invalid.update(block_id for _, block_id in holder.entries(start, holder.num_slots))
    return invalid


@dataclass(slots=True)
class BlocksInUse:
    """Blocks that somebody else is about to write.

    ``claimants`` says who recomputes a block since an earlier report; ``taken`` are those claimed in this call, with the number
    of tokens at their ends. Both become whole again, so they can be waited for; ``quarantined`` ones do not.
    """

    claimants: Mapping[int, str]
    quarantined: Container[int]
    taken: dict[int, int] = field(default_factory=dict)

    def is_anothers(self, block_id: int, request_id: str) -> bool:
        """True if somebody else recomputes the block."""
        return block_id in self.taken or self.claimants.get(block_id, request_id) != request_id


def update_requests_with_invalid_blocks(
    manager: KVCacheManager, holders: Iterable[Holder], invalid_block_ids: Container[int], in_use: BlocksInUse
) -> list[AffectedRequest]:
    """Return what becomes of the holders of invalid blocks, in the given order: whoever comes first recomputes.

    A request falls back to its first invalid block that nobody before it has claimed, and claims all from there on; if there is
    none among its valid ones, it keeps what it had before the step and waits.
    """
    affected: list[AffectedRequest] = []
    for holder in holders:
        first = holder.first_of(invalid_block_ids)
        if first is None:
            continue
        num_kept = _num_kept(manager, holder, first, in_use)
        claimed = _claim(manager, holder, num_kept, invalid_block_ids, in_use)
        awaited = {block_id for _, block_id in holder.entries(0, num_kept) if in_use.is_anothers(block_id, holder.request_id)}
        in_use.taken |= claimed
        affected.append(
            AffectedRequest(
                request=holder.request,
                num_valid=holder.num_valid,
                first_invalid=manager.floor_to_boundary(first),
                num_kept=num_kept,
                claimed=claimed,
                awaited=awaited,
            )
        )
    return affected


def _num_kept(manager: KVCacheManager, holder: Holder, first: int, in_use: BlocksInUse) -> int:
    """Return how many tokens stay: those before the first invalid block that is nobody's, else all that are valid."""
    behind = holder.entries(first, holder.num_valid)
    own = min((token for token, block_id in behind if not in_use.is_anothers(block_id, holder.request_id)), default=None)
    return holder.num_valid if own is None else manager.find_boundary(holder.request_id, own)


def _claim(
    manager: KVCacheManager, holder: Holder, num_kept: int, invalid_block_ids: Container[int], in_use: BlocksInUse
) -> dict[int, int]:
    """Return the blocks that the request writes from now on, up to the first that is gone, or that is not its own to write.

    That is one that somebody else writes, or that is valid and somebody else relies on: with several groups the request may
    have to go back behind such blocks.
    """
    found: dict[int, int] = {}
    blocks = manager.block_pool.blocks
    for ids, block_size in zip(holder.tables, holder.block_sizes, strict=True):
        for index in range(ceil_div(num_kept, block_size), len(ids)):
            block_id = ids[index]
            is_gone = block_id == NULL_BLOCK_ID or block_id in in_use.quarantined
            is_relied_on = block_id not in invalid_block_ids and blocks[block_id].ref_cnt > 1
            if is_gone or is_relied_on or in_use.is_anothers(block_id, holder.request_id):
                break
            found[block_id] = (index + 1) * block_size
    return found
