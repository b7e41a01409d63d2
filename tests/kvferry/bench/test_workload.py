"""Workloads are functions of their seed and keep the sharing of a trace."""

import pytest

from core.errors import ConfigError
from kvferry.bench.workload import SyntheticShape, TraceShape, parse_range, synthetic_workload, trace_workload

SHAPE = SyntheticShape(num_requests=20, prompt_low=10, prompt_high=30, output_low=1, output_high=4, num_shared_prefix=8)


def test_same_seed_gives_the_same_workload_and_another_seed_does_not():
    assert synthetic_workload(SHAPE, 1) == synthetic_workload(SHAPE, 1)
    assert synthetic_workload(SHAPE, 1) != synthetic_workload(SHAPE, 2)


def test_lengths_stay_in_their_ranges_and_the_prefix_is_shared():
    requests = synthetic_workload(SHAPE, 3)
    assert {len(request.prompt) for request in requests} <= set(range(10, 31))
    assert {request.max_tokens for request in requests} <= set(range(1, 5))
    assert len({request.prompt[:8] for request in requests}) == 1
    assert len({request.prompt[8:] for request in requests}) > 1


def test_poisson_arrivals_grow_with_the_asked_mean():
    shape = SyntheticShape(num_requests=4000, prompt_low=1, prompt_high=1, output_low=1, output_high=1, rate_per_s=10)
    arrivals = [request.arrival_s for request in synthetic_workload(shape, 0)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(arrivals) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("text", ["0", "5:2", "x", "", "1:x", "-3"])
def test_bad_range_is_refused_with_its_name(text):
    with pytest.raises(ConfigError, match="prompt-tokens"):
        parse_range(text, "prompt-tokens")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1500, "output_length": 40, "hash_ids": [0, 1, 7]}\n'
        '{"timestamp": 9000, "input_length": 10, "output_length": 5, "hash_ids": [3]}\n'
    )
    return path


def test_equal_hash_ids_become_equal_prefixes_at_every_scale(trace):
    for scale in (1.0, 0.1):
        first, second, third = trace_workload(trace, TraceShape(num_requests=3, length_scale=scale, time_scale=0.5))
        shared = 2 * round(512 * scale)
        assert first.prompt[:shared] == second.prompt[:shared]
        assert first.prompt[shared:] != second.prompt[shared : len(first.prompt)]
        assert first.prompt[:1] != third.prompt[:1]
        assert len(second.prompt) == round(1500 * scale)
        assert [r.arrival_s for r in (first, second, third)] == [0, 1.5, 4.5]


def test_trace_lengths_are_cut_to_the_given_bounds(trace):
    request = trace_workload(trace, TraceShape(num_requests=1, max_prompt_tokens=64, max_output_tokens=3))[0]
    assert (len(request.prompt), request.max_tokens) == (64, 3)


def test_bad_trace_line_is_refused_with_its_number(trace):
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=":4:"):
        trace_workload(trace, TraceShape(num_requests=9))
    with pytest.raises(ConfigError, match="cannot read trace"):
        trace_workload(trace.with_name("none"), TraceShape(num_requests=1))
