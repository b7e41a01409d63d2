"""The index of own placements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.placed import KEY_TOKENS, PlacedPrefixes

ROOMY = 10**6


def place(index, worker, token_ids, capacity=ROOMY):
    index.on_placed(worker, index.keys(token_ids, b""), capacity)


def hits(index, token_ids, salt=b""):
    return index.hits(index.keys(token_ids, salt))


def test_a_prompt_is_found_where_it_was_placed():
    index = PlacedPrefixes()
    place(index, "p0", range(200))
    assert hits(index, range(200)) == {"p0": 192}
    assert hits(index, [*range(130), 7, 8, 9, *range(100)]) == {"p0": 128}


def test_the_last_token_is_never_a_hit():
    index = PlacedPrefixes()
    place(index, "p0", range(64))
    assert hits(index, range(64)) == {}


def test_a_salt_separates_equal_prompts():
    index = PlacedPrefixes()
    place(index, "p0", range(200))
    assert hits(index, range(200), b"tenant") == {}


def test_a_worker_that_left_holds_nothing():
    index = PlacedPrefixes()
    place(index, "p0", range(200))
    index.on_left("p0")
    assert hits(index, range(200)) == {}
    assert len(index) == 0


def test_the_oldest_prompt_loses_its_end_first():
    index = PlacedPrefixes()
    place(index, "p0", range(200), capacity=256)
    place(index, "p0", range(1000, 1130), capacity=256)
    assert hits(index, range(200)) == {"p0": 128}
    assert hits(index, range(1000, 1130)) == {"p0": 128}


placements = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 400)), max_size=30)


@given(placements, st.integers(0, 12))
def test_no_worker_holds_more_than_its_capacity(history, capacity):
    index, placed = PlacedPrefixes(), {}
    for worker, user, length in history:
        prompt = [user] * length
        place(index, worker, prompt, capacity * KEY_TOKENS)
        placed.setdefault(worker, []).append(prompt)
        assert len(index) <= capacity * len(placed)
        for other, found in hits(index, prompt).items():
            assert any(earlier[:found] == prompt[:found] for earlier in placed[other])
