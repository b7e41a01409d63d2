"""CPU attention of one sequence at a time: gather its pages into a scratch buffer, then attend tile by tile.

Owns: the kernel for prefill chunks (and decode) where the compiled ones cannot be used. Does not know: plans of whole batches.

The gather is one ``index_select`` of contiguous chunks for keys and values together (HND: one chunk per head and page; NHD:
one per page), which runs at the speed of memcpy. Queries are taken ``TILE`` at a time against the keys that any of them sees,
heads that share a KV head folded into rows, so that nothing above the diagonal is computed but in the last tile's corner:

    queries | tile 0 | x \\ .  .  .        x: computed, unmasked     \\: the tile's mask
            | tile 1 | x  x \\ .  .        .: never touched

Scores are exponentiated directly, without subtracting each row's maximum, and divided by their sum after the second product:
half of softmax's time, 7 % of prefill attention. If sums are near the limits of fp32, the tile is computed with softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.base import AttentionSpec, BatchedSequence, KVLayout, PagedKVCache
from core.attention.sdpa import visible

_LOG2_E = 1.4426950408889634  # exp2 because it takes two fifths of the time of torch.exp on an AMD CPU
_LARGEST_TOTAL = 2.0**64  # with its inverse, far from the limits of fp32 at 2 ** 127 and 2 ** -126
TILE = 64  # queries; of 32, 64 and 128 the fastest with and without a cached prefix (benchmarks/attention.py)


@dataclass(slots=True)
class Tile:
    """Some queries of a sequence, the gathered keys that any of them sees, and the mask of the last of these keys.

    mask: additive fp32 ``[num_queries * group, M]`` on the last M keys, for ``group`` query heads per KV head; or None.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


@dataclass(slots=True)
class GatherIndex:
    """One sequence under one mask.

    rows: its query rows. chunks: int64, the pool chunks to gather. keys: the visible slots among the gathered ones.
    """

    rows: slice
    chunks: Tensor
    num_pages: int
    keys: slice
    tiles: list[Tile]
    scale: float


class GatherKernel:
    """Gather and attend over one cache on the CPU, any layout and floating dtype; products and sums in fp32."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._heads_first = cache.layout is KVLayout.HND
        tokens_per_chunk = cache.block_size if self._heads_first else cache.block_size * cache.num_kv_heads
        self._planes = 2 * cache.num_kv_heads if self._heads_first else 2
        chunks = cache.pool.view(-1, tokens_per_chunk * cache.head_dim)
        # As with the rows of ``PagedKVCache``: from the layer's first chunk on, one index serves all layers.
        self._chunks = [chunks[layer * self._planes :] for layer in range(cache.num_layers)]
        self._scratch = cache.pool.new_empty(0)
        self._scores = torch.empty(0, device=cache.device)

    def index(self, sequence: BatchedSequence, spec: AttentionSpec) -> GatherIndex:
        """Prepare one sequence."""
        first_position = sequence.first_position
        lowest = spec.first_visible(first_position)
        first_page, skipped = divmod(lowest, self._cache.block_size)
        block_ids = sequence.block_ids[first_page:]
        planes = np.arange(self._planes)[:, None]
        chunks = (block_ids * (self._cache.num_layers * self._planes) + planes).ravel()
        return GatherIndex(
            rows=slice(sequence.query_start, sequence.query_end),
            chunks=torch.from_numpy(chunks),
            num_pages=len(block_ids),
            keys=slice(skipped, skipped + sequence.seq_len - lowest),
            tiles=[
                self._tile(first_position + start, min(first_position + start + TILE, sequence.seq_len), sequence, spec)
                for start in range(0, sequence.num_queries, TILE)
            ],
            scale=spec.scale,
        )

    def _tile(self, first: int, end: int, sequence: BatchedSequence, spec: AttentionSpec) -> Tile:
        """Return the tile of the queries at positions [first, end)."""
        lowest = spec.first_visible(sequence.first_position)
        lowest_key = spec.first_visible(first)
        # Without a window only the keys at the queries' own positions are hidden from some of them.
        first_masked = first if spec.sliding_window is None and spec.chunk_size is None else lowest_key
        mask = None
        if end - first > 1:
            hidden = ~visible(torch.arange(first, end), torch.arange(first_masked, end), spec)
            group = spec.num_heads // spec.num_kv_heads
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat_interleave(group, 0)
        queries = slice(first - sequence.first_position, end - sequence.first_position)
        return Tile(queries, slice(lowest_key - lowest, end - lowest), mask)

    def attend(self, layer: int, query: Tensor, index: GatherIndex, output: Tensor) -> None:
        """Fill ``output`` ``[num_queries, num_heads, head_dim]`` for the sequence's queries of that shape."""
        key, value = self._gather(layer, index)
        if len(query) == 1:
            # Heads that share a KV head become its queries: faster than enable_gqa.
            folded = query.reshape(1, self._cache.num_kv_heads, -1, query.shape[-1])
            key, value = key[None].to(query.dtype), value[None].to(query.dtype)
            output.copy_(F.scaled_dot_product_attention(folded, key, value, scale=index.scale).view(query.shape))
            return
        by_kv_head = (len(query), len(key), -1, query.shape[-1])
        operands = _fold(query.float().view(by_kv_head), index.scale * _LOG2_E), key.float().transpose(1, 2), value.float()
        output = output.view(by_kv_head)
        totals = [self._attend_tile(operands, tile, output[tile.queries]) for tile in index.tiles]
        if not _is_exact(torch.cat(totals, dim=1)):
            for tile in index.tiles:
                self._attend_tile(operands, tile, output[tile.queries], shift=True)

    def _attend_tile(self, operands: tuple[Tensor, Tensor, Tensor], tile: Tile, output: Tensor, shift: bool = False) -> Tensor:
        """Fill ``output`` ``[num_queries, num_kv_heads, group, head_dim]``; return the sums used as divisors.

        ``operands``: the sequence's folded queries ``[num_kv_heads, rows, head_dim]``, keys ``[num_kv_heads, head_dim,
        num_keys]`` and values ``[num_kv_heads, num_keys, head_dim]``. ``shift``: subtract each row's maximum beforehand.
        """
        query, key, value = operands
        num_queries, num_kv_heads, group, _ = output.shape
        rows = query[:, tile.queries.start * group : tile.queries.stop * group]
        key = key[:, :, tile.keys]
        scores = self._score_buffer(num_kv_heads * num_queries * group * key.shape[2]).view(num_kv_heads, -1, key.shape[2])
        torch.bmm(rows, key, out=scores)
        if tile.mask is not None:
            scores[:, :, key.shape[2] - tile.mask.shape[1] :].add_(tile.mask)
        if shift:
            scores.sub_(scores.amax(-1, keepdim=True))
        torch.exp2(scores, out=scores)
        totals = scores.sum(-1, keepdim=True)
        attended = torch.bmm(scores, value[:, tile.keys]).div_(totals)
        output.copy_(attended.view(num_kv_heads, num_queries, group, -1).transpose(0, 1))
        return totals

    def _score_buffer(self, num_elements: int) -> Tensor:
        if self._scores.numel() < num_elements:
            self._scores = torch.empty(num_elements, device=self._cache.device)
        return self._scores[:num_elements]

    def _gather(self, layer: int, index: GatherIndex) -> Tensor:
        """Return the visible keys and values, ``[2, num_kv_heads, num_keys, head_dim]``, in the scratch buffer."""
        cache, source = self._cache, self._chunks[layer]
        num_elements = len(index.chunks) * source.shape[1]
        if self._scratch.numel() < num_elements:
            self._scratch = cache.pool.new_empty(num_elements)
        gathered = self._scratch[:num_elements].view(len(index.chunks), source.shape[1])
        torch.index_select(source, 0, index.chunks, out=gathered)
        num_slots = index.num_pages * cache.block_size
        if self._heads_first:
            pages = gathered.view(2, cache.num_kv_heads, num_slots, cache.head_dim)
        else:
            pages = gathered.view(2, num_slots, cache.num_kv_heads, cache.head_dim).transpose(1, 2)
        return pages[:, :, index.keys]


def _fold(query: Tensor, scale: float) -> Tensor:
    """Return ``query`` ``[num_queries, num_kv_heads, group, head_dim]`` times ``scale`` as rows of each KV head.

    ``[num_kv_heads, num_queries * group, head_dim]``, the heads of one token next to each other: a tile is a slice of rows.
    """
    num_queries, num_kv_heads, group, head_dim = query.shape
    folded = query.new_empty(num_kv_heads, num_queries, group, head_dim)
    return torch.mul(query.transpose(0, 1), scale, out=folded).flatten(1, 2)


def _is_exact(totals: Tensor) -> bool:
    """Return True if sums of unshifted exponentials lost nothing to overflow or underflow; false for NaN."""
    lowest, highest = torch.aminmax(totals)
    return lowest.item() > 1.0 / _LARGEST_TOTAL and highest.item() < _LARGEST_TOTAL
