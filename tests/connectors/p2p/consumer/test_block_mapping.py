"""Which blocks of the owner fill which of ours: every token that is needed, once, and nothing that the owner does not hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import force_setattr

from connectors.p2p.actions import TokenCopy
from connectors.p2p.consumer.block_mapping import GroupMapping, TokenExtent, map_group
from core.errors import StaleBlock
from core.kv.block import NULL_BLOCK_ID
from core.kv.seals import ExpectedSeal, num_landing_rows
from core.kv.spec import ceil_div
from core.wire.kv import GroupBlocks

REMOTE, LOCAL = 500, 100  # ids of the blocks at position 0


def hashes(num_blocks: int) -> tuple[bytes, ...]:
    return tuple(bytes([position]) * 16 for position in range(num_blocks))


def owner_group(num_tokens: int, block_size: int, num_skipped: int = 0) -> GroupBlocks:
    end, first = ceil_div(num_tokens, block_size), num_skipped // block_size
    return GroupBlocks(
        group_id=9,
        first_block=first,
        block_ids=tuple(range(REMOTE + first, REMOTE + end)),
        generations=tuple(range(7 + first, 7 + end)),
        block_hashes=hashes(end)[first:],
    )


def own_table(num_tokens: int, block_size: int, num_skipped: int = 0) -> list[int]:
    end, first = ceil_div(num_tokens, block_size), num_skipped // block_size
    return [NULL_BLOCK_ID] * first + list(range(LOCAL + first, LOCAL + end))


def plan(start: int, end: int, local: int, remote: int, num_skipped: int = 0) -> GroupMapping:
    extent = TokenExtent(
        group_id=2, start=start, end=end, local_block_size=local, remote_block_size=remote, num_skipped_tokens=num_skipped
    )
    group = owner_group(end, remote, num_skipped)
    return map_group(extent, group, own_table(end, local, num_skipped), hashes(ceil_div(end, remote)))


def rows(found: GroupMapping) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(unit.remote_rows, unit.local_rows) for unit in found.units]


def test_blocks_of_one_size_are_paired_and_taken_as_they_are():
    found = plan(start=32, end=70, local=32, remote=32)
    assert rows(found) == [((501,), (101,)), ((502,), (102,))]
    assert [unit.expected for unit in found.units] == [
        (ExpectedSeal(8, 2, bytes([1]) * 16, 32),),
        (ExpectedSeal(9, 2, bytes([2]) * 16, 6),),
    ]
    assert [unit.num_tokens for unit in found.units] == [32, 6]
    assert not any(unit.copies for unit in found.units)


def test_short_blocks_are_put_together():
    found = plan(start=64, end=140, local=64, remote=16)
    assert rows(found) == [((504, 505, 506, 507), (101,)), ((508,), (102,))]
    assert found.units[0].copies[1] == TokenCopy(505, 0, 101, 16, 16)
    assert [unit.num_tokens for unit in found.units] == [64, 12]


def test_long_blocks_are_cut_and_local_hits_left_alone():
    found = plan(start=48, end=100, local=16, remote=64)
    assert rows(found) == [((500,), (103,)), ((501,), (104, 105, 106))]
    assert found.units[0].copies == (TokenCopy(500, 48, 103, 0, 16),)
    assert [seal.num_tokens for seal in found.units[1].expected] == [36]
    assert [unit.num_tokens for unit in found.units] == [16, 36]


def test_sizes_of_which_neither_divides_the_other_meet_at_their_common_multiple():
    assert rows(plan(start=0, end=192, local=48, remote=32)) == [
        ((500, 501, 502), (100, 101)),
        ((503, 504, 505), (102, 103)),
    ]


def test_blocks_that_left_the_window_are_not_read():
    found = plan(start=0, end=100, local=16, remote=16, num_skipped=40)
    assert rows(found) == [((row,), (row - 400,)) for row in range(502, 507)]
    assert not found.is_partial


def test_window_that_begins_within_a_block_fills_only_its_end():
    found = plan(start=0, end=200, local=64, remote=16, num_skipped=100)
    first = found.units[0]
    assert (first.remote_rows, first.local_rows) == ((506, 507), (101,))
    assert first.copies[0] == TokenCopy(506, 0, 101, 32, 16)
    assert found.is_partial


def test_block_that_the_owner_lacks_is_stale_only_if_it_is_needed():
    extent = TokenExtent(group_id=2, start=0, end=96, local_block_size=16, remote_block_size=16)
    for num_skipped in (0, 30):
        with pytest.raises(StaleBlock, match="group 2 needs"):
            map_group(extent, owner_group(96, 16, num_skipped=40), own_table(96, 16, num_skipped), hashes(6))
    hole = owner_group(96, 16)
    hole = GroupBlocks(
        group_id=0, block_ids=(500, 0, 502, 503, 504, 505), generations=hole.generations, block_hashes=hole.block_hashes
    )
    with pytest.raises(StaleBlock):
        map_group(extent, hole, own_table(96, 16), hashes(6))


def test_handoff_that_ends_too_early_is_stale():
    extent = TokenExtent(group_id=0, start=0, end=96, local_block_size=16, remote_block_size=16)
    with pytest.raises(StaleBlock):
        map_group(extent, owner_group(80, 16), own_table(96, 16), hashes(6))


@given(data=st.data())
def test_every_needed_token_comes_from_where_the_owner_has_it(data):
    local, remote = data.draw(st.sampled_from([16, 32, 48, 64])), data.draw(st.sampled_from([16, 32, 48, 64]))
    end = data.draw(st.integers(1, 300))
    start = local * data.draw(st.integers(0, (end - 1) // local))
    window = data.draw(st.sampled_from([0, 1, 16, 17, 40, 64, 400]))
    num_skipped = max(0, end - window + 1) if window else 0
    found = plan(start, end, local, remote, num_skipped)

    table = own_table(end, local, num_skipped)
    filled: dict[int, int] = {}
    for unit in found.units:
        num_landing = num_landing_rows(local) * len(unit.local_rows)
        assert len(unit.remote_rows) <= num_landing, "there is a landing row for every seal"
        copies = unit.copies or (TokenCopy(unit.remote_rows[0], 0, unit.local_rows[0], 0, local),)
        for copy in copies:
            assert copy.remote_row in unit.remote_rows
            assert copy.local_row in unit.local_rows
            assert 0 <= copy.remote_start <= remote - copy.num_tokens
            for offset in range(copy.num_tokens):
                position = (copy.local_row - LOCAL) * local + copy.local_start + offset
                assert position not in filled, "a slot is filled once"
                filled[position] = (copy.remote_row - REMOTE) * remote + copy.remote_start + offset
    assert all(source == position for position, source in filled.items())
    assert filled.keys() >= set(range(max(start, num_skipped), end))
    first_loaded = next((p for p in range(start // local, len(table)) if table[p] != NULL_BLOCK_ID), None)
    lacks_some = first_loaded is not None and first_loaded * local not in filled
    assert found.is_partial == lacks_some
    for side in ("remote_rows", "local_rows"):
        named = [row for unit in found.units for row in getattr(unit, side)]
        assert len(named) == len(set(named)), "no two units share a block"
    read = {position // local for position in filled}
    assert sum(unit.num_tokens for unit in found.units) == sum(min(local, end - index * local) for index in read)


@pytest.mark.parametrize("local", [16, 64])
def test_what_a_seal_must_be_follows_from_the_position_that_its_block_fills(local):
    group = owner_group(48, 16)
    force_setattr(group, "block_ids", (500, 500, 502))  # cannot come over the wire
    extent = TokenExtent(group_id=2, start=0, end=48, local_block_size=local, remote_block_size=16)
    found = map_group(extent, group, own_table(48, local), hashes(3))
    expected = [seal for unit in found.units for seal in unit.expected]
    assert [seal.block_hash for seal in expected] == list(hashes(3))
    assert [seal.generation for seal in expected] == [7, 8, 9]


def test_planning_a_long_prompt_looks_at_every_block_once():
    class Counting(tuple):
        looks = 0

        def __getitem__(self, index):
            Counting.looks += 1
            return super().__getitem__(index)

        def __iter__(self):
            for item in super().__iter__():
                Counting.looks += 1
                yield item

    chain = Counting(bytes(16) for _ in range(2000))
    group = GroupBlocks(group_id=9, block_ids=tuple(range(1, 2001)), generations=(1,) * 2000, block_hashes=(bytes(16),) * 2000)
    force_setattr(group, "block_ids", Counting(group.block_ids))
    extent = TokenExtent(group_id=2, start=0, end=32_000, local_block_size=16, remote_block_size=16)
    assert len(map_group(extent, group, list(range(1, 2001)), chain).units) == 2000
    assert Counting.looks < 10 * 2000
