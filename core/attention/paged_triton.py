"""The CUDA backend with decode kernels of our own, in Triton, which torch's builds for CUDA bring along.

Owns: decode rows, read through block tables where they lie. Does not know: whether the kernels agree on this device;
``core.attention.select`` probes that. Prefill chunks are those of ``core.attention.pages``.

A step's work depends on its sequences' lengths on the device and not on the width of its tables, so that one graph for each
batch size serves all lengths.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.attention.base import AttentionPlan, AttentionSpec, PagedKVCache
from core.attention.pages import PagesBackend, PagesPlan
from core.errors import ConfigError


class TritonBackend(PagesBackend):
    """Kernels that read a block table for decode rows, FlashAttention for chunks.

    Raises: ConfigError if the pool is not NHD, or Triton cannot compile a kernel; ImportError where there is no Triton.
    """

    name = "triton"
    max_graph_blocks = None

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        self._kernels: Any = importlib.import_module("core.attention.triton_kernels")

    def graph_widths(self, max_blocks: int) -> tuple[int, ...]:
        """One: the kernels read only the pages that a sequence has, at any width."""
        return (max_blocks,)

    def static_plan(self, num_seqs: int, num_blocks: int, specs: Sequence[AttentionSpec]) -> PagesPlan:
        """See ``AttentionBackend.static_plan``."""
        device = self.cache.device
        return PagesPlan(
            write_rows=self.cache.rows_of_slots(np.zeros(num_seqs, dtype=np.int64)),
            decode_rows=None,
            seq_lens=torch.ones(num_seqs, dtype=torch.int64, device=device),
            block_tables=torch.zeros(num_seqs, num_blocks, dtype=torch.int64, device=device),
        )

    def write_kv(self, layer: int, key_value: Tensor, plan: AttentionPlan) -> None:
        """See ``AttentionBackend.write_kv``; one kernel reads the strided view."""
        if key_value[0].is_contiguous():
            self._kernels.write_rows(key_value, plan.write_rows, self.cache.layer_rows(layer))
            self._keep_written(key_value, plan)
        else:
            super().write_kv(layer, key_value, plan)

    def _attend_decode(self, layer: int, query: Tensor, spec: AttentionSpec, plan: PagesPlan) -> Tensor:
        rows = self._kernels.DecodeSequences(plan.seq_lens, plan.block_tables)
        try:
            output: Tensor = self._kernels.attend_decode(layer, query, spec, self.cache, rows)
        except self._kernels.TritonError as error:
            raise ConfigError(f"Triton cannot compile the kernel for {spec}: {error}") from None
        return output
