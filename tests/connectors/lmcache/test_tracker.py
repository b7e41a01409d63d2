"""What is saved and loaded of one request: whole chunks, each once, never more than is computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.lmcache.tracker import (
    ChunkGeometry,
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
    LMCacheMPRequestTracker,
)
from connectors.lmcache.wire import TokenSpan
from core.request import NewRequest, Request
from core.wire.sampling import SamplingParams

GEOMETRY = ChunkGeometry(chunk_size=256, block_size=16)
SPAN = TokenSpan("session", ())


def tracker_of(num_tokens: int, **fields: int) -> LMCacheMPRequestTracker:
    request = Request(NewRequest(request_id="r", prompt_token_ids=range(num_tokens), sampling=SamplingParams()), None)
    return LMCacheMPRequestTracker(request, "session", **fields)


def table(num_tokens: int, block_size: int = 16, first: int = 1) -> list[int]:
    return list(range(first, first - (-num_tokens // block_size)))


def store(tracker: LMCacheMPRequestTracker, geometry: ChunkGeometry = GEOMETRY, **fields):
    """Return the range that is saved now, None if nothing is."""
    blocks = fields.pop("blocks", [table(tracker.request.num_tokens, geometry.block_size)])
    found = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, geometry, blocks, SPAN, **fields)
    return (found.start, found.end) if found else None


def retrieve(tracker: LMCacheMPRequestTracker, geometry: ChunkGeometry = GEOMETRY):
    blocks = [table(tracker.request.num_tokens, geometry.block_size)]
    return LMCacheMPRequestMetadata.GetRetrieveMetadata(tracker, geometry, blocks, SPAN)


# ---- saves -------------------------------------------------------------------------------------------------------------


def test_chunks_are_saved_as_steps_complete_them():
    tracker = tracker_of(1000)
    tracker.begin(0)
    tracker.num_scheduled_tokens += 512
    assert store(tracker) == (0, 512)
    tracker.num_scheduled_tokens += 488
    assert store(tracker) == (512, 768)
    tracker.request.all_token_ids.extend(range(24))
    tracker.request.num_tokens += 24
    tracker.num_scheduled_tokens += 23
    assert store(tracker) is None
    tracker.num_scheduled_tokens += 1
    assert store(tracker) == (768, 1024)


def test_what_the_server_has_counts_as_computed_and_as_saved():
    tracker = tracker_of(1000)
    tracker.found(512, 0)
    tracker.begin(512)
    tracker.num_scheduled_tokens += 488
    assert store(tracker) == (512, 768)


@pytest.mark.parametrize(
    ("num_local", "num_found", "saved"), [(640, 512, (512, 768)), (256, 512, (512, 768)), (0, 0, (0, 256))]
)
def test_overlapping_hits_are_not_added(num_local, num_found, saved):
    tracker = tracker_of(1000)
    tracker.found(num_found, num_local)
    tracker.begin(max(num_local, num_found))
    tracker.num_scheduled_tokens += saved[1] - max(num_local, num_found) + 10
    assert store(tracker) == saved


def test_local_hits_that_the_server_lacks_are_saved():
    tracker = tracker_of(600)
    tracker.found(0, 512)
    tracker.begin(512)
    tracker.num_scheduled_tokens += 88
    assert store(tracker) == (0, 512)


def test_the_group_that_covers_least_bounds_a_save():
    geometry = ChunkGeometry(64, 16, (-1, 512))
    tracker = tracker_of(200)
    tracker.begin(0)
    tracker.num_scheduled_tokens += 200
    assert store(tracker, geometry, blocks=[table(200), table(100)]) == (0, 64)


def test_a_bound_on_tokens_is_kept():
    tracker = tracker_of(1000)
    tracker.begin(0)
    tracker.num_scheduled_tokens += 1000
    assert store(tracker, max_tokens=600) == (0, 512)


def test_chunks_beyond_a_bound_are_left_for_the_next_step():
    tracker = tracker_of(1000)
    tracker.begin(0)
    tracker.num_scheduled_tokens += 1000
    assert store(tracker, max_chunks=2) == (0, 512)
    assert store(tracker, max_chunks=2) == (512, 768)


@pytest.mark.parametrize(
    ("window", "lost", "kept"),
    [
        (-1, (), [1, 2, 3, 4, 5, 6, 7, 8]),
        (64, (0,), [0, 0, 0, 0, 5, 6, 7, 8]),
        (32, (0, 1), [0, 0, 3, 4, 5, 6, 7, 8]),  # the server keeps the end of the chunk that the window covers
        (32, (0, 1, 2), [0, 0, 0, 0, 5, 6, 7, 8]),
        (20, (0, 1), [0, 0, 3, 4, 5, 6, 7, 8]),
        (500, (0, 1, 2, 3, 4), [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_chunk_of_which_a_window_has_lost_something_is_no_chunk(window, lost, kept):
    geometry = ChunkGeometry(64, 16, (window,))
    blocks = [0 if index in lost else block_id for index, block_id in enumerate(table(128))]
    tracker = tracker_of(128)
    tracker.begin(0)
    tracker.num_scheduled_tokens += 128
    found = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, geometry, [blocks], SPAN)
    assert list(found.block_ids[0]) == kept


def test_what_was_not_saved_after_all_is_saved_again():
    tracker = tracker_of(600)
    tracker.begin(0)
    tracker.num_scheduled_tokens += 520
    assert store(tracker) == (0, 512)
    tracker.forget_stored(256, GEOMETRY.chunk_size)
    assert store(tracker) == (256, 512)


# ---- loads -------------------------------------------------------------------------------------------------------------


def test_a_load_begins_with_the_chunk_in_which_local_hits_end():
    tracker = tracker_of(1000)
    tracker.found(768, 320)
    tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
    found = retrieve(tracker)
    assert (found.start, found.end, found.num_skipped_tokens) == (256, 768, 64)
    assert list(found.block_ids[0]) == list(range(17, 49))
    assert tracker.state is LMCacheMPRequestState.READY
    assert retrieve(tracker) is None, "a load is asked for once"


@pytest.mark.parametrize("state", list(LMCacheMPRequestState))
def test_nothing_is_loaded_that_is_here_already(state):
    tracker = tracker_of(1000, state=state)
    tracker.found(512, 512)
    assert retrieve(tracker) is None


def test_asking_many_times_counts_once():
    tracker = tracker_of(1000)
    for _ in range(3):
        tracker.found(512, 256)
    assert (tracker.num_stored_tokens, tracker.num_lmcache_hit_tokens, tracker.num_local_hit_tokens) == (512, 512, 256)


def test_a_load_that_failed_counts_as_nothing():
    tracker = tracker_of(1000)
    tracker.found(768, 0)
    tracker.begin(128)
    tracker.num_scheduled_tokens += 128
    assert tracker.num_computed_tokens == 256


# ---- any sequence ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_chunk_is_saved_once_and_only_when_it_is_computed(data):
    blocks_per_chunk = data.draw(st.integers(1, 4))
    geometry = ChunkGeometry(16 * blocks_per_chunk, 16)
    num_tokens = data.draw(st.integers(1, 250))
    tracker = tracker_of(num_tokens)
    num_found = geometry.floor(data.draw(st.integers(0, num_tokens)))
    num_local = data.draw(st.integers(0, num_tokens - 1)) // 16 * 16
    tracker.found(num_found, num_local)
    is_loaded = data.draw(st.booleans())
    computed = max(num_local, min(num_found, num_tokens - 1) if is_loaded else 0)
    tracker.begin(computed)
    tracker.forget_stored(computed, geometry.chunk_size)
    saved = {*range(0, tracker.num_stored_tokens, geometry.chunk_size)}
    while computed < num_tokens:
        if data.draw(st.integers(0, 9)) == 0:  # rolled back, and begun again
            computed = data.draw(st.integers(0, computed))
            tracker.begin(computed)
            tracker.forget_stored(computed, geometry.chunk_size)
            saved = {start for start in saved if start < tracker.num_stored_tokens}
        num_scheduled = data.draw(st.integers(1, min(64, num_tokens - computed)))
        computed += num_scheduled
        tracker.num_scheduled_tokens += num_scheduled
        found = store(tracker, geometry)
        if found is None:
            continue
        start, end = found
        assert start % geometry.chunk_size == end % geometry.chunk_size == 0
        assert end <= computed
        new = {*range(start, end, geometry.chunk_size)}
        assert not new & saved
        saved |= new
    assert saved == {*range(0, geometry.floor(num_tokens), geometry.chunk_size)}
