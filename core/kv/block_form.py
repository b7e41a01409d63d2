"""The order of a block's bytes: which of them belong to a token, and which to a KV head.

    HND      [layers, 2, heads, tokens, head_dim]      this engine's pools
    NHD      [layers, 2, tokens, heads, head_dim]      likewise; a head's bytes are in no order of their own
    HNC      [layers, heads, tokens, 2 * head_dim]     vLLM's pools on devices; with MLA a head is the latent
    HNC-vec  [layers, heads, keys, values], keys [head_dim, tokens], values [tokens, head_dim]: vLLM's on CPUs
    HNC-...  [layers, heads, ...]                      packed for another instruction set: tokens cannot be told apart
    opaque   layers of different kinds, or blocks that consist of smaller ones: nothing can be told apart. vLLM's pools append a
             digest of what lies where: such blocks are read from those of the same digest only

A pool may keep the layers of a block apart: then a block consists of ``num_planes`` runs of bytes, one per layer. All blocks'
runs of a layer are one array, a plane. The bytes of a block are its runs, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.wire.kv import HNC_VEC, KVLayoutInfo

Bytes = npt.NDArray[np.uint8]


class HeadRange(NamedTuple):
    """``num_heads`` KV heads that two ranks share: from ``remote_first`` in a peer's blocks, from ``local_first`` in ours."""

    remote_first: int
    local_first: int
    num_heads: int


class _Part(NamedTuple):
    """``num_rows`` rows of a head, each with ``token_bytes`` of every token."""

    num_rows: int
    token_bytes: int


class BlockForm:
    """Views of the blocks of one layout.

    Raises: ValueError if blocks of this layout cannot have such an order.
    """

    def __init__(self, layout: KVLayoutInfo) -> None:
        self.layout = layout
        self.num_heads = layout.num_kv_heads if layout.splits_heads else 1
        has_pairs = layout.order in {"HND", "NHD"}  # keys and values of a layer are apart
        num_runs = layout.num_layers * (2 if has_pairs else 1) if layout.splits_layers else layout.num_planes
        token_bytes, rest = divmod(layout.block_bytes, num_runs * self.num_heads * layout.block_size)
        if rest or num_runs % layout.num_planes:
            raise ValueError(f"{layout} describes no block")
        self._num_runs = num_runs
        self._parts = [_Part(1, token_bytes)]
        if layout.order == HNC_VEC:
            element_bytes, rest = divmod(token_bytes, 2 * layout.head_dim)
            if rest:
                raise ValueError(f"{layout} describes no block of keys and values")
            self._parts = [_Part(layout.head_dim, element_bytes), _Part(1, layout.head_dim * element_bytes)]

    def views(self, planes: Bytes) -> list[npt.NDArray[np.uint8]]:
        """Return views of a block, each [planes, layers, heads, rows, tokens, bytes], which together are all of it.

        ``planes`` [num_planes, bytes] is the block, cut into one run or into as many as it has layers.
        """
        size = self.layout.block_size
        if not self.layout.splits_layers:
            return [planes.reshape(len(planes), 1, 1, 1, size, -1)]
        heads = planes.reshape(len(planes), self._num_runs // len(planes), self.num_heads, -1)
        views, start = [], 0
        for part in self._parts:
            end = start + part.num_rows * size * part.token_bytes
            rows = heads[..., start:end]
            views.append(rows.reshape(*heads.shape[:3], part.num_rows, size, part.token_bytes))
            start = end
        return views


def plane_rows(block_ids: Sequence[int], num_planes: int, num_blocks: int) -> Sequence[int]:
    """Return the runs of blocks, plane by plane, in a pool of ``num_blocks`` blocks."""
    if num_planes == 1:
        return block_ids
    return [plane * num_blocks + block_id for plane in range(num_planes) for block_id in block_ids]


def block_rows(block_ids: Sequence[int], num_planes: int) -> Sequence[int]:
    """Return the runs of contiguous blocks, in the order of ``plane_rows``."""
    if num_planes == 1:
        return block_ids
    return [block_id * num_planes + plane for plane in range(num_planes) for block_id in block_ids]
