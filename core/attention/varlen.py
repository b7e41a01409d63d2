"""The CUDA backend: ``torch.nn.attention.varlen.varlen_attn`` reading pages through a block table.

Owns: the translation of a batch into that function's arguments. Does not know: whether the function works on this machine;
``core.attention.select`` probes that and falls back to ``SdpaBackend``. Called through ``core.attention.base``.

Not run on a GPU so far: the tests drive this file on the CPU with a stand-in for ``varlen_attn`` that follows its
documentation (torch 2.13). Which page sizes, dtypes and strides the real kernel takes is left to the probe; FlashAttention 2
is known to want bf16 or fp16 and pages that are multiples of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
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
from core.errors import ConfigError


def _varlen_attn(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - torch's parameters
    """Call torch's kernel. Imported at the first call: the import takes 2 s. Raises: ImportError."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(*args, **kwargs)
    assert isinstance(output, Tensor)  # a pair only where the log-sum-exp is asked for
    return output


@dataclass(slots=True)
class VarlenPlan(AttentionPlan):
    """Arguments of the kernel. int32 on the pool's device: query_start_loc [N + 1], seq_lens [N], block_tables [N, pages].

    fallback: the reference's plan, for layers that the kernel cannot serve.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    fallback: SdpaPlan


class VarlenBackend(AttentionBackend):
    """FlashAttention over pages. Chunked-local layers go to the reference: the kernel has no such mask.

    Raises: ConfigError if the pool is not NHD.
    """

    name = "varlen"
    preferred_layout = KVLayout.NHD
    device_types = frozenset({"cuda"})
    kernel: ClassVar[Callable[..., Tensor]] = _varlen_attn

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        if cache.layout is not KVLayout.NHD:
            raise ConfigError(f"attention backend varlen needs KV layout NHD, got {cache.layout}")
        self._reference = SdpaBackend(cache)

    def plan(self, batch: AttentionBatch) -> VarlenPlan:
        """See ``AttentionBackend.plan``."""
        num_pages = -(-int(batch.seq_lens.max()) // self.cache.block_size)
        tables = np.array(batch.block_tables[:, :num_pages], dtype=np.int32)
        used = np.arange(num_pages) < -(-batch.seq_lens[:, None] // self.cache.block_size)
        tables[~used] = 0  # whatever stood there must not become an address
        fallback = self._reference.plan(batch)
        return VarlenPlan(
            write_rows=fallback.write_rows,
            query_start_loc=self._to_device(batch.query_start_loc),
            seq_lens=self._to_device(batch.seq_lens),
            block_tables=self._to_device(tables),
            max_query_len=int(np.diff(batch.query_start_loc).max()),
            max_seq_len=int(batch.seq_lens.max()),
            fallback=fallback,
        )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, VarlenPlan)
        if spec.chunk_size is not None:
            return self._reference.attend(layer, query, spec, plan.fallback)
        kernel = type(self).kernel  # through the type: an instance would bind it as a method
        # The kernel counts the keys left of the query; a window counts the query too. -1: no limit.
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        return kernel(
            query,
            self.cache.key(layer),
            self.cache.value(layer),
            plan.query_start_loc,
            None,
            plan.max_query_len,
            plan.max_seq_len,
            scale=spec.scale,
            window_size=(left, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=plan.seq_lens,
            block_table=plan.block_tables,
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(self.cache.device)
