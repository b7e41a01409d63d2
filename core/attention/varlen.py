"""The CUDA backend: ``torch.nn.attention.varlen.varlen_attn`` reading pages through a block table.

Owns: the translation of a batch into that function's arguments. Does not know: whether the function works on this machine;
``core.attention.select`` probes that and falls back to another backend.

Layers of chunked-local attention see each chunk of a sequence as a separate sequence, which begins at a page:

    positions   0 ..... C ..... 2C .....        queries from p to q, chunks of C tokens, C a multiple of the block size
    queries           p ~~~~~~~~~~~~~ q
    sequences         [a ][  b    ][c ]         a: the pages of chunk 0, its length up to C, its queries from p on; and so on

Not run on a GPU so far: the tests drive this file on the CPU with a stand-in for ``varlen_attn`` that follows its
documentation (torch 2.13). Which page sizes, dtypes and strides the real kernel takes is left to the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from core.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    KVLayout,
    PagedKVCache,
)
from core.attention.sdpa import SdpaBackend, SdpaPlan
from core.attention.torch_kernels import activate_paged_kernel, refill, upload, varlen_kernel
from core.errors import ConfigError

Int32Array = npt.NDArray[np.int32]


def _varlen_attn(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - torch's parameters
    """Call torch's kernel. Raises: ConfigError where there is none."""
    output = varlen_kernel()(*args, **kwargs)
    assert isinstance(output, Tensor)  # a pair only where the log-sum-exp is requested
    return output


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The kernel's arguments, on the host: query_start_loc [N + 1], seq_lens [N], block_tables [N, pages]."""

    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array

    def cut(self, chunk_size: int, block_size: int) -> _Sequences:
        """Return the chunks with queries as sequences; see the module's diagram."""
        num_queries = np.diff(self.query_start_loc)
        first_chunks = (self.seq_lens - num_queries) // chunk_size
        last_chunks = (self.seq_lens - 1) // chunk_size
        counts = last_chunks - first_chunks + 1
        owners = np.repeat(np.arange(len(counts)), counts)
        chunks = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + first_chunks[owners]
        starts = chunks * chunk_size
        ends = np.minimum(starts + chunk_size, self.seq_lens[owners])
        firsts = np.maximum(starts, (self.seq_lens - num_queries)[owners])
        pages = chunk_size // block_size
        columns = (starts // block_size)[:, None] + np.arange(pages)
        # A chunk that the table does not hold to its end is read only up to its length.
        tables = self.block_tables[owners[:, None], np.minimum(columns, self.block_tables.shape[1] - 1)]
        return _Sequences(
            np.concatenate(([0], np.cumsum(ends - firsts))).astype(np.int32), (ends - starts).astype(np.int32), tables
        )


@dataclass(slots=True)
class _Arguments:
    """The same on the pool's device, and the longest lengths that it may hold."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class VarlenPlan(AttentionPlan):
    """``arguments`` by chunk size, None for layers without chunks; made when a layer first needs them.

    fallback: the reference's plan, for layers that the kernel cannot serve.
    """

    sequences: _Sequences
    batch: AttentionBatch | None
    arguments: dict[int | None, _Arguments] = field(default_factory=dict)
    fallback: SdpaPlan | None = None


class VarlenBackend(AttentionBackend):
    """FlashAttention over pages. Layers whose chunks are not whole blocks use the reference.

    Raises: ConfigError if the pool is not NHD, or no kernel for this device takes block tables.
    """

    name = "varlen"
    preferred_layout = KVLayout.NHD
    device_types = frozenset({"cuda"})
    larger_block_sizes = (128, 256)
    kernel: ClassVar[Callable[..., Tensor]] = _varlen_attn

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        if cache.layout is not KVLayout.NHD:
            raise ConfigError(f"attention backend varlen needs KV layout NHD, got {cache.layout}")
        activate_paged_kernel(cache.device)
        self._reference = SdpaBackend(cache)

    def plan(self, batch: AttentionBatch) -> VarlenPlan:
        """See ``AttentionBackend.plan``."""
        sequences = self._sequences(batch)
        copied = AttentionBatch(sequences.query_start_loc, sequences.seq_lens, sequences.block_tables, batch.slot_mapping)
        return VarlenPlan(self._write_rows(batch), sequences, copied, {None: self._upload(sequences)})

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, VarlenPlan)
        if spec.chunk_size is not None and not self._is_whole_blocks(spec.chunk_size):
            return self._attend_by_reference(layer, query, spec, plan)
        arguments = plan.arguments.get(spec.chunk_size)
        if arguments is None:
            assert spec.chunk_size is not None
            arguments = self._upload(plan.sequences.cut(spec.chunk_size, self.cache.block_size))
            plan.arguments[spec.chunk_size] = arguments
        kernel = type(self).kernel  # through the type: an instance would bind it as a method
        # The kernel counts the keys left of the query; a window counts the query too. -1: no limit.
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        return kernel(
            query,
            self.cache.key(layer),
            self.cache.value(layer),
            arguments.query_start_loc,
            None,
            arguments.max_query_len,
            arguments.max_seq_len,
            scale=spec.scale,
            window_size=(left, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=arguments.seq_lens,
            block_table=arguments.block_tables,
        )

    def graph_widths(self, max_blocks: int) -> tuple[int, ...]:
        """One: the kernel reads only the pages that a sequence has, at any width."""
        return (max_blocks,)

    def static_plan(self, num_seqs: int, num_blocks: int, specs: Sequence[AttentionSpec]) -> VarlenPlan:
        """See ``AttentionBackend.static_plan``. Raises: ConfigError for layers that only the reference serves."""
        chunk_sizes = {spec.chunk_size for spec in specs}
        for chunk_size in chunk_sizes - {None}:
            if not self._is_whole_blocks(chunk_size):
                raise ConfigError(f"chunks of {chunk_size} tokens are no whole blocks of {self.cache.block_size}")
        sequences = _Sequences(
            np.arange(num_seqs + 1, dtype=np.int32),
            np.ones(num_seqs, dtype=np.int32),
            np.zeros((num_seqs, num_blocks), dtype=np.int32),
        )
        plan = VarlenPlan(self.cache.rows_of_slots(np.zeros(num_seqs, dtype=np.int64)), sequences, None)
        for chunk_size in chunk_sizes:
            found = sequences if chunk_size is None else sequences.cut(chunk_size, self.cache.block_size)
            plan.arguments[chunk_size] = arguments = self._upload(found)
            arguments.max_seq_len = found.block_tables.shape[1] * self.cache.block_size
        return plan

    def refill_plan(self, plan: AttentionPlan, batch: AttentionBatch) -> None:
        """See ``AttentionBackend.refill_plan``."""
        assert isinstance(plan, VarlenPlan)
        sequences = self._sequences(batch)
        refill(plan.write_rows, self.cache.row_indices(batch.slot_mapping))
        for chunk_size, arguments in plan.arguments.items():
            found = sequences if chunk_size is None else sequences.cut(chunk_size, self.cache.block_size)
            refill(arguments.seq_lens, found.seq_lens)
            # Entries further right keep their old values: no sequence is long enough to read them.
            refill(arguments.block_tables[:, : found.block_tables.shape[1]], found.block_tables)

    def _sequences(self, batch: AttentionBatch) -> _Sequences:
        """Return a copy of the batch; entries past the end of a sequence must not become addresses."""
        num_pages = -(-int(batch.seq_lens.max()) // self.cache.block_size)
        tables = np.array(batch.block_tables[:, :num_pages], dtype=np.int32)
        tables[np.arange(num_pages) >= -(-batch.seq_lens[:, None] // self.cache.block_size)] = 0
        return _Sequences(np.array(batch.query_start_loc, dtype=np.int32), np.array(batch.seq_lens, dtype=np.int32), tables)

    def _upload(self, sequences: _Sequences) -> _Arguments:
        device = self.cache.device
        return _Arguments(
            query_start_loc=upload(sequences.query_start_loc, device),
            seq_lens=upload(sequences.seq_lens, device),
            block_tables=upload(sequences.block_tables, device),
            max_query_len=int(np.diff(sequences.query_start_loc).max()),
            max_seq_len=int(sequences.seq_lens.max()),
        )

    def _is_whole_blocks(self, num_tokens: int | None) -> bool:
        return num_tokens is not None and num_tokens % self.cache.block_size == 0

    def _attend_by_reference(self, layer: int, query: Tensor, spec: AttentionSpec, plan: VarlenPlan) -> Tensor:
        if plan.fallback is None:
            assert plan.batch is not None, "a recorded step has only layers that the kernel serves"
            plan.fallback = self._reference.plan(plan.batch)
        return self._reference.attend(layer, query, spec, plan.fallback)
