"""Libraries built from C: one that is broken, of another release or wrong here is not used."""

import shutil
import subprocess

import pytest

from core import hash_chain, multilinear, stream_copy
from core.engine import allowed_tokens

LOADERS = {
    multilinear: "kvferry_multilinear",
    hash_chain: "kvferry_hash_chain",
    stream_copy: "kvferry_stream_copy",
    allowed_tokens: "kvferry_keep_allowed",
}


@pytest.fixture(params=LOADERS, ids=lambda module: module.__name__)
def module(request):
    return request.param


def test_a_library_that_cannot_be_loaded_is_none(module, load_from, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert load_from(module.compiled_library, tmp_path / "broken.so") is None
    assert load_from(module.compiled_library, tmp_path / "missing.so") is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("has_function", [False, True])
def test_a_library_that_computes_something_else_is_none(module, load_from, tmp_path, has_function):
    name = LOADERS[module] if has_function else "another"
    (tmp_path / "other.c").write_text(f"void kvferry_hash_chain_start() {{}} void {name}() {{}}")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, check=True)
    assert load_from(module.compiled_library, tmp_path / "other.so") is None


def test_the_library_that_was_built_is_found(module):
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    assert module.compiled_library() is not None, "it was not built: make install, or pip install --editable ."
