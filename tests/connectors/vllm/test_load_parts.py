"""A load that reads from several ranks of P ends once, and a block is good only if every part of it is."""

import pytest

from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.vllm.load_parts import LoadParts
from core.wire.messages import ErrorInfo, TransferUsage

STALE = ErrorInfo(code="stale", message="rewritten", http_status=502)
LOST = ErrorInfo(code="peer_lost", message="gone", http_status=502)


def usage(tokens=64, num_bytes=10, ms=1.0):
    return TransferUsage(
        transport="tcp", transferred_tokens=tokens, transferred_bytes=num_bytes, transfer_ms=ms, verified_blocks=2
    )


@pytest.fixture
def parts():
    return LoadParts()


def test_a_load_from_one_rank_is_its_own_part(parts):
    assert parts.begin("r", 1) == ("r",)
    ended = LoadEnded("r", usage(), STALE, (3,), (4,), "tcp://p")
    assert parts.end(ended) == ended
    assert len(parts) == 0


def test_a_load_ends_with_its_last_part(parts):
    first, second = parts.begin("r", 2)
    assert parts.names("r") == (first, second)
    assert parts.end(LoadEnded(second, usage(64, 10, 1.0))) is None
    whole = parts.end(LoadEnded(first, usage(64, 30, 5.0)))
    assert whole.request_id == "r"
    assert whole.error is None
    assert (whole.usage.transferred_bytes, whole.usage.transfer_ms, whole.usage.verified_blocks) == (40, 5.0, 4)
    assert parts.names("r") == ()
    assert len(parts) == 0


def test_blocks_that_are_bad_in_one_part_are_bad(parts):
    first, second = parts.begin("r", 2)
    parts.end(LoadEnded(first, usage(), STALE, (3, 5), (7,), "tcp://p0"))
    whole = parts.end(LoadEnded(second, usage(32), LOST, (4, 5), (7, 8), "tcp://p1"))
    assert (whole.error, whole.invalid_block_ids, whole.peer) == (STALE, (3, 4, 5), "tcp://p0")
    assert whole.quarantined_block_ids == (7, 8)
    assert whole.usage.transferred_tokens == 32


def test_a_part_without_a_good_block_fails_the_load(parts):
    first, second = parts.begin("r", 2)
    parts.end(LoadEnded(first, None, LOST, ALL_BLOCKS))
    whole = parts.end(LoadEnded(second, usage()))
    assert (whole.error, whole.invalid_block_ids) == (LOST, ALL_BLOCKS)


def test_loads_of_other_requests_are_apart(parts):
    names = [parts.begin(request_id, 2) for request_id in ("a", "b")]
    assert len({name for pair in names for name in pair}) == 4
    parts.end(LoadEnded(names[0][0], usage()))
    parts.end(LoadEnded(names[1][1], usage()))
    assert parts.end(LoadEnded(names[0][1], usage())).request_id == "a"
    assert len(parts) == 1
