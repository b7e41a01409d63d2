"""Rows of the seal table: what is written is what is read, and every difference is named."""

import ctypes
import dataclasses
import os
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kv.seals import (
    BROKEN,
    SEAL_BYTES,
    ExpectedRows,
    ExpectedSeal,
    Seal,
    SealTable,
    decode_seal,
    each_by_itself,
    encode_seal,
    find_mismatch,
    layout_fingerprint,
    map_seal_memory,
    num_landing_rows,
    seal_memory_bytes,
)
from core.wire.kv import KVLayoutInfo

INCARNATION = 0xFEDC_BA98_7654_3210
LAYOUT_VERSION = 0x0123_4567_89AB_CDEF
HASH = bytes(range(16))
EXPECTED = ExpectedSeal(generation=3, group_id=1, block_hash=HASH, num_tokens=64)
LAYOUT = KVLayoutInfo(
    dtype="bfloat16", order="HND", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64, block_bytes=64 * 23040
)


def make_table(num_blocks=4, digest_block=None):
    return SealTable(map_seal_memory(num_blocks), INCARNATION, LAYOUT_VERSION, digest_block and each_by_itself(digest_block))


@pytest.fixture
def table():
    return make_table()


def test_a_sealed_row_reads_as_expected(table):
    table.seal(2, EXPECTED)
    assert decode_seal(table.row(2)) == Seal(INCARNATION, 3, 1, HASH, 64, LAYOUT_VERSION, None)
    assert find_mismatch(table.row(2), EXPECTED, INCARNATION, LAYOUT_VERSION) is None
    assert table.sealed_generation(2) == 3


def test_rows_have_the_documented_bytes(table):
    """Other implementations and older workers read them."""
    table.seal(2, EXPECTED)
    fields = struct.pack("<4sHHQ16sQIIQQ", b"KFVL", 1, 1, INCARNATION, HASH, 0, 64, 0, LAYOUT_VERSION, 3)
    assert table.row(2) == fields
    assert len(fields) == SEAL_BYTES == 64


def test_sealing_one_block_touches_no_other_row(table):
    table.seal(1, EXPECTED)
    assert [decode_seal(table.row(row)) is None for row in range(table.num_rows)] == [True, False, *[True] * 7]


@pytest.mark.parametrize("row", [bytes(SEAL_BYTES), b"\xff" * SEAL_BYTES])
def test_memory_that_was_never_sealed_is_no_seal(row):
    assert decode_seal(row) is None
    assert "no seal" in find_mismatch(row, EXPECTED, INCARNATION, LAYOUT_VERSION)


def test_breaking_takes_seals_off_and_only_those(table):
    for block_id in range(4):
        table.seal(block_id, EXPECTED)
    table.break_seals([1, 3])
    assert [table.sealed_generation(block_id) for block_id in range(4)] == [3, BROKEN, 3, BROKEN]
    assert decode_seal(table.row(1)) is None
    table.seal(1, dataclasses.replace(EXPECTED, generation=4))
    assert table.sealed_generation(1) == 4


def test_breaking_is_one_store_of_the_generation(table):
    table.seal(1, EXPECTED)
    before = table.row(1)
    table.break_seals([1])
    assert table.row(1) == before[:-8] + bytes(8)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"generation": 4}, "generation 3 instead of 4"),
        ({"group_id": 0}, "group_id 1 instead of 0"),
        ({"block_hash": bytes(16)}, f"block_hash {HASH.hex()} instead of {bytes(16).hex()}"),
        ({"num_tokens": 63}, "num_tokens 64 instead of 63"),
    ],
)
def test_a_difference_is_named_with_both_values(table, changed, named):
    table.seal(0, EXPECTED)
    assert find_mismatch(table.row(0), dataclasses.replace(EXPECTED, **changed), INCARNATION, LAYOUT_VERSION) == named


def test_a_handoff_that_names_no_generation_is_refused(table):
    """A broken row would be what it names."""
    table.seal(0, EXPECTED)
    table.break_seals([0])
    assert find_mismatch(table.row(0), dataclasses.replace(EXPECTED, generation=BROKEN), INCARNATION, LAYOUT_VERSION)


def test_another_incarnation_and_another_layout_are_named_with_both_values(table):
    table.seal(0, EXPECTED)
    assert find_mismatch(table.row(0), EXPECTED, 1, LAYOUT_VERSION) == f"incarnation {INCARNATION:016x} instead of {1:016x}"
    assert find_mismatch(table.row(0), EXPECTED, INCARNATION, 2) == f"layout {LAYOUT_VERSION:016x} instead of {2:016x}"


@given(st.integers(0, 8 * SEAL_BYTES - 1))
def test_no_flipped_bit_of_the_identity_passes(bit):
    table = make_table()
    table.seal(0, EXPECTED)
    row = bytearray(table.row(0))
    row[bit // 8] ^= 1 << bit % 8
    is_of_the_digest = 32 <= bit // 8 < 40 or 44 <= bit // 8 < 48  # checked against the bytes, not here
    assert (find_mismatch(bytes(row), EXPECTED, INCARNATION, LAYOUT_VERSION) is None) == is_of_the_digest


# ---- several rows at once


OTHER = ExpectedSeal(generation=9, group_id=0, block_hash=HASH[::-1], num_tokens=7)


def expected_rows(*seals):
    return ExpectedRows(seals, INCARNATION, LAYOUT_VERSION)


@given(st.integers(0, 2 * 8 * SEAL_BYTES - 1))
def test_rows_are_equal_if_none_has_a_mismatch(bit):
    table = make_table()
    table.seal_all([(0, EXPECTED), (3, OTHER)])
    rows = bytearray(table.rows([0, 3]))
    assert expected_rows(EXPECTED, OTHER).equal(bytes(rows))
    rows[bit // 8] ^= 1 << bit % 8
    each = zip((rows[:SEAL_BYTES], rows[SEAL_BYTES:]), (EXPECTED, OTHER), strict=True)
    mismatches = [find_mismatch(bytes(row), seal, INCARNATION, LAYOUT_VERSION) for row, seal in each]
    assert expected_rows(EXPECTED, OTHER).equal(bytes(rows)) == (mismatches == [None, None])


def test_rows_in_another_order_are_not_equal(table):
    table.seal_all([(0, EXPECTED), (3, OTHER)])
    assert not expected_rows(EXPECTED, OTHER).equal(table.rows([3, 0]))
    assert not expected_rows(EXPECTED, OTHER).equal(table.rows([0]))


def test_rows_of_another_incarnation_or_layout_are_not_equal(table):
    table.seal(0, EXPECTED)
    assert not ExpectedRows([EXPECTED], 1, LAYOUT_VERSION).equal(table.row(0))
    assert not ExpectedRows([EXPECTED], INCARNATION, 1).equal(table.row(0))


def test_no_row_equals_one_without_a_generation(table):
    table.seal(0, EXPECTED)
    table.break_seals([0])
    assert not expected_rows(dataclasses.replace(EXPECTED, generation=BROKEN)).equal(table.row(0))


def test_digests_are_compared_where_they_are_given():
    table = make_table(digest_block=lambda block_id: block_id)
    table.seal_all([(0, EXPECTED), (3, OTHER)])
    expected, rows = expected_rows(EXPECTED, OTHER), table.rows([0, 3])
    assert expected.equal(rows)
    assert expected.equal(rows, [0, 3])
    assert not expected.equal(rows, [0, 4])
    assert not expected.equal(rows, [3, 0])


def test_a_row_without_a_digest_has_none_that_is_equal(table):
    table.seal(0, EXPECTED)
    assert expected_rows(EXPECTED).equal(table.row(0))
    assert not expected_rows(EXPECTED).equal(table.row(0), [0])


def test_a_seal_says_whether_its_owner_made_a_digest():
    table = make_table(digest_block=lambda block_id: 1000 + block_id)
    assert table.has_digests
    table.seal(3, EXPECTED)
    assert decode_seal(table.row(3)).digest == 1003
    assert not make_table().has_digests


def test_blocks_sealed_together_are_digested_together_after_broken_seals():
    seen = []

    def digest_blocks(block_ids):
        seen.append((list(block_ids), [table.sealed_generation(block_id) for block_id in block_ids]))
        return [1000 + block_id for block_id in block_ids]

    table = SealTable(map_seal_memory(4), INCARNATION, LAYOUT_VERSION, digest_blocks)
    table.seal(2, EXPECTED)
    table.seal_all([(2, EXPECTED), (0, EXPECTED)])
    assert seen == [([2], [BROKEN]), ([2, 0], [BROKEN, BROKEN])]
    assert [decode_seal(table.row(block_id)).digest for block_id in (0, 2)] == [1000, 1002]
    table.seal_all([])
    assert len(seen) == 2


def test_a_digest_of_zero_is_a_digest():
    table = make_table(digest_block=lambda block_id: 0)
    table.seal(3, EXPECTED)
    assert decode_seal(table.row(3)).digest == 0


def test_landing_rows_lie_after_the_own_rows_and_are_cleared_apart(table):
    assert table.landing_rows(range(4), 4) == [4, 5, 6, 7]
    assert (table.num_rows, table.probe_row) == (9, 8)
    table.seal(2, EXPECTED)
    table.buffer[6 * SEAL_BYTES : 7 * SEAL_BYTES] = table.row(2)
    assert decode_seal(table.row(6)) == decode_seal(table.row(2))
    table.clear_landing(table.landing_rows([2], 1))
    assert decode_seal(table.row(6)) is None
    assert decode_seal(table.row(2)) is not None


def test_several_seals_land_beside_one_block_if_the_peers_blocks_are_shorter():
    table = SealTable(map_seal_memory(4, num_landing=num_landing_rows(48)), INCARNATION, LAYOUT_VERSION)
    assert (table.num_rows, table.probe_row) == (17, 16)
    assert table.landing_rows([1, 3], 5) == [5, 7, 9, 11, 13]
    rows = [row for block_id in range(4) for row in table.landing_rows([block_id], 3)]
    assert sorted(rows) == list(range(4, 16)), "no row belongs to two blocks"
    with pytest.raises(AssertionError, match="cannot land"):
        table.landing_rows([1], 4)


def test_rows_in_a_memory_file_are_seen_by_readers_of_the_file():
    memory_fd = os.memfd_create("kvferry-test-seals")
    try:
        os.ftruncate(memory_fd, seal_memory_bytes(4))
        table = SealTable(map_seal_memory(4, memory_fd), INCARNATION, LAYOUT_VERSION)
        table.seal(1, EXPECTED)
        assert os.pread(memory_fd, SEAL_BYTES, SEAL_BYTES) == table.row(1)
        assert table.memory.memory_fd == memory_fd
    finally:
        os.close(memory_fd)


def test_rows_lie_at_the_address_that_is_reported(table):
    table.seal(1, EXPECTED)
    assert ctypes.string_at(table.memory.base_address + SEAL_BYTES, SEAL_BYTES) == table.row(1)
    assert table.memory.base_address % SEAL_BYTES == 0


def test_layouts_that_differ_have_different_fingerprints():
    changed = {
        "dtype": "float16",
        "order": "NHD",
        "block_size": 32,
        "num_layers": 29,
        "num_kv_heads": 1,
        "head_dim": 32,
        "block_bytes": 1,
        "num_groups": 2,
    }
    fingerprints = {layout_fingerprint(msgspec.structs.replace(LAYOUT, **{name: value})) for name, value in changed.items()}
    assert len(fingerprints) == len(changed)
    assert layout_fingerprint(LAYOUT) not in fingerprints


def test_a_fingerprint_is_the_same_in_every_process():
    assert layout_fingerprint(LAYOUT) == 221868591691210058


@pytest.mark.parametrize("digest", [None, 0, 2**64 - 1])
def test_a_row_for_a_store_equals_a_row_of_a_table(digest):
    seal = Seal(2**64 - 1, 7, 3, bytes(range(16)), 64, 12345, digest)
    assert decode_seal(encode_seal(seal)) == seal
