"""Copies past the caches: the same bytes as numpy's, at any place and of any length, and nothing around them."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.stream_copy import stream_copy

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
SIZE = 80_000
SOURCE = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(params=[True, False], scope="module", ids=["compiled", "numpy"])
def implementation(request):
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr("core.stream_copy.compiled_library", lambda: None)
        yield


@pytest.mark.slow
@given(start=st.integers(0, 100), to=st.integers(0, 100), num_bytes=st.integers(0, 300) | st.integers(16_000, SIZE - 100))
@settings(max_examples=200, deadline=None)
def test_copies_exactly_these_bytes(implementation, start, to, num_bytes):
    target = np.zeros(SIZE, np.uint8)
    stream_copy(target[to : to + num_bytes], SOURCE[start : start + num_bytes])
    expected = np.zeros(SIZE, np.uint8)
    expected[to : to + num_bytes] = SOURCE[start : start + num_bytes]
    assert (target == expected).all()


def test_copies_rows_that_may_not_be_written_at_their_source(implementation):
    source = SOURCE.reshape(8, -1).view()
    source.flags.writeable = False
    target = np.zeros((3, SIZE // 8), np.uint8)
    stream_copy(target, source[2:5])
    assert (target == SOURCE.reshape(8, -1)[2:5]).all()


@pytest.mark.parametrize(("target", "source"), [(np.zeros(4, np.uint8), SOURCE[:5]), (np.zeros(8, np.uint8)[::2], SOURCE[:4])])
def test_refuses_other_sizes_and_gaps(target, source):
    with pytest.raises(ValueError, match="without a gap"):
        stream_copy(target, source)


def test_a_target_that_is_read_only_is_refused(implementation):
    target = np.frombuffer(bytes(100), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        stream_copy(target, SOURCE[:100])
