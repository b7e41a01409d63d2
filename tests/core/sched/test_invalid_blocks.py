"""The rule of invalid blocks, by tables. Block size 16: a table of n blocks has slots for 16 n tokens."""

from dataclasses import dataclass, field

import pytest

from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from core.request import NewRequest, Request
from core.sched.invalid_blocks import BlocksInUse, Holder, find_holders, spread_invalidity, update_requests_with_invalid_blocks
from core.wire.sampling import SamplingParams


def make_manager(*block_sizes: int) -> KVCacheManager:
    groups = tuple(
        KVCacheGroup((index,), FullAttentionSpec(block_size=size, num_kv_heads=1, head_dim=1, dtype_bytes=4))
        for index, size in enumerate(block_sizes)
    )
    return KVCacheManager(KVCacheConfig(50, groups), 512, max(block_sizes), 16, enable_caching=len(groups) == 1)


def make_request(name: str) -> Request:
    return Request(NewRequest(request_id=name, prompt_token_ids=[1] * 100, sampling=SamplingParams()), None)


@dataclass(frozen=True)
class Kept:
    """The expected result for a request: kept tokens, first invalid position, recomputed blocks, awaited blocks."""

    num_kept: int
    first_invalid: int
    recomputed: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    name: str
    holders: list[tuple[int, list[int]]]  # C and the table of each request
    reported: set[int]
    expected: list[Kept | None]
    owners: dict[int, str] = field(default_factory=dict)  # the requests are r0, r1, ...
    quarantined: set[int] = field(default_factory=set)
    num_scheduled: int = 0  # for each request


CASES = [
    Case("R1 a block after C is not this request's load", [(32, [1, 2, 3])], {3}, [None]),
    Case(
        "R1 a block that one request fills in the step is a good hit for another",
        [(32, [1, 2, 3]), (48, [1, 2, 3, 4])],
        {3},
        [None, None],
        num_scheduled=16,
    ),
    Case(
        "R1 unless it was filled from an invalid one",
        [(32, [1, 2, 3]), (48, [1, 2, 3, 4])],
        {2, 3},
        [Kept(16, 16, (2, 3)), Kept(48, 16, (4,), (2, 3))],
        num_scheduled=16,
    ),
    Case(
        "a table that nobody writes any more does not excuse a block",
        [(0, [1, 2]), (32, [1, 2])],
        {1, 2},
        [None, Kept(0, 0, (1, 2))],
    ),
    Case("R1 the block in which C ends is inspected", [(33, [1, 2, 3])], {3}, [Kept(32, 32, (3,))]),
    Case("R1 a block that is full at C is inspected", [(32, [1, 2, 3])], {2}, [Kept(16, 16, (2, 3))]),
    Case("R4 truncated at the first invalid block", [(80, [1, 2, 3, 4, 5])], {2, 4}, [Kept(16, 16, (2, 3, 4, 5))]),
    Case("R4 the first block of all", [(80, [1, 2, 3, 4, 5])], {1}, [Kept(0, 0, (1, 2, 3, 4, 5))]),
    Case("R4 the fresh blocks of the step are recomputed too", [(32, [1, 2, 3, 4])], {2}, [Kept(16, 16, (2, 3, 4))]),
    Case(
        "R2 the first of two that share recomputes, R5 the second keeps its tokens and waits",
        [(40, [1, 2, 3]), (32, [1, 2, 4])],
        {2},
        [Kept(16, 16, (2, 3)), Kept(32, 16, (4,), (2,))],
    ),
    Case(
        "R3 R5 all that a second request shares has an owner already",
        [(64, [1, 2, 3, 4]), (64, [1, 2, 3, 4])],
        {2, 3},
        [Kept(16, 16, (2, 3, 4)), Kept(64, 16, (), (2, 3, 4))],
    ),
    Case(
        "R4 an own invalid block behind a shared one: truncated at its own",
        [(32, [1, 2]), (64, [1, 2, 3, 4])],
        {1, 3},
        [Kept(0, 0, (1, 2)), Kept(32, 0, (3, 4), (1, 2))],
    ),
    Case(
        "what follows a shared invalid block may rest on it: it is computed again",
        [(32, [1, 2]), (64, [1, 2, 3, 4])],
        {1},
        [Kept(0, 0, (1, 2)), Kept(32, 0, (3, 4), (1, 2))],
    ),
    Case("R6 others are left alone", [(32, [1, 2]), (32, [3, 4])], {3}, [None, Kept(0, 0, (3, 4))]),
    Case("blocks that no request holds change nothing", [(32, [1, 2])], {9}, [None]),
    Case(
        "three share, as in the example of the module: one recomputes, two wait",
        [(32, [1, 2]), (48, [1, 2, 3]), (48, [1, 2, 4])],
        {2},
        [Kept(16, 16, (2,)), Kept(32, 16, (3,), (2,)), Kept(32, 16, (4,), (2,))],
    ),
    Case(
        "a later report finds an owner: the others go on waiting",
        [(16, [1, 2]), (32, [1, 2, 3])],
        {2},
        [None, Kept(32, 16, (3,), (2,))],
        owners={2: "r0"},
    ),
    Case(
        "an owner half-way through its block recomputes all of it",
        [(24, [1, 2]), (32, [1, 2, 3])],
        {2},
        [Kept(16, 16, (2,)), Kept(32, 16, (3,), (2,))],
        owners={2: "r0"},
    ),
    Case(
        "a waiting request goes on waiting when a block of its own is invalid too",
        [(16, [1, 2]), (48, [1, 2, 3])],
        {3},
        [None, Kept(32, 32, (3,), (2,))],
        owners={2: "r0"},
    ),
    Case(
        "copies of one prefix: a block that others rewrite is not rewritten here, nor anything behind it",
        [(48, [1, 2, 3]), (64, [7, 8, 3, 4])],
        {1, 7},
        [Kept(0, 0, (1, 2, 3)), Kept(0, 0, (7, 8))],
    ),
    Case(
        "what rests on an invalid block is invalid for others, whatever they have before it",
        [(48, [1, 2, 3]), (64, [7, 8, 3, 4])],
        {1},
        [Kept(0, 0, (1, 2, 3)), Kept(48, 32, (4,), (3,))],
    ),
    Case(
        "it does not matter in which order they come",
        [(64, [7, 8, 3, 4]), (48, [1, 2, 3])],
        {1},
        [Kept(32, 32, (3, 4)), Kept(0, 0, (1, 2))],
    ),
    Case(
        "a quarantined block is neither kept nor rewritten nor waited for",
        [(64, [1, 2, 3, 4])],
        {2, 3},
        [Kept(16, 16, (2,))],
        quarantined={3},
    ),
    Case("the null block is no block", [(48, [0, 0, 3])], {0, 3}, [Kept(32, 32, (3,))]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rule(case):
    manager = make_manager(16)
    holders = [
        Holder(make_request(f"r{index}"), num_valid, num_valid + case.num_scheduled, (table,), (16,))
        for index, (num_valid, table) in enumerate(case.holders)
    ]
    invalid = spread_invalidity(manager, holders, case.reported)
    in_use = BlocksInUse(case.owners, case.quarantined)
    affected = {one.request.request_id: one for one in update_requests_with_invalid_blocks(manager, holders, invalid, in_use)}
    found = [
        Kept(one.num_kept, one.first_invalid, tuple(one.recomputed), tuple(sorted(one.awaited))) if one is not None else None
        for one in (affected.get(holder.request.request_id) for holder in holders)
    ]
    assert found == case.expected
    assert list(affected) == [holder.request.request_id for holder in holders if holder.request.request_id in affected]


def test_blocks_computed_after_an_invalid_one_by_a_departed_request_are_invalid():
    """They need not hold that block: it may have left their window."""
    manager = make_manager(16)
    departed = Holder(make_request("left"), 32, 48, ([1, 2, 3],), (16,))
    sharing = Holder(make_request("r"), 48, 64, ([0, 0, 3, 4],), (16,))
    assert spread_invalidity(manager, [sharing], {1}, [departed]) == {1, 2, 3, 4}
    assert spread_invalidity(manager, [sharing], {3}, [departed]) == {3, 4}, "what it was about to fill may be reported"


def test_owned_blocks_say_when_they_are_whole_again():
    manager = make_manager(16)
    holder = Holder(make_request("r"), 48, 48, ([1, 2, 3],), (16,))
    (one,) = update_requests_with_invalid_blocks(manager, [holder], {2, 3}, BlocksInUse({}, ()))
    assert one.recomputed == {2: 32, 3: 48}


@pytest.mark.parametrize(
    ("invalid", "num_kept", "recomputed"),
    [
        ({23}, 64, {15: 80, 23: 96}),  # the second group's block of tokens 64..95
        ({13}, 32, {13: 48, 14: 64, 15: 80, 22: 64, 23: 96}),  # the first group's block of tokens 32..47
        ({12}, 0, {11: 16, 12: 32, 13: 48, 14: 64, 15: 80, 21: 32, 22: 64, 23: 96}),  # 16 is no boundary of the second
    ],
)
def test_several_groups_fall_back_to_a_boundary_of_all(invalid, num_kept, recomputed):
    manager = make_manager(16, 32)
    holder = Holder(make_request("r"), 80, 80, ([11, 12, 13, 14, 15], [21, 22, 23]), (16, 32))
    invalid = spread_invalidity(manager, [holder], invalid)
    (one,) = update_requests_with_invalid_blocks(manager, [holder], invalid, BlocksInUse({}, ()))
    assert (one.num_kept, one.recomputed) == (num_kept, recomputed)


def test_valid_tokens_are_those_before_the_step():
    manager = make_manager(16)
    request, other = make_request("r"), make_request("other")
    request.num_computed_tokens = 50
    assert manager.allocate_slots(request, 14, delay_cache_blocks=True) is not None
    (holder,) = find_holders(manager, [other, request], {"r": 18})
    assert (holder.request, holder.num_valid, holder.num_computed) == (request, 32, 50)
    assert holder.tables == manager.get_block_ids("r")
