"""Token embeddings: rows of a table of their own, or of a packed output layer that has the same weights.

A model with tied embeddings needs its largest matrix twice, as a table and as a layer. A packed layer holds its weight in
oneDNN's blocked layout, from which a row can be gathered bit for bit, so the table may go: 113 MB of the demo model in fp32.

    [num_blocks, columns / v, block_rows, v]      v values of a row are adjacent: 1 in fp32, 2 in bf16

torch does not say which layout it has chosen: candidates are tried and compared with the weight. Where none is right the table
stays.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.log import event
from core.model.linear import Linear, PackedLinear

_BLOCK_ROWS = (64, 48, 32, 16)
_NUM_COMPARED = 512  # rows; a layout that is right for these is right for all

logger = logging.getLogger(__name__)


class Embedding(Protocol):
    """Returns the rows ``[T, hidden_size]`` of token ids ``[T]``, int32 or int64, all below ``vocab_size``."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows."""
        ...


class TableEmbedding:
    """Rows of a table ``[vocab_size, hidden_size]``."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.dtype = table.dtype
        self.device = table.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows."""
        return F.embedding(token_ids, self._table)


class PackedEmbedding:
    """Rows of a packed layer's weight; ``memory`` ``[num_blocks, columns / v, block_rows, v]`` belongs to ``layer``."""

    def __init__(self, layer: PackedLinear, memory: Tensor) -> None:
        self._layer = layer  # keeps ``memory`` alive: it has no owner of its own
        self._memory = memory
        self._block_rows = memory.shape[2]
        self.dtype = memory.dtype
        self.device = memory.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows."""
        ids = token_ids.long()
        return self._memory[ids // self._block_rows, :, ids % self._block_rows].flatten(1)


def tied_embedding(table: Tensor, head: Linear) -> Embedding:
    """Return the embeddings of ``table`` ``[vocab_size, hidden_size]``, out of ``head``, made of the same weights, if possible.

    The caller may drop ``table`` afterwards.
    """
    if isinstance(head, PackedLinear):
        for block_rows in _BLOCK_ROWS:
            packed = _packed(table, head, block_rows)
            if packed is not None:
                return packed
        logger.info(event("embedding_kept", shape=tuple(table.shape), reason="unknown layout of the packed output layer"))
    return TableEmbedding(table)


def _packed(table: Tensor, head: PackedLinear, block_rows: int) -> PackedEmbedding | None:
    """Return the embeddings by this layout if its size fits and its rows are those of the table."""
    num_rows, columns = table.shape
    num_blocks, adjacent = -(-num_rows // block_rows), 4 // table.itemsize
    memory = head.packed_memory()
    if memory is None or columns % adjacent or memory.numel() != num_blocks * block_rows * columns:
        return None
    embedding = PackedEmbedding(head, memory.view(num_blocks, columns // adjacent, block_rows, adjacent))
    some = torch.linspace(0, num_rows - 1, min(num_rows, _NUM_COMPARED), dtype=torch.float64).long()
    return embedding if torch.equal(embedding(some), table[some]) else None
