"""The compiled chain of block hashes: the same values as hashlib's, for any key, block size and start."""

import shutil
import subprocess
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import hash_chain
from core.hash_chain import compiled_library
from core.kv.hashing import BlockHasher

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=300).map(lambda tokens: array("i", tokens))


@pytest.fixture
def hashlib_only(monkeypatch):
    """Make hashers as where there is no compiler."""

    def make(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr("core.kv.hashing.compiled_library", lambda: None)
            return BlockHasher(*arguments)

    return make


@pytest.mark.slow
@pytest.mark.skipif(compiled_library() is None, reason="core/_hash_chain.c was not built")
@given(key=st.binary(min_size=1, max_size=64), block_size=st.integers(1, 100), tokens=token_lists, data=st.data())
@settings(max_examples=300, deadline=None)
def test_compiled_chain_is_that_of_hashlib_for_any_key_and_block_size(key, block_size, tokens, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.kv.hashing._MIN_COMPILED_BLOCKS", 1)
        patch.setattr("core.kv.hashing.compiled_library", lambda: None)
        expected = BlockHasher(key, block_size).hash_request_blocks(tokens)
        patch.undo()
        patch.setattr("core.kv.hashing._MIN_COMPILED_BLOCKS", 1)
        known = expected[: data.draw(st.integers(0, len(expected)))]
        BlockHasher(key, block_size).extend(known, tokens)
    assert known == expected


@needs_compiler
@pytest.mark.parametrize("choice", ["WITHOUT_VECTORS", "ONLY_VECTORS"])  # otherwise the faster on this CPU
def test_chain_is_the_same_with_vectors_and_without(load_from, hashlib_only, monkeypatch, tmp_path, choice):
    library = tmp_path / "chain.so"
    source = Path(hash_chain.__file__).with_name("_hash_chain.c")
    subprocess.run(["gcc", f"-D{choice}", "-Wall", "-Werror", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    monkeypatch.setattr("core.kv.hashing.compiled_library", lambda: load_from(compiled_library, library))
    tokens = array("i", range(1000))
    for block_size in (1, 16, 27, 28, 59, 60, 100):  # 27 end one chunk of 128 bytes with the 20 before them
        expected = hashlib_only(b"model", block_size).hash_request_blocks(tokens)
        assert BlockHasher(b"model", block_size).hash_request_blocks(tokens) == expected


@pytest.mark.parametrize("keys", [(), (("cache_salt", "tenant"),), (("mm", b"image", 20, 30),)])
def test_hashes_are_the_same_without_a_compiler(hashlib_only, keys):
    tokens = array("i", range(200))
    assert BlockHasher(b"model").hash_request_blocks(tokens, keys) == hashlib_only(b"model").hash_request_blocks(tokens, keys)
