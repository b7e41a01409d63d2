"""What the plug-in counts for the operator's metrics."""

import pytest

from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.vllm.counts import RankCounts, SchedulerCounts
from connectors.vllm.orders import QuarantineNews, RankReports
from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.scheduler_side import SchedulerSide, TransferGroups
from core.ids import RandomIds
from core.wire.messages import ErrorInfo, TransferUsage
from tests.connectors.vllm.fake_requests import REMOTE_DECODE, FakeRequest, Status, engine


def usage(verified):
    return TransferUsage(verified_blocks=verified, transferred_bytes=100, transfer_ms=2.0, verify_ms=1.0)


def test_bytes_and_times_are_those_of_complete_loads():
    counts = RankCounts()
    counts.add(LoadEnded("a", usage(3)))
    counts.add(LoadEnded("b", usage(2), ErrorInfo(code="peer_lost", message="gone"), invalid_block_ids=(7,)))
    counts.add(LoadEnded("c", None, ErrorInfo(code="peer_lost", message="gone"), invalid_block_ids=ALL_BLOCKS))
    assert (counts.loads, counts.verified_blocks, counts.bytes) == (1, 5, 100)
    assert (counts.transfer_ms, counts.verify_ms) == (2.0, 1.0)
    assert counts.failures == {"peer_lost": 2}


@pytest.fixture
def side():
    return SchedulerSide(engine(), PeerRules(("127.0.0.0/8",)), RandomIds(), TransferGroups((0,), (None,)))


def test_a_refused_handoff_is_counted_once(side):
    side.on_new_request(FakeRequest("d", [1, 2, 3], {"do_remote_prefill": True, "remote_engine_id": "nixl"}))
    counts = side.take_counts()
    assert sum(counts.refusals.values()) == 1
    assert counts.held_blocks == 0
    assert side.take_counts() == SchedulerCounts(counts.refusals - counts.refusals, None)


class Pool:
    """vLLM's pool: how many references each of its blocks has."""

    def __init__(self, num_blocks):
        self.blocks = range(num_blocks)
        self.references = [0] * num_blocks

    def touch(self, blocks):
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            self.references[block] -= 1


def test_the_engine_steps_until_no_block_is_quarantined(side):
    pool = Pool(9)
    side.bind_block_pool(pool)
    assert not side.needs_steps()
    side.on_step_ended(set(), {"d"}, RankReports([QuarantineNews(added=(3, 4))]))
    assert side.needs_steps()
    assert (pool.references[3], pool.references[4], side.take_counts().held_blocks) == (1, 1, 2)
    side.on_step_ended(set(), set(), RankReports([QuarantineNews(ended=(4, 3))]))
    assert not side.needs_steps()
    assert (sum(pool.references), side.take_counts().held_blocks) == (0, 0)


def test_held_blocks_are_told_when_their_number_changes_and_with_other_counts(side):
    request = FakeRequest("p", list(range(5, 75)), REMOTE_DECODE)
    side.on_new_request(request)
    side.build_orders({"p": 70}, lambda _: ([1, 2, 3],))
    assert side.take_counts().held_blocks == 3
    assert side.take_counts().held_blocks is None
    assert side.take_counts(ranks_have_counted=True).held_blocks == 3
    side.on_new_request(FakeRequest("d", [1, 2, 3], {"do_remote_prefill": True, "remote_engine_id": "nixl"}))
    assert side.take_counts().held_blocks == 3
    assert side.take_counts().held_blocks is None
    request.status = Status.FINISHED_ABORTED
    assert side.request_finished(request, ([1, 2, 3],)) is None
    side.build_orders({}, lambda _: None)
    assert side.take_counts().held_blocks == 0


def test_the_engine_steps_until_its_loads_have_ended_and_their_leases_are_released(side):
    """In a pause vLLM does not count requests that wait for blocks."""
    owner = SchedulerSide(engine("p"), PeerRules(()), RandomIds(), TransferGroups((0,), (None,)))
    prompt = FakeRequest("p", list(range(5, 75)), REMOTE_DECODE)
    owner.on_new_request(prompt)
    owner.build_orders({"p": 70}, lambda _: ([1, 2, 3],))
    prompt.status, prompt.num_output_tokens = Status.FINISHED_LENGTH_CAPPED, 1
    request = FakeRequest("d", list(range(5, 75)), owner.request_finished(prompt, ([1, 2, 3],)))
    side.on_new_request(request)
    side.start_load(request, ([4, 5, 6],), 70)
    side.build_orders({}, lambda _: None)
    assert side.needs_steps()
    side.on_step_ended(set(), {"d"}, None)
    assert side.needs_steps()
    assert len(side.build_orders({}, lambda _: None).releases) == 1
    assert not side.needs_steps()
