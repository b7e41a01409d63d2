"""Conversion of blocks that differ in tokens, KV heads and planes: each token of each head ends at its place, and no other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.p2p.actions import PostRead, TokenCopy
from connectors.p2p.transfer.staging import map_staging_area
from connectors.p2p.transport.interface import PeerId
from connectors.testing.delayed_device import DelayedDevice
from core.errors import LayoutMismatch
from core.kv.block_form import BlockForm, HeadRange, block_rows, plane_rows
from core.kv.pool_region import KVPoolRegion
from core.wire.kv import HNC, HNC_VEC, KVLayoutInfo

LAYERS, HEADS, HEAD_DIM, NUM_BLOCKS = 3, 4, 2, 5
PEER = PeerId("tcp://10.0.0.1:5600", 1)
UNTOUCHED = -1.0


@dataclass(frozen=True)
class Rank:
    """The pool of a rank: heads from ``first_head``, blocks of ``block_size`` tokens."""

    order: str
    first_head: int
    num_heads: int
    block_size: int
    num_planes: int = 1

    @property
    def layout(self) -> KVLayoutInfo:
        return KVLayoutInfo(
            dtype="auto:float32",
            order=self.order,
            block_size=self.block_size,
            num_layers=LAYERS,
            num_kv_heads=self.num_heads,
            head_dim=HEAD_DIM,
            block_bytes=LAYERS * self.num_heads * self.block_size * 2 * HEAD_DIM * 4,
            num_planes=self.num_planes,
        )

    def pack(self, kv: np.ndarray) -> np.ndarray:
        """Return the bytes of a block that holds ``kv`` [layers, heads, tokens, 2, head_dim], in planes."""
        heads = kv[:, self.first_head : self.first_head + self.num_heads]
        if self.order == HNC_VEC:
            keys, values = heads[..., 0, :].swapaxes(2, 3), heads[..., 1, :]
            heads = np.concatenate([keys.reshape(*keys.shape[:2], -1), values.reshape(*values.shape[:2], -1)], axis=2)
        return np.ascontiguousarray(heads).reshape(self.num_planes, -1).view(np.uint8)

    def pool(self) -> tuple[KVPoolRegion, np.ndarray]:
        """Return a pool, and its blocks [planes, blocks, bytes]."""
        untouched = self.pack(np.full((LAYERS, HEADS, self.block_size, 2, HEAD_DIM), UNTOUCHED, dtype=np.float32))
        blocks = np.repeat(untouched[:, None], NUM_BLOCKS, axis=1)
        info = self.layout
        region = KVPoolRegion(blocks.ctypes.data, NUM_BLOCKS, info.block_bytes, info, buffer=blocks.data.cast("B"))
        return region, blocks


def kv_of(first: int, num_tokens: int) -> np.ndarray:
    """Return KV whose every element encodes layer, head, token, key or value, and dimension."""
    axes = np.ogrid[:LAYERS, :HEADS, first : first + num_tokens, :2, :HEAD_DIM]
    weights = (10_000.0, 1_000.0, 4.0, 2.0, 1.0)
    return np.asarray(sum(axis * weight for axis, weight in zip(axes, weights, strict=True)), dtype=np.float32)


def shared_heads(theirs: Rank, ours: Rank) -> HeadRange:
    first = max(theirs.first_head, ours.first_head)
    end = min(theirs.first_head + theirs.num_heads, ours.first_head + ours.num_heads)
    return HeadRange(first - theirs.first_head, first - ours.first_head, end - first)


def load(theirs: Rank, area, tokens, local_row: int) -> None:
    """Let the peer's blocks that hold tokens 0 to ``tokens`` land, and fill one of our blocks from them."""
    ours, size = area.pool.layout.block_size, theirs.block_size
    num_blocks = -(-tokens // size)
    staged = area.take(num_blocks, theirs.layout.block_bytes)
    for index, row in enumerate(staged.rows):
        content = theirs.pack(kv_of(index * size, size)).tobytes()
        area.region.buffer[row * staged.row_bytes : (row + 1) * staged.row_bytes] = content
    copies = tuple(
        TokenCopy(20 + index, 0, local_row, index * size, min(size, ours - index * size, tokens - index * size))
        for index in range(num_blocks)
    )
    reader = Rank(HNC, *OURS_HEADS[area.pool.layout.num_kv_heads], ours)
    read = PostRead(1, PEER, tuple(range(20, 20 + num_blocks)), (local_row,), copies, heads=shared_heads(theirs, reader))
    area.convert(staged, read, BlockForm(theirs.layout))
    area.give_back(staged)


OURS_HEADS = {4: (0, 4), 2: (2, 2), 1: (3, 1)}  # of a rank with so many heads: which


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from([HNC, HNC_VEC]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 4), (1, 4), (2, 2)]),
    sizes=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    planes=st.sampled_from([(1, 1), (1, LAYERS), (LAYERS, 1), (LAYERS, LAYERS)]),
    is_on_device=st.booleans(),
)
def test_each_token_of_each_head_ends_at_its_place(order, heads, sizes, planes, is_on_device):
    (their_heads, our_heads), (their_size, our_size), (their_planes, our_planes) = heads, sizes, planes
    ours = Rank(order, *OURS_HEADS[our_heads], our_size, our_planes)
    pool, blocks = ours.pool()
    area = map_staging_area(DelayedDevice(seed=5).holding(pool) if is_on_device else pool, 1 << 20)
    for first_head in range(0, HEADS, their_heads):  # every rank of the peer that has heads of ours
        theirs = Rank(order, first_head, their_heads, their_size, their_planes)
        if shared_heads(theirs, ours).num_heads > 0:
            load(theirs, area, our_size, local_row=3)
    assert np.array_equal(blocks[:, 3], ours.pack(kv_of(0, our_size)))
    _, untouched = ours.pool()
    assert np.array_equal(np.delete(blocks, 3, axis=1), np.delete(untouched, 3, axis=1)), "another block was written"


def test_slots_without_tokens_become_zero_in_the_copied_heads_only():
    ours = Rank(HNC, 0, 4, 32)
    pool, blocks = ours.pool()
    load(Rank(HNC, 2, 2, 16), map_staging_area(pool, 1 << 20), 16, local_row=1)
    expected = np.full((LAYERS, HEADS, 32, 2, HEAD_DIM), UNTOUCHED, dtype=np.float32)
    expected[:, 2:, :16] = kv_of(0, 16)[:, 2:]
    expected[:, 2:, 16:] = 0
    assert np.array_equal(blocks[:, 1], ours.pack(expected))


@pytest.mark.parametrize(
    ("num_heads", "heads"),
    [
        (1, None),  # would be copied into each of our four heads
        (2, None),
        (2, HeadRange(1, 0, 2)),  # of which the peer has only the first
        (4, HeadRange(0, 3, 2)),
    ],
)
def test_heads_that_one_side_lacks_are_refused_and_nothing_is_written(num_heads, heads):
    ours, theirs = Rank(HNC, 0, 4, 32), Rank(HNC, 0, num_heads, 16)
    pool, blocks = ours.pool()
    before = blocks.copy()
    area = map_staging_area(pool, 1 << 20)
    staged = area.take(1, theirs.layout.block_bytes)
    read = PostRead(1, PEER, (20,), (3,), (TokenCopy(20, 0, 3, 0, 16),), heads=heads)
    with pytest.raises(LayoutMismatch, match=rf"{num_heads} KV heads in a block at the peer, 4 in ours"):
        area.convert(staged, read, BlockForm(theirs.layout))
    assert np.array_equal(blocks, before)


def test_rows_of_blocks_are_plane_by_plane():
    assert plane_rows((7,), 1, 10) == (7,)
    assert plane_rows((1, 4), 3, 10) == [1, 4, 11, 14, 21, 24]
    assert block_rows((1, 4), 3) == [3, 12, 4, 13, 5, 14]
    assert block_rows((1, 4), 1) == (1, 4)


@pytest.mark.parametrize(
    "changed",
    [{"block_bytes": 1000}, {"num_planes": 2}, {"order": HNC_VEC, "head_dim": 1000}],
)
def test_layouts_that_describe_no_block_are_refused(changed):
    fields = {name: getattr(Rank(HNC, 0, 4, 16).layout, name) for name in KVLayoutInfo.__struct_fields__}
    with pytest.raises(ValueError, match="describes no block"):
        BlockForm(KVLayoutInfo(**(fields | changed)))


@pytest.mark.parametrize("order", ["opaque", "opaque-c0ffee"])
def test_blocks_of_which_nothing_is_known_are_copied_whole_from_planes_and_into_them(order):
    forms = [BlockForm(Rank(order, 0, HEADS, 16, num_planes).layout) for num_planes in (1, LAYERS)]
    block = np.arange(forms[0].layout.block_bytes, dtype=np.uint8)
    for num_planes in (1, LAYERS):
        found = [form.views(block.reshape(num_planes, -1)) for form in forms]
        assert [len(views) for views in found] == [1, 1]
        assert np.array_equal(found[0][0], found[1][0])
        assert np.array_equal(found[0][0].reshape(-1), block)
