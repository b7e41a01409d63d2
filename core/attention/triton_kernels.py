"""Triton kernels of paged attention for decode rows: one query token per sequence, keys and values read through a block table.

Owns the two kernels and their launch. Does not know: plans, batches, or whether a kernel is right on this machine;
``core.attention.select`` probes that. Triton comes with torch's builds for CUDA; elsewhere importing this file fails.

Source: FlashDecoding (Dao and others, 2023). The keys of a sequence are split among programs, and a second kernel weighs
their results by the log-sum-exps. The query heads that share a KV head are the rows of one product, padded to the 16 rows of
a tensor core.

    keys of a sequence     first ....|....|....|....|.. seq_len        | = a tile, aligned to multiples of TILE
    programs               [ split 0 ][ split 1 ][ 2 ]                 a split is a whole number of tiles
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from core.attention.base import AttentionSpec, PagedKVCache

__all__ = ["DecodeSequences", "TritonError", "attend_decode", "num_splits", "write_rows"]

_PROGRAMS = 512  # that keep a large device busy: splits are made until there are as many
_MAX_SPLITS = 64
_MIN_ROWS = 16  # of each operand of a product, in the tensor cores
_NUM_WARPS = 2
_NUM_STAGES = 2  # tiles that are read ahead


@triton.jit
def _attend_splits(
    query, keys, values, tables, seq_lens, output, sums,
    scale, window, chunk, num_splits, query_stride, block_stride, token_stride, table_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one sequence under one KV head.

    query: [N, heads, HEAD_DIM], rows query_stride apart. output: the same without gaps if IS_WHOLE, else float32 [N, heads,
    num_splits, HEAD_DIM], with sums float32 [N, heads, num_splits]: -inf, and no output, for no key. window, chunk: 0 = none.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    is_row, is_dim = rows < GROUP, dims < HEAD_DIM
    heads = sequence * NUM_KV_HEADS * GROUP + kv_head * GROUP + rows
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(seq_len - window, 0)
    if chunk > 0:
        first = (seq_len - 1) // chunk * chunk
    first_tile = first // TILE
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len, TILE) - first_tile, num_splits)
    begin = (first_tile + split * tiles_per_split) * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, seq_len)

    asked = query + sequence.to(tl.int64) * query_stride + (kv_head * GROUP + rows)[:, None] * HEAD_DIM + dims[None, :]
    scaled = tl.load(asked, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    largest, weight_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in tl.range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        is_seen = (positions >= first) & (positions < end)
        pages = tl.load(tables + sequence * table_stride + positions // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        places = pages * block_stride + (positions % BLOCK_SIZE) * token_stride + kv_head * HEAD_DIM
        # What is not seen is not read: it may be NaN.
        key = tl.load(keys + places[None, :] + dims[:, None], mask=is_dim[:, None] & is_seen[None, :], other=0.0)
        scores = tl.dot(scaled, key.to(scaled.dtype), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        value = tl.load(values + places[:, None] + dims[None, :], mask=is_seen[:, None] & is_dim[None, :], other=0.0)
        value = value.to(scaled.dtype)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        largest = new_largest

    if IS_WHOLE:
        place = output + heads[:, None] * HEAD_DIM + dims[None, :]
        is_written = is_row[:, None] & is_dim[None, :]
        tl.store(place, (result / weight_sum[:, None]).to(output.dtype.element_ty), mask=is_written)
    else:
        has_keys = begin < end
        parts = heads.to(tl.int64) * num_splits + split
        is_written = is_row[:, None] & is_dim[None, :] & has_keys
        safe_sum = tl.where(weight_sum > 0.0, weight_sum, 1.0)
        tl.store(output + parts[:, None] * HEAD_DIM + dims[None, :], result / safe_sum[:, None], mask=is_written)
        log_sums = tl.where(has_keys, largest + tl.log(safe_sum), float("-inf"))
        tl.store(sums + parts, log_sums, mask=is_row)


@triton.jit
def _merge_splits(
    parts, sums, output, num_splits,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one sequence and query head by their log-sum-exps. output: [N, heads, HEAD_DIM]."""
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_DIM)
    log_sums = tl.load(sums + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp(log_sums - tl.max(log_sums, 0))
    is_read = (weights > 0.0)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    read = tl.load(parts + places, mask=is_read, other=0.0)
    merged = tl.sum(read * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + row * HEAD_DIM + dims, merged.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _write_rows(source, rows, target, token_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Copy the keys or the values of one token, WIDTH elements, to their row of ``target``."""
    number, columns = tl.program_id(0), tl.arange(0, PADDED)
    row = tl.load(rows + number)
    place = source + (number // 2).to(tl.int64) * token_stride + number % 2 * WIDTH
    read = tl.load(place + columns, mask=columns < WIDTH)
    tl.store(target + row * WIDTH + columns, read.to(target.dtype.element_ty), mask=columns < WIDTH)


@dataclass(frozen=True, slots=True)
class DecodeSequences:
    """The sequences of a step with one query each, on the device.

    seq_lens: int64 ``[N]``. block_tables: int64 ``[N, pages]``; entries after a sequence's end are not read.
    """

    seq_lens: Tensor
    block_tables: Tensor


def attend_decode(
    layer: int, query: Tensor, spec: AttentionSpec, cache: PagedKVCache, rows: DecodeSequences, splits: int | None = None
) -> Tensor:
    """Return the attention output ``[N, num_heads, head_dim]`` of ``query``, of the same shape. ``cache`` has layout NHD.

    The heads of a row of ``query`` lie one after another, rows may be strided. What it launches depends on N and on the width
    of the tables only, so that a graph can be recorded for both. ``splits``: a power of two; None = ``num_splits``.
    """
    if not query[:1].is_contiguous():
        query = query.contiguous()
    key, value = cache.key(layer), cache.value(layer)
    num_seqs, num_pages = rows.block_tables.shape
    group, head_dim = spec.num_heads // spec.num_kv_heads, query.shape[-1]
    if splits is None:
        splits = num_splits(num_seqs * spec.num_kv_heads, num_pages * cache.block_size, head_dim)
    output = query.new_empty(query.shape)
    parts, sums = output, output
    if splits > 1:
        parts = query.new_empty((num_seqs, spec.num_heads, splits, head_dim), dtype=torch.float32)
        sums = query.new_empty((num_seqs, spec.num_heads, splits), dtype=torch.float32)
    padded_dim = max(_MIN_ROWS, triton.next_power_of_2(head_dim))
    _attend_splits[num_seqs, spec.num_kv_heads, splits](
        query, key, value, rows.block_tables, rows.seq_lens, parts, sums,
        spec.scale, spec.sliding_window or 0, spec.chunk_size or 0, splits,
        query.stride(0), key.stride(0), key.stride(1), rows.block_tables.stride(0),
        GROUP=group, ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)), NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=cache.block_size, TILE=_tile(head_dim), IS_WHOLE=splits == 1,
        num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(num_seqs * spec.num_heads,)](
            parts, sums, output, splits,
            HEAD_DIM=head_dim, PADDED_DIM=padded_dim, PADDED_SPLITS=triton.next_power_of_2(splits), num_warps=2,
        )  # fmt: skip
    return output


def write_rows(key_value: Tensor, rows: Tensor, target: Tensor) -> None:
    """Copy ``key_value`` ``[T, 2, num_kv_heads, head_dim]`` to ``rows``, int64 ``[T * 2]``, of ``target`` ``[_, width]``.

    What a token has lies together; tokens may be strided.
    """
    if len(rows):
        width = target.shape[1]
        _write_rows[(len(rows),)](
            key_value, rows, target, key_value.stride(0), WIDTH=width, PADDED=triton.next_power_of_2(width)
        )  # fmt: skip


def num_splits(num_programs: int, num_tokens: int, head_dim: int) -> int:
    """Return among how many programs the keys of a sequence are split: a power of two, at most one for each tile.

    ``num_programs``: the programs without splits, one for each sequence and KV head.
    """
    wanted = triton.next_power_of_2(max(1, _PROGRAMS // num_programs))
    return int(min(wanted, _MAX_SPLITS, triton.next_power_of_2(triton.cdiv(num_tokens, _tile(head_dim)))))


def _tile(head_dim: int) -> int:
    """Return how many keys a program reads at a time: what fits into shared memory with those that are read ahead."""
    return 64 if head_dim <= 128 else 32
