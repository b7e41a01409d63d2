"""The rule of invalid blocks: which requests are affected, from where each recomputes, and which requests wait for others.

One rule for synchronous and asynchronous loads, and for any number of KV cache groups. It decides and changes nothing;
``core.sched.load_failures`` applies the result. After vLLM's ``_update_requests_with_invalid_blocks``.

Example: blocks of 16 tokens, one group, three requests with a common prefix. The connector reports block 2 as invalid.

    request | table     | valid tokens | keeps | recomputes | waits for |
    A       | 1 X=2     | 32           | 16    | 2          |           |
    B       | 1 X=2 3   | 48           | 32    | 3          | 2         |
    C       | 1 X=2 4   | 48           | 32    | 4          | 2         |

1. Blocks 3 and 4 follow block 2 in a table. They may have been computed from it, so they are invalid as well.
2. A comes first. It falls back to token 16, the start of block 2, and becomes the owner of block 2: it recomputes it in place.
3. B shares block 2 but need not compute it twice. Its first invalid block without an owner is 3, so it falls back to token
   32 and owns block 3. It must not be scheduled before A has recomputed block 2.
4. C falls back like B: it owns block 4 and waits for block 2.
5. If A leaves before block 2 is whole, the rule is applied again: B becomes the owner of block 2, and C goes on waiting.

Only blocks of tokens that were valid before the step are examined. A block that the step itself has begun to fill was not
loaded, so a report about it means nothing:

    table   | 0 | 1 | X | 3 | 4 |      examined: ceil(C / block_size) blocks
    tokens  |---- C ------|-- n -|     n = scheduled in the step; its output must not be used if X is found

vLLM shares blocks before they are known to be good, so a report arrives before another request has computed from them. Here a
block is shared only after it has passed for good once, so step 1 is needed in addition.
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

    ``num_valid`` tokens had KV before the step; ``num_computed`` have it after this step and the ones in flight after it.
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
        """Yield the position in tokens and the id of every block that holds one of the tokens [start, end)."""
        for ids, block_size in zip(self.tables, self.block_sizes, strict=True):
            for index in range(start // block_size, min(ceil_div(end, block_size), len(ids))):
                if ids[index] != NULL_BLOCK_ID:
                    yield index * block_size, ids[index]

    @property
    def num_slots(self) -> int:
        """Number of tokens that the longest table has room for."""
        return max(len(ids) * block_size for ids, block_size in zip(self.tables, self.block_sizes, strict=True))

    def first_of(self, block_ids: Container[int]) -> int | None:
        """Return the position in tokens of the first of these blocks that holds valid tokens; None if there is none."""
        return min((token for token, block_id in self.entries(0, self.num_valid) if block_id in block_ids), default=None)


@dataclass(slots=True)
class AffectedRequest:
    """A request that relies on invalid blocks.

    ``first_invalid`` is the position in tokens of the first of them. The request keeps ``num_kept`` tokens and recomputes the
    rest. It owns the blocks ``recomputed``, each with the number of tokens at the block's end, and writes them in place. It
    must not be scheduled before the blocks ``awaited``, which other requests own, are whole again.
    """

    request: Request
    num_valid: int
    first_invalid: int
    num_kept: int
    recomputed: dict[int, int] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)


def find_holders(manager: KVCacheManager, requests: Iterable[Request], num_in_flight_tokens: Mapping[str, int]) -> list[Holder]:
    """Return the requests that hold blocks, in the given order.

    ``num_in_flight_tokens``, by request id, are tokens that ``num_computed_tokens`` counts but no processed step has computed.
    """
    block_sizes = tuple(group.spec.block_size for group in manager.kv_cache_config.groups)
    holders = []
    for request in requests:
        tables = manager.get_block_ids(request.request_id)
        if any(tables):
            num_computed = request.num_computed_tokens
            num_valid = num_computed - num_in_flight_tokens.get(request.request_id, 0)
            assert num_valid >= 0, f"{request!r} has more tokens in flight than computed"
            holders.append(Holder(request, num_valid, num_computed, tables, block_sizes))
    return holders


def find_departed(manager: KVCacheManager, departures: Iterable[Departure]) -> list[Holder]:
    """Return the requests that left while a step computes for them, with the token range of that step."""
    block_sizes = tuple(group.spec.block_size for group in manager.kv_cache_config.groups)
    return [Holder(left.request, left.start, left.end, left.live_block_ids(), block_sizes) for left in departures]


def spread_invalidity(
    manager: KVCacheManager, holders: Sequence[Holder], reported: Iterable[int], departed: Sequence[Holder] = ()
) -> set[int]:
    """Return the reported blocks and all blocks that follow one of them in a table, tables of ``departed`` included.

    Reports about blocks that the step has begun to fill are ignored: these blocks were not loaded.
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
    """Blocks that are about to be written.

    ``owners`` maps blocks of earlier reports to their owners; ``taken`` are the blocks that got an owner in this call, with the
    number of tokens at their ends. Both become whole again, so a request can wait for them. ``quarantined`` blocks do not.
    """

    owners: Mapping[int, str]
    quarantined: Container[int]
    taken: dict[int, int] = field(default_factory=dict)

    def is_anothers(self, block_id: int, request_id: str) -> bool:
        """Return True if another request owns the block."""
        return block_id in self.taken or self.owners.get(block_id, request_id) != request_id


def update_requests_with_invalid_blocks(
    manager: KVCacheManager, holders: Iterable[Holder], invalid_block_ids: Container[int], in_use: BlocksInUse
) -> list[AffectedRequest]:
    """Return the requests that hold invalid blocks, in the given order, with what each keeps, recomputes and waits for.

    A request falls back to its first invalid block without another owner and owns all blocks from there on. If every invalid
    block among its valid tokens has another owner, it keeps its valid tokens and waits.
    """
    affected: list[AffectedRequest] = []
    for holder in holders:
        first = holder.first_of(invalid_block_ids)
        if first is None:
            continue
        num_kept = _num_kept(manager, holder, first, in_use)
        recomputed = _blocks_to_recompute(manager, holder, num_kept, invalid_block_ids, in_use)
        awaited = {block_id for _, block_id in holder.entries(0, num_kept) if in_use.is_anothers(block_id, holder.request_id)}
        in_use.taken |= recomputed
        affected.append(
            AffectedRequest(
                request=holder.request,
                num_valid=holder.num_valid,
                first_invalid=manager.floor_to_boundary(first),
                num_kept=num_kept,
                recomputed=recomputed,
                awaited=awaited,
            )
        )
    return affected


def _num_kept(manager: KVCacheManager, holder: Holder, first: int, in_use: BlocksInUse) -> int:
    """Return how many tokens stay: those before the first invalid block without another owner, else all valid ones."""
    after_first = holder.entries(first, holder.num_valid)
    own = min((token for token, block_id in after_first if not in_use.is_anothers(block_id, holder.request_id)), default=None)
    return holder.num_valid if own is None else manager.find_boundary(holder.request_id, own)


def _blocks_to_recompute(
    manager: KVCacheManager, holder: Holder, num_kept: int, invalid_block_ids: Container[int], in_use: BlocksInUse
) -> dict[int, int]:
    """Return the blocks from ``num_kept`` on that the request may write in place, with the number of tokens at their ends.

    In each table they end before the first block that is gone or quarantined, has another owner, or is valid and shared. With
    several groups a request may fall back to before a valid shared block, which it must not overwrite.
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
