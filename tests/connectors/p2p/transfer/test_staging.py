"""The staging area: rows with one owner each, and blocks that hold the same tokens after the conversion as before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.p2p.actions import PostRead, TokenCopy
from connectors.p2p.transfer.staging import StagedRows, StagingArea, map_staging_area
from connectors.p2p.transport.interface import PeerId
from connectors.testing.delayed_device import DelayedDevice
from core.digest import BlockDigester
from core.kv.block_form import BlockForm
from core.kv.pool_region import KVPoolRegion
from core.wire.kv import KVLayoutInfo

NUM_BLOCKS, LAYERS, HEADS, HEAD_DIM = 8, 3, 2, 4
PEER = PeerId("tcp://10.0.0.1:5600", 1)


def layout(order: str, block_size: int) -> KVLayoutInfo:
    return KVLayoutInfo(
        dtype="float32",
        order=order,
        block_size=block_size,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_bytes=LAYERS * 2 * HEADS * HEAD_DIM * 4 * block_size,
    )


def shape(order: str, block_size: int) -> tuple[int, ...]:
    inner = (HEADS, block_size) if order == "HND" else (block_size, HEADS)
    return (LAYERS, 2, *inner, HEAD_DIM)


def region(order: str, block_size: int, **changed: object) -> tuple[KVPoolRegion, np.ndarray]:
    info = layout(order, block_size)
    rows = np.full((NUM_BLOCKS, info.block_bytes), 0xEE, dtype=np.uint8)
    fields = {
        "base_address": rows.ctypes.data,
        "num_blocks": NUM_BLOCKS,
        "block_bytes": info.block_bytes,
        "buffer": rows.data.cast("B"),
    }
    return KVPoolRegion(layout=info, **(fields | changed)), rows.view(np.float32).reshape(NUM_BLOCKS, *shape(order, block_size))


def tokens_of(order: str, first: int, num_tokens: int) -> np.ndarray:
    """KV in the shape of a block; every element encodes layer, head, token and dimension."""
    axes = np.ogrid[:LAYERS, :2, :HEADS, first : first + num_tokens, :HEAD_DIM]
    values = sum(axis * 10.0**power for power, axis in enumerate(reversed(axes)))
    return values.astype(np.float32) if order == "HND" else values.astype(np.float32).swapaxes(2, 3)


def convert(area: StagingArea, staged: StagedRows, remote_rows, copies, layout: KVLayoutInfo):
    read = PostRead(1, PEER, remote_rows, (), tuple(copies))
    area.convert(staged, read, BlockForm(layout))


def stage(area: StagingArea, order: str, block_size: int, first_tokens: list[int]):
    """Let blocks of an owner land, as a transport does."""
    staged = area.take(len(first_tokens), layout(order, block_size).block_bytes)
    for row, first in zip(staged.rows, first_tokens, strict=True):
        content = np.ascontiguousarray(tokens_of(order, first, block_size)).tobytes()
        area.region.buffer[row * staged.row_bytes : (row + 1) * staged.row_bytes] = content
    return staged


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_short_blocks_become_one_long_one_with_zeros_at_its_end(order):
    pool, blocks = region(order, 64)
    area = map_staging_area(pool, 1 << 20)
    staged = stage(area, order, 16, [0, 16, 32])
    copies = [TokenCopy(row, 0, 5, 16 * index, 16) for index, row in enumerate((21, 22, 23))]
    convert(area, staged, (21, 22, 23), copies, layout(order, 16))
    assert np.array_equal(
        blocks[5],
        np.concatenate([tokens_of(order, 0, 48), 0 * tokens_of(order, 0, 16)], axis=blocks.ndim - 3 if order == "HND" else 2),
    )
    assert (blocks[4].view(np.uint8) == 0xEE).all()
    assert (blocks[6].view(np.uint8) == 0xEE).all()


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_long_block_is_cut(order):
    pool, blocks = region(order, 16)
    area = map_staging_area(pool, 1 << 20)
    staged = stage(area, order, 64, [0])
    convert(area, staged, (9,), [TokenCopy(9, 32, 7, 0, 16), TokenCopy(9, 48, 1, 0, 16)], layout(order, 64))
    assert np.array_equal(blocks[7], tokens_of(order, 32, 16))
    assert np.array_equal(blocks[1], tokens_of(order, 48, 16))


def test_pool_on_a_device_is_converted_through_its_copier():
    pool, blocks = region("HND", 32)
    area = map_staging_area(DelayedDevice(seed=3).holding(pool), 1 << 20)
    staged = stage(area, "HND", 16, [0, 16])
    convert(area, staged, (3, 4), [TokenCopy(3, 0, 6, 0, 16), TokenCopy(4, 0, 6, 16, 16)], layout("HND", 16))
    assert np.array_equal(blocks[6], tokens_of("HND", 0, 32))
    assert map_staging_area(replace(pool, buffer=None)) is None


def test_digests_are_those_of_the_owners_bytes():
    pool, _ = region("HND", 64)
    area = map_staging_area(pool, 1 << 20)
    staged = stage(area, "HND", 16, [0, 16])
    digester = BlockDigester(layout("HND", 16).block_bytes)
    wanted = tuple(digester.digest(np.frombuffer(tokens_of("HND", first, 16).tobytes(), np.uint8)) for first in (0, 16))
    assert area.digests(staged) == wanted


def test_rows_are_taken_until_none_fit_and_can_be_taken_again():
    area = map_staging_area(region("HND", 64)[0], 1000)
    first, second = area.take(3, 200), area.take(1, 300)
    assert (first.rows, second.rows) == ((0, 1, 2), (2,))
    assert area.take(1, 101) is None
    assert area.take(1, 100).rows == (9,)
    area.give_back(first)
    assert area.take(1, 600).rows == (0,)
    assert not area.holds(2, 501)
    assert area.num_taken_bytes == 1000


@given(requests=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 300), st.booleans()), max_size=40))
def test_no_byte_belongs_to_two_reads(requests):
    area = map_staging_area(region("HND", 16)[0], 4096)
    held = []
    for num_rows, row_bytes, gives_back in requests:
        if gives_back and held:
            area.give_back(held.pop(0))
        staged = area.take(num_rows, row_bytes)
        if staged is not None:
            assert len(staged.rows) == num_rows
            assert 0 <= staged.span[0] < staged.span[1] <= 4096
            assert all(staged.span[1] <= other.span[0] or other.span[1] <= staged.span[0] for other in held)
            held.append(staged)
    for staged in held:
        area.give_back(staged)
    assert area.num_taken_bytes == 0
