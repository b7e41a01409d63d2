"""Loads by way of a server that is played by hand: bad pages, aborts, and a server that is lost meanwhile."""

from __future__ import annotations

import pytest

from connectors.lmcache.messages import LMCacheMPConnectorMetadata, LoadPages, LookupPages
from connectors.lmcache.wire import RequestType, TokenSpan
from core.errors import CorruptBlock, PeerUnreachable
from tests.connectors.lmcache.played_server import STORED, TOKENS


def test_a_load_is_over_when_its_pages_have_been_taken(played):
    played.find(4)
    played.load()
    played.answer(RequestType.RETRIEVE, STORED)
    assert not played.ended
    played.finish(LoadPages, {})
    assert played.ended["r"].error is None
    assert played.ended["r"].usage.transferred_tokens == 256
    assert played.server.staging.num_used_pages == 0


def test_bad_pages_are_invalid_blocks_and_the_rest_is_used(played):
    played.find(4)
    played.load()
    played.answer(RequestType.RETRIEVE, STORED)
    played.finish(LoadPages, {5: CorruptBlock("bad"), 6: CorruptBlock("bad")})
    ended = played.ended["r"]
    assert (ended.is_lost, ended.invalid_block_ids) == (False, {6, 7})
    assert ended.error.code == "digest"
    assert ended.usage.transferred_tokens == 160


def test_a_load_without_a_good_block_has_failed(played):
    played.find(4)
    played.load()
    played.answer(RequestType.RETRIEVE, STORED)
    played.finish(LoadPages, dict.fromkeys(range(8), CorruptBlock("bad")))
    ended = played.ended["r"]
    assert ended.is_lost
    assert ended.usage.transferred_tokens == ended.usage.verified_blocks == 0


@pytest.mark.parametrize("result", [[b"", False], None, [], "yes", [b"", 1]])
def test_anything_but_a_clear_yes_is_a_failure(played, result):
    played.find(4)
    played.load()
    played.answer(RequestType.RETRIEVE, result)
    assert played.ended["r"].error.code == "store_miss"
    assert played.server.staging.num_used_pages == 0


def test_the_pages_of_an_aborted_load_stay_taken_until_the_server_is_done(played):
    played.find(4)
    played.load()
    played.tell(aborts=["r"])
    assert played.ended["r"].error is None
    assert played.ended["r"].usage is None
    assert played.server.staging.num_used_pages == 8, "the server may still write them"
    played.answer(RequestType.RETRIEVE, STORED)
    assert played.job(LoadPages) is None, "and nobody looks at them"
    assert played.server.staging.num_used_pages == 0


def test_a_load_that_is_being_taken_ends_when_that_ends(played):
    played.find(4)
    played.load()
    played.answer(RequestType.RETRIEVE, STORED)
    played.tell(aborts=["r"])
    played.lose()
    assert not played.ended, "its blocks are being written"
    played.finish(LoadPages, {})
    assert played.ended["r"].error is None


def test_a_lost_server_ends_its_loads_at_once(played):
    played.find(4)
    played.load()
    played.lose()
    assert played.ended["r"].error.code == PeerUnreachable.code
    played.answer(RequestType.RETRIEVE, STORED)
    assert played.job(LoadPages) is None


def test_loads_and_lookups_end_if_the_server_is_lost_as_they_begin(played):
    played.find(4)
    played.worker.start_load_kv(
        LMCacheMPConnectorMetadata(
            lookups=[LookupPages(TokenSpan("t", TOKENS), 256, played.server)],
            loads=[LoadPages(played.transfer(played.chunks(0, 256, "r", "s")), 256)],
        )
    )
    played.loop.call_soon(played.calls.lose)  # before a coroutine of them has begun
    played.tick()
    assert played.answers == [("t", 0)]
    assert played.ended["r"].error.code == PeerUnreachable.code


def test_a_load_that_is_aborted_as_it_begins_gives_its_locks_back(played):
    played.find(4)
    order = LoadPages(played.transfer(played.chunks(64, 256, "r", "s")), 192)
    played.tell(loads=[order], unclaimed=["s"], aborts=["r"], ended=["s"])
    assert (played.ended["r"].error, played.ended["r"].usage) == (None, None)
    freed = [(arguments[0]["start"], arguments[0]["end"]) for *_, kind, arguments in played.asked]
    assert sorted(freed) == [(0, 64), (64, 256)]
    for _ in freed:
        assert played.asks(RequestType.END_SESSION) is None
        played.answer(RequestType.FREE_LOOKUP_LOCKS)
    assert played.asks(RequestType.END_SESSION) == ["s"]
    assert played.server.staging.num_used_pages == 0


def test_a_load_for_a_server_that_was_left_has_failed(played):
    played.find(4)
    chunks = played.chunks(0, 256, "r", "s")
    order = LoadPages(played.transfer(chunks), 256)
    played.lose()
    played.tell(loads=[order])
    assert played.ended["r"].error.code == PeerUnreachable.code


def test_a_load_that_takes_too_long_ends_and_so_does_the_trust(played):
    played.find(4)
    played.load()
    for _ in range(15):
        played.tick(2.0)
        if played.asks(RequestType.PING) is not None:
            played.answer(RequestType.PING, True)
    assert played.ended["r"].error is not None
    assert not played.connector.is_connected, "the server may write into pages that nobody can take back otherwise"


def test_a_load_whose_request_has_no_time_left_ends_before_the_server_does(played):
    played.find(4)
    chunks = played.chunks(0, 256, "r", "s")
    played.tell(loads=[LoadPages(played.transfer(chunks), 256, deadline=played.clock.now() + 1.5)], unclaimed=["s"])
    played.tick(1.4)
    assert not played.ended
    played.tick(0.1)
    assert played.ended["r"].error.code == "deadline"
    assert played.server.staging.num_used_pages == 8, "the server may still write them"
    played.answer(RequestType.RETRIEVE, STORED)
    assert played.server.staging.num_used_pages == 0


def test_loads_wait_for_pages_in_their_order(played):
    capacity = played.server.staging.load_capacity
    for name in "abc":
        played.find(4, name)
    taken = played.server.staging.take_to_load(capacity - 8)
    for name in "abc":
        played.load(request_id=name, name=name)
    for name in "abc":
        assert played.asks(RequestType.RETRIEVE)[0]["request_id"] == name
        played.answer(RequestType.RETRIEVE, STORED)
        assert played.asks(RequestType.RETRIEVE) is None
        played.finish(LoadPages, {})
    played.server.staging.give_back(taken)
    assert played.server.staging.num_used_pages == 0
