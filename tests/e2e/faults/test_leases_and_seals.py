"""Blocks that are reused or damaged before they are read: the seals say so, and the prompt is computed again."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.profile("one reader")]


@pytest.mark.quick_on("nixl")
def test_blocks_reused_after_their_lease_are_recognised_by_their_seals(faulty):
    """The lease ends, the blocks get other prompts, and the reader believes that it still holds them."""
    faulty.plan(late=[1])
    stream = faulty.start(120)
    faulty.wait_for("kept")
    owner = faulty.holder()
    faulty.eventually(lambda: not faulty.gauge(owner, "kvferry_kv_leased_blocks"), "the end of the lease")
    for number in range(4):  # both owners take turns
        faulty.assert_correct(faulty.start(200, 4, offset=10 * number), 4)
    let_go_at = faulty.let_go()
    faulty.assert_correct(stream)
    faulty.measure("read to next token", stream.times[1] - let_go_at)
    assert stream.transfer["fallback_reason"] == "stale"
    assert stream.transfer["recomputed_tokens"] > 0


@pytest.mark.quick_on("nixl")
def test_byte_damaged_on_the_way_is_read_once_more(faulty):
    faulty.plan(corrupt=[1])
    stream = faulty.start()
    faulty.assert_correct(stream)
    assert stream.transfer["fallback_reason"] == ""
    assert len([note for note in faulty.trace("posted") if note["region"] == 0]) == 2


@pytest.mark.quick_on("nixl")
def test_block_that_is_damaged_twice_is_computed_again(faulty):
    """Reads are: the blocks, their seals, the first block once more, its seal."""
    faulty.plan(corrupt=[1, 3])
    stream = faulty.start()
    faulty.assert_correct(stream)
    assert stream.transfer["fallback_reason"] == "digest"
    assert stream.transfer["recomputed_tokens"] > 0


@pytest.mark.quick_on("nixl")
def test_block_whose_seal_is_damaged_is_computed_again(faulty):
    faulty.plan(corrupt=[2])
    stream = faulty.start()
    faulty.assert_correct(stream)
    assert stream.transfer["fallback_reason"] == "stale"
    assert stream.transfer["recomputed_tokens"] > 0
