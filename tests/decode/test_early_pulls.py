"""The parts of a handoff that arrive chunk by chunk, put together."""

from __future__ import annotations

import msgspec

from core.wire.early import PullEarly
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from decode.early_pulls import DEADLINE_FACTOR, MIN_WAIT_S, AnnouncedEarlyPulls

BLOCK = 16
LAYOUT = KVLayoutInfo(
    dtype="float32", order="HND", block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=128, num_groups=2
)
PROMPT = tuple(range(200))


def group(group_id: int, first: int, ids: list[int]) -> GroupBlocks:
    hashes = tuple(bytes([first + index]) * 16 for index in range(len(ids)))
    generations = tuple(100 + block_id for block_id in ids)
    return GroupBlocks(group_id=group_id, first_block=first, block_ids=tuple(ids), generations=generations, block_hashes=hashes)


def message(first_token: int, end: int, full: list[int], sliding: tuple[int, list[int]] | None = None, **fields) -> PullEarly:
    """Return a report of blocks from ``first_token`` on; ``sliding`` are first block and ids of the second group."""
    first = first_token // BLOCK
    handoff = KVHandoff(
        transfer_id=f"kv-{end}",
        engine_id="p",
        incarnation=fields.pop("incarnation", 1),
        control_address="tcp://p:1",
        model_fingerprint=b"m",
        layout=LAYOUT,
        groups=(group(0, first, full), group(1, *(sliding or (first, [50 + block_id for block_id in full])))),
        num_tokens=end,
        lease_ms=0,
    )
    prompt = PROMPT if first_token == 0 else ()
    return PullEarly(
        request_id="r", kv_handoff=handoff, first_token=first_token, ready_ms=1000.0, prompt_token_ids=prompt, **fields
    )


def ids(pulls: AnnouncedEarlyPulls, *messages: PullEarly) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return first block and ids of each group after these messages; None if the last one added nothing."""
    news = [pulls.on_message(each, 0.0) for each in messages]
    new = news[-1]
    return None if new is None else [(each.first_block, each.block_ids) for each in new.kv_handoff.groups]


def test_parts_are_joined_in_order():
    joined = ids(AnnouncedEarlyPulls(), message(0, 32, [1, 2]), message(32, 64, [3, 4]))
    assert joined == [(0, (1, 2, 3, 4)), (0, (51, 52, 53, 54))]


def test_the_prompt_comes_once_and_stays():
    pulls = AnnouncedEarlyPulls()
    pulls.on_message(message(0, 32, [1, 2], cache_salt="tenant"), 0.0)
    new = pulls.on_message(message(32, 48, [3]), 0.0)
    assert (new.prompt_token_ids, new.cache_salt, new.is_early) == (PROMPT, "tenant", True)


def test_a_part_after_a_lost_one_is_ignored():
    assert ids(AnnouncedEarlyPulls(), message(0, 32, [1, 2]), message(48, 64, [4])) is None


def test_a_pull_whose_first_message_was_lost_never_begins():
    pulls = AnnouncedEarlyPulls()
    assert ids(pulls, message(32, 64, [3, 4])) is None
    assert pulls.next_timer() is None


def test_a_prompt_that_is_computed_again_replaces_what_is_known():
    joined = ids(AnnouncedEarlyPulls(), message(0, 48, [1, 2, 3]), message(0, 16, [7]))
    assert joined == [(0, (7,)), (0, (57,))]


def test_a_part_from_a_restarted_owner_is_ignored():
    assert ids(AnnouncedEarlyPulls(), message(0, 32, [1, 2]), message(32, 48, [3], incarnation=2)) is None


def test_a_sliding_group_that_has_moved_on_names_later_blocks_only():
    joined = ids(AnnouncedEarlyPulls(), message(0, 32, [1, 2]), message(32, 64, [3, 4], (3, [54])))
    assert joined == [(0, (1, 2, 3, 4)), (3, (54,))]


def test_a_block_that_a_sliding_group_has_used_again_is_named_once():
    joined = ids(AnnouncedEarlyPulls(), message(0, 32, [1, 2]), message(32, 64, [3, 4], (2, [51, 60])))
    assert joined == [(0, (1, 2, 3, 4)), (1, (52, 51, 60))]


def test_a_repeated_part_changes_nothing():
    pulls = AnnouncedEarlyPulls()
    first, second = message(0, 32, [1, 2]), message(32, 48, [3])
    assert ids(pulls, first, second) == ids(pulls, second)


def test_overdue_pulls_end_at_three_times_the_predicted_end():
    pulls = AnnouncedEarlyPulls()
    pulls.on_message(message(0, 32, [1, 2]), 10.0)
    assert pulls.next_timer() == 10.0 + DEADLINE_FACTOR * 1.0
    assert pulls.pop_due(12.9) == []
    assert pulls.pop_due(13.0) == ["r/early"]
    assert pulls.next_timer() is None


def test_short_predictions_leave_time_for_the_way_by_the_router():
    pulls = AnnouncedEarlyPulls()
    pulls.on_message(msgspec.structs.replace(message(0, 32, [1, 2]), ready_ms=1.0), 10.0)
    assert pulls.next_timer() == 10.0 + MIN_WAIT_S
