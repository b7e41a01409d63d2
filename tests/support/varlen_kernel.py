"""A stand-in for ``torch.nn.attention.varlen.varlen_attn`` on the CPU, where torch has no kernel for it.

Written from that function's documentation (torch 2.13): it shows that arguments are translated right, not what CUDA computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def documented_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    *lengths: Any,
    **options: Any,
) -> Tensor:
    """Compute what ``varlen_attn`` is documented to compute with a block table, token by token.

    Shapes as there; asserts the dtypes and bounds that the kernel relies on.
    """
    cu_seq_k, max_q, max_k = lengths
    assert cu_seq_k is None
    assert all(t.dtype is torch.int32 for t in (cu_seq_q, options["seqused_k"], options["block_table"]))
    assert options["block_table"].min() >= 0
    assert options["block_table"].max() < len(key)
    left, right = options["window_size"]
    assert right == 0
    group = query.shape[1] // key.shape[2]
    assert options["enable_gqa"] == (group > 1)
    output = torch.empty_like(query)
    for s, num_keys in enumerate(options["seqused_k"].tolist()):
        pages = options["block_table"][s].long()
        keys, values = (x[pages].flatten(0, 1)[:num_keys].repeat_interleave(group, dim=1) for x in (key, value))
        start, end = int(cu_seq_q[s]), int(cu_seq_q[s + 1])
        assert end - start <= max_q
        assert num_keys <= max_k
        for row in range(start, end):
            position = num_keys - (end - row)
            lowest = 0 if left < 0 else max(0, position - left)
            seen = slice(lowest, position + 1)
            scores = torch.einsum("hd,khd->hk", query[row], keys[seen]) * options["scale"]
            output[row] = torch.einsum("hk,khd->hd", torch.softmax(scores.float(), -1).to(query.dtype), values[seen])
    return output


def documented_varlen_attn_with_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    *lengths: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute what ``varlen_attn`` is documented to compute without a block table; also the log-sum-exps.

    ``seqused_k``, where given, says how many keys a sequence has from its start in ``cu_seq_k`` on.
    """
    cu_seq_k, max_q, max_k = lengths
    assert all(t.dtype is torch.int32 for t in (cu_seq_q, cu_seq_k))
    assert key.shape == value.shape
    left, right = options["window_size"]
    group = query.shape[1] // key.shape[1]
    assert options["enable_gqa"] == (group > 1)
    counts = options["seqused_k"] if options["seqused_k"] is not None else cu_seq_k.diff()
    output, sums = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    for s, (first_key, num_keys) in enumerate(zip(cu_seq_k.tolist(), counts.tolist(), strict=False)):
        start, end = int(cu_seq_q[s]), int(cu_seq_q[s + 1])
        assert end - start <= max_q
        assert 0 < num_keys <= max_k
        keys, values = (x[first_key : first_key + num_keys].repeat_interleave(group, dim=1) for x in (key, value))
        for row in range(start, end):
            position = num_keys - (end - row)
            seen = slice(0 if left < 0 else max(0, position - left), num_keys if right < 0 else position + 1)
            scores = torch.einsum("hd,khd->hk", query[row], keys[seen]).float() * options["scale"]
            output[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1).to(query.dtype), values[seen])
            sums[row] = scores.logsumexp(-1)
    return output, sums
