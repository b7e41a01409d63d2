"""Copies past the caches: the same bytes as numpy's, at any place and of any length, and nothing around them."""

import shutil
import subprocess
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.stream_copy import compiled_library, stream_copy

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
SIZE = 80_000
SOURCE = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)


@needs_compiler
def test_where_there_is_a_compiler_the_copy_is_compiled():
    assert compiled_library() is not None, "core/_stream_copy.c was not built: make install, or pip install --editable ."


@pytest.fixture(params=[True, False], scope="module", ids=["compiled", "numpy"])
def implementation(request):
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr("core.stream_copy.compiled_library", lambda: None)
        yield


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


@pytest.fixture
def built(monkeypatch):
    """Return what is loaded if a given file stands in for the library that was built."""

    def build(path):
        spec = ModuleSpec("core._stream_copy", None, origin=str(path))
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: spec)
        return compiled_library.__wrapped__()

    return build


def test_a_library_that_cannot_be_loaded_is_none(built, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert built(tmp_path / "broken.so") is None
    assert built(tmp_path / "missing.so") is None


@needs_compiler
@pytest.mark.parametrize("source", ["void kvferry_stream_copy() {}", "void another() {}"])
def test_a_library_that_does_not_copy_is_none(built, tmp_path, source):
    (tmp_path / "other.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, check=True)
    assert built(tmp_path / "other.so") is None


def test_a_target_that_is_read_only_is_refused(implementation):
    target = np.frombuffer(bytes(100), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        stream_copy(target, SOURCE[:100])
