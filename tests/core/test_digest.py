"""The digest of a block: one definition, computed three ways, that no damage leaves as it was."""

import shutil
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.digest import ROW_WORDS, WORD_BYTES, BlockDigester, TensorDigester
from core.multilinear import CHUNK_ROWS, CompiledSums, NumpySums, compiled_library, fastest_sums

ROW_BYTES = ROW_WORDS * WORD_BYTES
SIZES = [
    WORD_BYTES,
    ROW_BYTES - WORD_BYTES,
    ROW_BYTES,
    ROW_BYTES + WORD_BYTES,
    2 * ROW_BYTES,
    CHUNK_ROWS * ROW_BYTES,
    (CHUNK_ROWS + 1) * ROW_BYTES + WORD_BYTES,
]
MASK = (1 << 64) - 1


def content(num_bytes, seed=0):
    return np.random.default_rng((num_bytes, seed)).integers(0, 256, num_bytes, np.uint8)


def digest(block):
    return BlockDigester(len(block)).digest(block)


def digest_by_torch(*blocks):
    words = torch.from_numpy(np.stack(blocks).view(np.int64))
    return TensorDigester(words).digests(range(len(blocks)))


def key(number):
    """SplitMix64, one number at a time."""
    z = ((number + 1) * 0x9E3779B97F4A7C15 + 0x6B76666572727931) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def digest_by_the_book(block):
    """The definition in plain numbers, without wrapping arithmetic or arrays."""
    words = np.frombuffer(block, "<u8").tolist()
    total = key(0) * len(block)
    for row, start in enumerate(range(0, len(words), ROW_WORDS)):
        terms = enumerate(words[start : start + ROW_WORDS])
        y = sum(key(1 + c) * word + key(1 + ROW_WORDS + c) * (word >> 32) for c, word in terms) & MASK
        first = 1 + 2 * ROW_WORDS + 2 * row
        total += key(first) * y + key(first + 1) * (y >> 32)
    return total & MASK


@pytest.fixture(params=[CompiledSums, NumpySums])
def sums(request):
    if request.param is CompiledSums and compiled_library() is None:
        pytest.skip("core/_multilinear.c was not built: there was no C compiler")
    return request.param


@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_way_follows_the_definition(num_bytes, sums):
    block = content(num_bytes)
    expected = digest_by_the_book(block.tobytes())
    assert BlockDigester(num_bytes, sums).digest(block) == expected
    assert digest_by_torch(block) == [expected]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_where_there_is_a_compiler_the_digest_is_compiled():
    assert fastest_sums() is CompiledSums, "core/_multilinear.c was not built: make install, or pip install --editable ."


def test_without_a_compiler_it_is_computed_with_numpy(monkeypatch):
    monkeypatch.setattr("core.multilinear.compiled_library", lambda: None)
    assert fastest_sums() is NumpySums
    assert digest(np.zeros(64, np.uint8)) == 0x8E4E79F2D6537640


@pytest.mark.parametrize("offset", range(1, WORD_BYTES))
def test_a_block_may_begin_at_any_byte(offset, sums):
    memory = content(2 * ROW_BYTES + 3 * WORD_BYTES)
    block = memory[offset : offset - WORD_BYTES]
    assert BlockDigester(len(block), sums).digest(block) == digest(block.copy())


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("offset", [0, 3])
def test_a_copy_has_all_bytes_and_the_same_digest(num_bytes, offset, sums):
    block, memory = content(num_bytes), np.full(num_bytes + 16, 7, np.uint8)
    target = memory[offset : offset + num_bytes]
    digester = BlockDigester(num_bytes, sums)
    assert digester.copy(block, target.data) == digester.digest(block)
    assert np.array_equal(target, block)
    assert (memory[:offset] == 7).all()
    assert (memory[offset + num_bytes :] == 7).all()


def test_a_digest_is_that_of_the_copy_while_another_thread_writes_the_block(sums):
    block, target = content(1 << 20), np.zeros(1 << 20, np.uint8)
    digester, stop = BlockDigester(len(block), sums), threading.Event()

    def write():
        while not stop.is_set():
            block[:] += np.uint8(1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            assert digester.copy(block, target) == digester.digest(target)
    finally:
        stop.set()
        writer.join()


def test_what_is_read_only_is_no_target(sums):
    target = np.zeros(64, np.uint8)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        BlockDigester(64, sums).copy(content(64), target)


def test_digests_are_the_same_in_every_process_and_release():
    """Workers of two releases compare them."""
    assert digest(np.zeros(64, np.uint8)) == 0x8E4E79F2D6537640
    assert digest(np.arange(64, dtype=np.uint8)) == 0xABCFA39D710C4FFE
    assert digest(np.arange(4104, dtype="<u4").view(np.uint8)) == 0x646A01117F880CED


@given(num_words=st.integers(1, 3 * ROW_WORDS), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_all_ways_agree_on_blocks_of_any_size(num_words, seed):
    blocks = [content(num_words * WORD_BYTES, (seed, number)) for number in range(3)]
    expected = digest_by_torch(*blocks)
    for sums in {NumpySums, fastest_sums()}:
        digester = BlockDigester(num_words * WORD_BYTES, sums)
        assert [digester.digest(block) for block in blocks] == expected


@pytest.mark.parametrize("scratch_blocks", [1, 2, 100])
def test_torch_digests_some_blocks_of_a_pool_however_many_fit_at_a_time(scratch_blocks, monkeypatch):
    num_bytes = ROW_BYTES + WORD_BYTES
    monkeypatch.setattr("core.digest.SCRATCH_BYTES", scratch_blocks * num_bytes)
    blocks = [content(num_bytes, seed) for seed in range(6)]
    digester = TensorDigester(torch.from_numpy(np.stack(blocks).view(np.int64)))
    assert digester.digests([4, 0, 5, 4, 1]) == [digest(blocks[index]) for index in (4, 0, 5, 4, 1)]
    assert digester.digests([]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", SIZES)
def test_cuda_computes_the_same(num_bytes):
    blocks = [content(num_bytes, seed) for seed in range(4)]
    words = torch.from_numpy(np.stack(blocks).view(np.int64))
    assert TensorDigester(words.cuda()).digests(range(4)) == digest_by_torch(*blocks)


@given(data=st.data(), num_bytes=st.sampled_from(SIZES[:5]))
@settings(max_examples=200, deadline=None)
def test_any_flipped_bit_changes_it(data, num_bytes):
    block = content(num_bytes)
    damaged = block.copy()
    bit = data.draw(st.integers(0, 8 * num_bytes - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    assert digest(damaged) != digest(block)


@pytest.mark.slow
@given(data=st.data(), bit=st.integers(0, 63), num_flips=st.integers(2, 40))
@settings(max_examples=200, deadline=None)
def test_the_same_bit_flipped_in_several_words_changes_it(data, bit, num_flips):
    """A broken line of a memory bus, or a changed sign. A sum of 64-bit products alone misses every second of the top bit's."""
    words = content(2 * ROW_BYTES).view(np.uint64)
    damaged = words.copy()
    positions = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=num_flips, max_size=num_flips, unique=True))
    damaged[positions] ^= np.uint64(1 << bit)
    assert digest(damaged.view(np.uint8)) != digest(words.view(np.uint8))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_swapped_words_change_it(data):
    words = content(3 * ROW_BYTES).view(np.uint64)
    first, second = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    damaged = words.copy()
    damaged[[first, second]] = damaged[[second, first]]
    assert digest(damaged.view(np.uint8)) != digest(words.view(np.uint8))


@pytest.mark.parametrize("num_bytes", [WORD_BYTES, 64, ROW_BYTES])
def test_swapped_parts_of_a_block_change_it(num_bytes):
    block = content(4 * ROW_BYTES)
    damaged = np.concatenate([block[num_bytes : 2 * num_bytes], block[:num_bytes], block[2 * num_bytes :]])
    assert digest(damaged) != digest(block)


def test_every_sign_changed_changes_it():
    values = np.random.default_rng(0).standard_normal(4 * ROW_WORDS).astype(np.float32)
    assert digest((-values).view(np.uint8)) != digest(values.view(np.uint8))


@pytest.mark.parametrize("num_cut", [1, 7, ROW_WORDS])
def test_a_truncated_block_has_another_digest_even_if_zeros_are_cut(num_cut):
    block = content(3 * ROW_BYTES)
    block[-num_cut * WORD_BYTES :] = 0
    assert digest(block[: -num_cut * WORD_BYTES]) != digest(block)


@pytest.mark.parametrize("num_zeroed", [WORD_BYTES, 4096])
def test_a_part_that_did_not_arrive_changes_it(num_zeroed):
    block = content(3 * ROW_BYTES)
    damaged = block.copy()
    damaged[-num_zeroed:] = 0
    assert digest(damaged) != digest(block)


def test_random_blocks_do_not_collide():
    digester = BlockDigester(256)
    blocks = np.random.default_rng(1).integers(0, 256, (5000, 256), np.uint8)
    assert len({digester.digest(block) for block in blocks}) == 5000


def test_a_digester_is_used_again_and_again(sums):
    digester, blocks = BlockDigester(3 * ROW_BYTES, sums), [content(3 * ROW_BYTES, seed) for seed in range(3)]
    assert [digester.digest(block) for block in blocks * 2] == [digest(block) for block in blocks * 2]


def test_takes_memory_that_is_only_lent(sums):
    block = content(ROW_BYTES)
    assert BlockDigester(ROW_BYTES, sums).digest(memoryview(block.tobytes())) == digest(block)


@pytest.mark.parametrize("num_bytes", [0, 7, ROW_BYTES + 4])
def test_blocks_of_no_whole_number_of_words_are_refused(num_bytes):
    with pytest.raises(ValueError, match=f"not of {num_bytes} bytes"):
        BlockDigester(num_bytes)


def test_a_block_of_another_size_is_refused():
    with pytest.raises(ValueError, match="16 bytes, not 8"):
        BlockDigester(8).digest(bytes(16))
