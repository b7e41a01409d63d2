"""How embeddings are cut, named and digested."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.ec.chunks import CHUNK_EMBEDS, ChunkLayout, RowsDigester, num_chunks, rows_in_chunk
from core.digest import BlockDigester
from core.ec_connector import EmbeddingsLayout
from core.errors import CorruptBlock, LayoutMismatch
from core.wire.media import MMFeature

LAYOUT = ChunkLayout(EmbeddingsLayout(8, "float32"), b"model")
NAME = bytes(16)


def feature(**changed):
    values = {"identifier": NAME, "offset": 0, "length": 70, "num_embeds": 65, "media_index": 0} | changed
    return MMFeature(**values)


@given(st.integers(1, 10_000))
def test_chunks_hold_every_row_once(num_embeds):
    rows = [rows_in_chunk(num_embeds, index) for index in range(num_chunks(num_embeds))]
    assert sum(rows) == num_embeds
    assert rows[:-1] == [CHUNK_EMBEDS] * (len(rows) - 1)
    assert 1 <= rows[-1] <= CHUNK_EMBEDS


def test_hashes_differ_by_item_shape_place_and_model():
    other_model = ChunkLayout(LAYOUT.embeddings, b"another")
    hashes = [
        *LAYOUT.chunk_hashes(NAME, 200),
        *LAYOUT.chunk_hashes(NAME, 199),
        *LAYOUT.chunk_hashes(bytes(15) + b"\1", 200),
        *other_model.chunk_hashes(NAME, 200),
    ]
    assert len(set(hashes)) == len(hashes) == 16
    assert {len(block_hash) for block_hash in hashes} == {16}


@pytest.mark.parametrize("other", [EmbeddingsLayout(4, "float32"), EmbeddingsLayout(8, "int32")])
def test_layouts_of_other_embeddings_differ(other):
    assert ChunkLayout(other, b"model").as_blocks != LAYOUT.as_blocks


def test_seal_of_a_feature_is_accepted():
    LAYOUT.check_seal(LAYOUT.seal(NAME, 65, digest=1), feature())


@pytest.mark.parametrize(
    ("seal", "message"),
    [
        (LAYOUT.seal(bytes(15) + b"\1", 65, 1), f"identifier {'00' * 15}01 instead of {'00' * 16}"),
        (LAYOUT.seal(NAME, 64, 1), "num_embeds 64 instead of 65"),
        (ChunkLayout(EmbeddingsLayout(9, "float32"), b"m").seal(NAME, 65, 1), "hidden_size 9 instead of 8"),
        (ChunkLayout(EmbeddingsLayout(8, "bfloat16"), b"m").seal(NAME, 65, 1), "dtype bfloat16 instead of float32"),
    ],
)
def test_seal_of_something_else_is_refused_with_both_values(seal, message):
    with pytest.raises(LayoutMismatch, match=message):
        LAYOUT.check_seal(seal, feature())


@given(st.binary(min_size=1, max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_any_changed_byte_changes_the_digest(content, place, change):
    digester, place = RowsDigester(), place % len(content)
    digest = digester.digest(memoryview(content))
    changed = bytearray(content)
    changed[place] ^= change
    assert digester.digest(memoryview(changed)) != digest
    with pytest.raises(CorruptBlock):
        digester.check(memoryview(changed), LAYOUT.seal(NAME, 1, digest))


def test_digest_is_that_of_the_rows_filled_up_with_zeros():
    content = bytes(range(30))
    assert RowsDigester().digest(memoryview(content)) == BlockDigester(32).digest(memoryview(content + bytes(2)))


def test_sizes_that_come_again_cost_no_memory():
    digester = RowsDigester()
    for num_words in range(1, 40):
        digester.digest(memoryview(np.zeros(num_words, dtype=np.uint64)).cast("B"))
    assert len(digester._digesters) <= 8
