"""The contract between the decoder and an attention backend, and the paged KV cache they share.

Owns: the block-major pool's index arithmetic, the per-step batch description, and the write of new keys and values.
Does not know: models, requests, schedulers, or the owner of the pool's memory. ``plan`` comes once per step and KV cache
group, ``write_kv`` and then ``attend`` once per layer.

A block holds all layers of its group as one contiguous run, so that it moves with one descriptor or one memcpy:

    HND pool  [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    NHD pool  [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]      2 = key, value

* Block 0 is the null block: padding rows write there, and table entries that no query can see point there.
* A slot that no query of a sequence sees never reaches its output, whatever bits it holds. Giving it weight 0 is not enough
  (0 * NaN is NaN): reused blocks hold stale bytes, and a failed transfer may have left anything in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.torch_kernels import upload
from core.errors import ConfigError

_POOL_DIMS = 6


class KVLayout(StrEnum):
    """Order of the axes inside one layer's keys of one block: heads first or tokens first."""

    HND = "HND"
    NHD = "NHD"


class PagedKVCache:
    """One worker's block-major KV pool, seen layer by layer.

    ``pool`` is contiguous, six-dimensional (see the module's diagram) and owned by the engine; all views alias it.
    Several KV cache groups may share it: each group's tables name its own blocks, and ``layer`` counts within a group.

    Raises: ConfigError if the pool is not contiguous or has another rank.
    """

    def __init__(self, pool: Tensor, layout: KVLayout) -> None:
        if pool.dim() != _POOL_DIMS or pool.shape[2] != 2 or not pool.is_contiguous():
            raise ConfigError(f"KV pool must be contiguous [blocks, layers, 2, _, _, head_dim]: {tuple(pool.shape)}")
        self.pool = pool
        self.layout = layout
        self.num_blocks = pool.shape[0]
        self.num_layers = pool.shape[1]
        heads_axis, tokens_axis = (3, 4) if layout is KVLayout.HND else (4, 3)
        self.num_kv_heads = pool.shape[heads_axis]
        self.block_size = pool.shape[tokens_axis]
        self.head_dim = pool.shape[5]
        row_width = self.head_dim if layout is KVLayout.HND else self.num_kv_heads * self.head_dim
        flat = pool.view(-1, row_width)
        rows_per_layer = flat.shape[0] // (self.num_blocks * self.num_layers)
        # Each layer's view starts at its own first row of block 0, so that one row index serves all layers.
        self._layer_rows = [flat[layer * rows_per_layer :] for layer in range(self.num_layers)]
        self._rows_per_block = rows_per_layer * self.num_layers
        num_planes = 2 * self.num_kv_heads if layout is KVLayout.HND else 2
        self._plane_rows = np.arange(num_planes) * self.block_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the pool."""
        return self.pool.dtype

    @property
    def device(self) -> torch.device:
        """Device that holds the pool."""
        return self.pool.device

    def key(self, layer: int) -> Tensor:
        """Return the layer's keys as a strided view.

        HND ``[num_blocks, num_kv_heads, block_size, head_dim]``, NHD ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        """
        return self.pool[:, layer, 0]

    def value(self, layer: int) -> Tensor:
        """Return the layer's values as a strided view of the same shape as ``key``."""
        return self.pool[:, layer, 1]

    def layer_rows(self, layer: int) -> Tensor:
        """Return the pool as rows from the layer's first row on; ``rows_of_slots`` indexes it.

        HND ``[rows, head_dim]``, NHD ``[rows, num_kv_heads * head_dim]``.
        """
        return self._layer_rows[layer]

    def rows_of_slots(self, slots: npt.NDArray[np.int64]) -> Tensor:
        """Return the rows of ``layer_rows`` that hold the slots' keys and values, in the order of ``[T, 2, Hkv, D]``.

        ``slots``: ``[num_tokens]``, ``block_id * block_size + offset``. Result: int64, flat, on the pool's device.

            row = block_id * rows_per_block + ((key_or_value * Hkv) + head) * block_size + offset       HND, [T, 2, Hkv]
            row = block_id * rows_per_block +   key_or_value * block_size               + offset       NHD, [T, 2]
        """
        return upload(self.row_indices(slots), self.device)

    def row_indices(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return what ``rows_of_slots`` returns, on the host."""
        blocks, offsets = np.divmod(slots, self.block_size)
        rows: npt.NDArray[np.int64] = (blocks * self._rows_per_block + offsets)[:, None] + self._plane_rows
        return rows.ravel()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends: a query at position i sees the keys j <= i, within the window or chunk where one is set.

    sliding_window: j > i - sliding_window. chunk_size: i // chunk_size == j // chunk_size. At most one of them is set.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError on a combination that no backend supports."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.sliding_window is not None and self.chunk_size is not None:
            raise ConfigError("a layer has either sliding_window or chunk_size, not both")

    def first_visible(self, position: int) -> int:
        """Return the lowest key position that the query at ``position`` sees; it never falls as ``position`` grows."""
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1)
        if self.chunk_size is not None:
            return position // self.chunk_size * self.chunk_size
        return 0


@dataclass(slots=True)
class AttentionBatch:
    """The tokens of one step for one KV cache group. Host arrays; the backend copies them where it needs them.

    query_start_loc: int32 ``[num_seqs + 1]``; sequence s owns the query rows from ``query_start_loc[s]`` up to
        ``query_start_loc[s + 1]``, at least one.
    seq_lens: int32 ``[num_seqs]``, tokens in the KV cache after this step's writes; the queries are the last positions.
    block_tables: int32 ``[num_seqs, >= ceil(max(seq_lens) / block_size)]``; entries past a sequence's end are ignored.
        May be a view of the engine's persistent table: ``plan`` copies what it needs. Pass no more columns than needed.
    slot_mapping: int64 ``[num_tokens]``, ``block_id * block_size + offset`` of every query row.

    group_id: number of the KV cache group, to distinguish the layers of several groups.

    A padding row is a sequence of length 1 whose table is ``[NULL_BLOCK_ID]`` and whose slot is 0.
    """

    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    group_id: int = 0


@dataclass(frozen=True, slots=True)
class BatchedSequence:
    """One sequence of a batch. ``block_ids``: int64 ``[ceil(seq_len / block_size)]``, a copy on the host."""

    query_start: int
    query_end: int
    seq_len: int
    block_ids: npt.NDArray[np.int64]

    @property
    def num_queries(self) -> int:
        """Number of query rows."""
        return self.query_end - self.query_start

    @property
    def first_position(self) -> int:
        """Position of the first query."""
        return self.seq_len - self.num_queries


def split_sequences(batch: AttentionBatch, block_size: int) -> list[BatchedSequence]:
    """Return the batch's sequences in batch order, with their part of the block table."""
    tables = batch.block_tables.astype(np.int64)  # a copy: the engine changes its table later
    starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    return [
        BatchedSequence(starts[s], starts[s + 1], seq_len, tables[s, : -(-seq_len // block_size)])
        for s, seq_len in enumerate(seq_lens)
    ]


@dataclass(slots=True)
class AttentionPlan:
    """Index tensors of one step, shared by all layers of a group. Backends extend it; callers treat it as opaque.

    write_rows: int64, the rows of ``PagedKVCache.layer_rows`` that ``write_kv`` fills.
    """

    write_rows: Tensor


class AttentionBackend(ABC):
    """Writes and reads one paged KV cache. Not thread-safe: scratch buffers are reused between calls."""

    name: ClassVar[str]
    preferred_layout: ClassVar[KVLayout]
    device_types: ClassVar[frozenset[str]]  # types of torch devices it runs on; empty means all
    larger_block_sizes: ClassVar[tuple[int, ...]] = ()  # tried where the kernel refuses the configured size
    max_graph_blocks: ClassVar[int | None] = None  # sequences times width of the largest step to record; None = any

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Prepare every index tensor of a step; call it once per step and KV cache group."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """Return the attention output ``[T, num_heads, head_dim]`` of ``query``, same shape, in the query's dtype.

        The step's keys and values are already written.
        """

    @property
    def kernels(self) -> dict[str, str]:
        """What computes each part, for the log, where that depends on this machine."""
        return {}

    def graph_widths(self, max_blocks: int) -> tuple[int, ...]:
        """Return the widths of a decode step's block tables for which a graph is worth recording, the last one ``max_blocks``.

        Empty: this backend's work cannot be recorded, because it reads host values while it attends.
        """
        return ()

    def static_plan(self, num_seqs: int, num_blocks: int, specs: Sequence[AttentionSpec]) -> AttentionPlan:
        """Return the plan of ``num_seqs`` padding rows whose tensors keep their addresses, for a graph of one decode step.

        ``num_blocks``: width of the block tables, one of ``graph_widths``. ``specs``: those of the group's layers.
        """
        raise NotImplementedError(f"attention backend {self.name} has no graphs")

    def refill_plan(self, plan: AttentionPlan, batch: AttentionBatch) -> None:
        """Write a decode step into a plan of ``static_plan``; it has as many sequences, padding rows included, as the plan."""
        raise NotImplementedError(f"attention backend {self.name} has no graphs")

    def write_kv(self, layer: int, key_value: Tensor, plan: AttentionPlan) -> None:
        """Write the step's keys and values ``[T, 2, num_kv_heads, head_dim]`` into the pool.

        One tensor, because one ``index_copy_`` costs half of two. It may be a strided view of the fused qkv output whose
        key part was rotated in place; callers that hold two tensors pass ``torch.stack((key, value), dim=1)``.
        """
        rows = self.cache.layer_rows(layer)
        rows.index_copy_(0, plan.write_rows, key_value.reshape(-1, rows.shape[1]).to(rows.dtype))

    def _write_rows(self, batch: AttentionBatch) -> Tensor:
        return self.cache.rows_of_slots(batch.slot_mapping)
