"""Replaying traces: hits are whole prefixes, and no policy beats the clairvoyant one."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from kvstore.eviction import POLICIES, make_policy


@pytest.fixture(scope="module")
def trace_replay(load_benchmark):
    return load_benchmark("trace_replay")


def prompts(turns):
    """Prompts as paths in a tree, so that equal ids have equal prefixes: (user, turns so far) → ids."""
    return [[user * 100 + depth for depth in range(length)] for user, length in turns]


TRACES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=40).map(prompts)


def test_a_second_turn_finds_the_first(trace_replay):
    result = trace_replay.replay([[1, 2], [1, 2, 3]], make_policy("lru", 10))
    assert (result.num_blocks, result.num_hits, result.hit_rate) == (5, 2, 0.4)


def test_a_block_without_its_prefix_is_no_hit(trace_replay):
    assert trace_replay.replay([[1, 2, 3], [9, 2, 3]], make_policy("lru", 10)).num_hits == 0


def test_the_beginning_of_a_prompt_outlives_its_end(trace_replay):
    trace = [[1, 2, 3], [7, 8], [1, 2, 3]]
    assert trace_replay.replay(trace, make_policy("lru", 4)).num_hits == 2


@settings(max_examples=60)
@given(TRACES, st.integers(1, 12), st.sampled_from(sorted(POLICIES)))
def test_no_policy_beats_the_clairvoyant(trace_replay, trace, capacity, name):
    assert (
        trace_replay.replay(trace, make_policy(name, capacity)).num_hits <= trace_replay.clairvoyant(trace, capacity).num_hits
    )


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), max_size=6).map(prompts), st.integers(1, 3))
def test_the_clairvoyant_equals_the_best_by_exhaustive_search(trace_replay, trace, capacity):
    assert trace_replay.clairvoyant(trace, capacity).num_hits == best_by_search(trace, capacity)


def best_by_search(trace, capacity):
    """Try every content that a cache of that size may keep after each request."""
    best = {frozenset(): 0}
    for blocks in trace:
        after = {}
        for cached, hits in best.items():
            total = hits + next((index for index, block in enumerate(blocks) if block not in cached), len(blocks))
            candidates = cached | set(blocks)
            for kept in combinations(sorted(candidates), min(capacity, len(candidates))):
                after[frozenset(kept)] = max(total, after.get(frozenset(kept), 0))
        best = after
    return max(best.values())


def test_traces_are_read_line_by_line(trace_replay, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0, 1]}\n\n{"hash_ids": [0]}\n')
    assert trace_replay.read_trace(path) == [[0, 1], [0]]


@pytest.mark.parametrize("text", ["{}", "no json", '{"hash_ids": ["a"]}'])
def test_a_malformed_trace_is_refused(trace_replay, tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        trace_replay.read_trace(path)
