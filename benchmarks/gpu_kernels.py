"""How long attention of decode rows takes on a GPU, by the number of programs among which a sequence's keys are split.

Owns memory of the shape of a KV cache with random contents, and the timing: launches are recorded in a CUDA graph, so the
host takes no part in it, and go through several layers; those of short or few contexts stay in the device's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from gpu_models import Shape

from core.attention.base import AttentionSpec, KVLayout, PagedKVCache

BLOCK_SIZE = 64
LAYERS = 4
ROUNDS = 3  # through all layers, in one graph


def measure_attention(shape: Shape, cases: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, dict[int, float]]]:
    """Yield batch, context and the microseconds of one layer by number of splits, for each batch and context of ``cases``."""
    from core.attention import triton_kernels

    spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    for batch, context in cases:
        pages = context // BLOCK_SIZE + 1
        places = (batch * pages + 1, LAYERS, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        cache = PagedKVCache(torch.randn(places, dtype=torch.bfloat16, device="cuda"), KVLayout.NHD)
        tables = 1 + torch.randperm(batch * pages, device="cuda").view(batch, pages)
        rows = triton_kernels.DecodeSequences(torch.full((batch,), context + 1, dtype=torch.int64, device="cuda"), tables)
        query = torch.randn(batch, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        chosen = triton_kernels.num_splits(batch * shape.kv_heads, pages * BLOCK_SIZE, shape.head_dim)
        attend = partial(triton_kernels.attend_decode, query=query, spec=spec, cache=cache, rows=rows)
        tried = dict.fromkeys((chosen, max(1, chosen // 2), min(64, 2 * chosen), min(64, 4 * chosen)))
        yield batch, context, {splits: _microseconds(partial(attend, splits=splits)) for splits in tried}


def _microseconds(attend: Callable[[int], torch.Tensor]) -> float:
    """Return how long ``attend(layer)`` takes."""
    attend(0)  # is compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for layer in range(LAYERS):
                attend(layer)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (ROUNDS * LAYERS)
