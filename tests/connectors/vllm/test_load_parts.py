"""A load that reads from several ranks of P ends once, and a block is good only if every part of it is."""

import pytest

from connectors.p2p.actions import HandoffRef, PullRequest
from connectors.p2p.transport.interface import PeerId
from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.vllm.load_parts import LoadParts
from core.wire.messages import ErrorInfo, TransferUsage

STALE = ErrorInfo(code="stale", message="rewritten", http_status=502)
LOST = ErrorInfo(code="peer_lost", message="gone", http_status=502)


def pulls(request_id, count):
    return [PullRequest(request_id, HandoffRef(f"kv/{rank}", PeerId(f"tcp://p{rank}", 1)), (), 64) for rank in range(count)]


def usage(tokens=64, num_bytes=10, ms=1.0):
    return TransferUsage(
        transport="tcp", transferred_tokens=tokens, transferred_bytes=num_bytes, transfer_ms=ms, verified_blocks=2
    )


@pytest.fixture
def parts():
    return LoadParts()


def test_a_load_from_one_rank_is_its_own_part(parts):
    (only,) = pulls("r", 1)
    assert parts.begin("r", [only]) == only
    ended = LoadEnded("r", usage(), STALE, (3,), (4,), "tcp://p")
    assert parts.end(ended) == ended
    assert len(parts) == 0


def test_parts_are_read_one_after_another_and_end_as_one(parts):
    first = parts.begin("r", pulls("r", 2))
    assert first.handoff.transfer_id == "kv/0"
    second = parts.end(LoadEnded(first.request_id, usage(64, 10, 1.0)))
    assert isinstance(second, PullRequest)
    assert (second.handoff.transfer_id, second.request_id != first.request_id) == ("kv/1", True)
    whole = parts.end(LoadEnded(second.request_id, usage(64, 30, 5.0)))
    assert isinstance(whole, LoadEnded)
    assert (whole.request_id, whole.error) == ("r", None)
    assert (whole.usage.transferred_bytes, whole.usage.transfer_ms, whole.usage.verified_blocks) == (40, 6.0, 4)
    assert len(parts) == 0


def test_blocks_that_are_bad_in_one_part_are_bad(parts):
    first = parts.begin("r", pulls("r", 2))
    second = parts.end(LoadEnded(first.request_id, usage(), STALE, (3, 5), (), "tcp://p0"))
    whole = parts.end(LoadEnded(second.request_id, usage(32), LOST, (4, 5), (7, 8), "tcp://p1"))
    assert (whole.error, whole.invalid_block_ids, whole.peer) == (STALE, (3, 4, 5), "tcp://p0")
    assert whole.quarantined_block_ids == (7, 8)
    assert whole.usage.transferred_tokens == 32


@pytest.mark.parametrize("quarantined", [(), (3,)])
def test_a_part_that_cannot_be_saved_ends_the_load(parts, quarantined):
    first = parts.begin("r", pulls("r", 3))
    invalid = (3,) if quarantined else ALL_BLOCKS
    whole = parts.end(LoadEnded(first.request_id, usage(), LOST, invalid, quarantined))
    assert (whole.request_id, whole.error, whole.invalid_block_ids) == ("r", LOST, invalid)
    assert len(parts) == 0


def test_an_aborted_load_begins_no_further_part_and_is_never_whole(parts):
    first = parts.begin("r", pulls("r", 2))
    assert parts.abort("r") == first.request_id
    whole = parts.end(LoadEnded(first.request_id, usage()))  # it was over before the abort came
    assert whole.invalid_block_ids is ALL_BLOCKS
    assert whole.error is not None
    assert parts.abort("r") is None


def test_an_abort_that_comes_too_late_changes_nothing(parts):
    (only,) = pulls("r", 1)
    parts.begin("r", [only])
    assert parts.abort("r") == "r"
    assert parts.end(LoadEnded("r", usage())).error is None


def test_loads_of_other_requests_are_apart(parts):
    first, other = (parts.begin(name, pulls(name, 2)) for name in ("a", "b"))
    second = parts.end(LoadEnded(first.request_id, usage()))
    assert parts.end(LoadEnded(second.request_id, usage())).request_id == "a"
    assert parts.abort("b") == other.request_id
    assert len(parts) == 1
