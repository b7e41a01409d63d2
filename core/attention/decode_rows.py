"""CPU decode attention straight from the rows of the paged pool: no gather, no padding, no loop over pages.

Owns: the kernel for sequences with one query each, fp32. Does not know: prefill, batches or plans beyond its own index.

Seen as a matrix of rows of ``head_dim`` numbers, the pool is one table, and attention of a one-token query is two sparse
products with it, which torch has for the CPU:

    scores  = sampled_addmm     the dot products of a query head with the key rows that a CSR pattern names
    weights = softmax           in place; a sequence's heads are a dense [num_heads, num_visible] piece of the CSR values
    output  = embedding_bag     the weighted sum of the value rows that the same pattern names

Both take any rows in any order, so scattered, shared and partly filled pages, windows and both layouts cost nothing extra,
and a slot outside the pattern is never read. One pattern serves all layers: each layer passes the table from its own first
row on. At 16 sequences of 1024 tokens (9/3 heads of 64, block 64, one Zen 4 core, ms per layer): this kernel 2.5, SDPA on
KV that is already contiguous 2.6, gather + SDPA 4.0, page-major ``bmm`` 5.0, reading the bytes once 1.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from core.attention.base import AttentionSpec, BatchedSequence, KVLayout, PagedKVCache


@dataclass(slots=True)
class DecodeIndex:
    """The CSR pattern of one step and mask: one CSR row per (sequence, query head), its columns the visible pool rows.

    scores: sparse CSR ``[num_seqs * num_heads, pool rows]``; its values are a scratch buffer, overwritten by each layer.
    row_starts, columns: integer tensors, the pattern. weights: ``[nnz]``, the values of ``scores``.
    softmax_pieces: views of ``weights``, ``[num rows of equal length, length]``.
    """

    scores: Tensor
    row_starts: Tensor
    columns: Tensor
    weights: Tensor
    softmax_pieces: list[Tensor]


class DecodeRows:
    """The row kernel over one fp32 cache on the CPU."""

    def __init__(self, cache: PagedKVCache) -> None:
        hnd = cache.layout is KVLayout.HND
        rows = cache.pool.view(-1, cache.head_dim)
        rows_per_plane = cache.num_kv_heads * cache.block_size  # the keys, or the values, of one layer of one block
        self._rows_per_block = rows_per_plane * 2 * cache.num_layers
        # Every table is cut to the same length, because the CSR pattern states it.
        self._num_rows = rows.shape[0] - self._rows_per_block + rows_per_plane
        tables = [rows[plane * rows_per_plane :][: self._num_rows] for plane in range(2 * cache.num_layers)]
        self._keys = [table.t() for table in tables[0::2]]
        self._values = tables[1::2]
        self._slot_rows = np.arange(cache.block_size) * (1 if hnd else cache.num_kv_heads)
        self._head_rows = (np.arange(cache.num_kv_heads) * (cache.block_size if hnd else 1)).reshape(-1, 1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once per process that sparse CSR is in beta
            torch.zeros(1, 1).to_sparse_csr()

    def index(self, sequences: Sequence[BatchedSequence], spec: AttentionSpec) -> DecodeIndex:
        """Return the pattern of one-query sequences under the mask of ``spec``."""
        lengths = [sequence.seq_len - spec.first_visible(sequence.first_position) for sequence in sequences]
        num_entries = sum(lengths) * spec.num_heads
        index_type = np.int32 if max(num_entries, self._num_rows) <= np.iinfo(np.int32).max else np.int64
        row_starts = np.zeros(len(sequences) * spec.num_heads + 1, dtype=index_type)
        np.cumsum(np.repeat(lengths, spec.num_heads), out=row_starts[1:])
        columns = np.empty(num_entries, dtype=index_type)
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        starts = row_starts[:: spec.num_heads].tolist()
        for sequence, length, start, end in zip(sequences, lengths, starts, starts[1:], strict=False):
            np.add(
                self._visible_rows(sequence, length),
                self._head_rows,
                out=columns[start:end].reshape(*heads, length),
                casting="same_kind",
            )
        # sampled_addmm checks no index: a wrong column makes it read any address.
        assert 0 <= columns.min() <= columns.max() < self._num_rows, "a block id is outside the pool"
        weights = torch.zeros(len(columns))
        pattern = torch.from_numpy(row_starts), torch.from_numpy(columns)
        scores = torch.sparse_csr_tensor(*pattern, weights, size=(len(row_starts) - 1, self._num_rows), check_invariants=False)
        return DecodeIndex(scores, *pattern, weights, _equal_pieces(weights, lengths, spec.num_heads))

    def attend(self, layer: int, query: Tensor, scale: float, index: DecodeIndex) -> Tensor:
        """Return ``[num_seqs, num_heads, head_dim]`` for a query of that shape."""
        heads = query.reshape(-1, query.shape[-1])
        # In place, with beta 0: what the previous layer left in the values is finite unless its output was not.
        torch.sparse.sampled_addmm(index.scores, heads, self._keys[layer], beta=0.0, alpha=scale, out=index.scores)
        for piece in index.softmax_pieces:
            torch.softmax(piece, dim=-1, out=piece)
        output = torch.embedding_bag(
            self._values[layer],
            index.columns,
            index.row_starts,
            mode=0,  # sum
            per_sample_weights=index.weights,
            include_last_offset=True,
        )[0]
        return output.view(query.shape)

    def _visible_rows(self, sequence: BatchedSequence, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the first KV head's rows of the sequence's last ``length`` tokens."""
        block_size = len(self._slot_rows)
        first_page, skipped = divmod(sequence.seq_len - length, block_size)
        first_rows = sequence.block_ids[first_page:] * self._rows_per_block
        rows = (first_rows[:, None] + self._slot_rows).ravel()
        return rows[skipped : skipped + length]


def _equal_pieces(weights: Tensor, lengths: Sequence[int], num_heads: int) -> list[Tensor]:
    """Cut the values into ``[num_rows, length]`` views, one per run of sequences of equal length."""
    pieces, start = [], 0
    for length, run in groupby(lengths):
        num_rows = num_heads * len(list(run))
        pieces.append(weights[start : start + num_rows * length].view(num_rows, length))
        start += num_rows * length
    return pieces
