"""Prefill attention on CPU: the compiled kernel, and the torch operations that serve where it cannot be used.

    python benchmarks/prefill_attention.py [--cpu avx2] [--repeats 20] [--json FILE] [--markdown] [--quick]

Shapes of SmolLM2-135M (9 query and 3 KV heads of 64), one thread, scattered pages of 64 tokens. A chunk of a prompt attends to
all tokens up to its own. Milliseconds of one layer, in turns; GFLOP/s of the products of visible pairs. With --cpu avx2 both
compute as on a CPU without AVX-512.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from common import Machine, Outcome, Spread, Table, make_parser, publish
from cpu_choice import add_cpu_choice, compute_as_chosen

from core.attention import compiled_prefill
from core.attention.base import AttentionSpec, BatchedSequence, KVLayout, PagedKVCache
from core.attention.compiled_prefill import CompiledPrefill, can_compile_prefill
from core.attention.gathered import GatherKernel

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 64
SPEC = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
CASES = [(256, 256), (256, 1024), (64, 1024), (256, 4096)]  # queries, tokens with those before


def measure(dtype: torch.dtype, num_queries: int, seq_len: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return the seconds of the compiled kernel and of torch's operations, turn by turn; the first turn warms up."""
    num_pages = -(-seq_len // BLOCK)
    cache = PagedKVCache(torch.randn(num_pages + 1, 1, 2, KV_HEADS, BLOCK, HEAD_DIM).to(dtype), KVLayout.HND)
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int64) + 1
    sequence = BatchedSequence(0, num_queries, seq_len, table)
    query = torch.randn(num_queries, HEADS, HEAD_DIM).to(dtype)
    output = torch.empty_like(query)
    compiled, gather = CompiledPrefill(cache), GatherKernel(cache)
    indexes = compiled.index(sequence, SPEC), gather.index(sequence, SPEC)
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        compiled.attend(0, query, indexes[0], output)
        between = time.perf_counter()
        gather.attend(0, query, indexes[1], output)
        seconds[0].append(between - started)
        seconds[1].append(time.perf_counter() - between)
    return seconds[0][1:], seconds[1][1:]


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__ or "", repeats=20, takes_model=False)
    add_cpu_choice(parser)
    arguments = parser.parse_args()
    machine = Machine.now()
    compute_as_chosen(arguments, compiled_prefill.built_library())
    torch.set_num_threads(1)
    if not can_compile_prefill(PagedKVCache(torch.zeros(1, 1, 2, KV_HEADS, BLOCK, HEAD_DIM), KVLayout.HND)):
        raise SystemExit("the compiled kernel is not there: it needs AVX2 and a C compiler (make install)")
    rows, figures = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        for num_queries, seq_len in CASES[:1] if arguments.quick else CASES:
            compiled, others = measure(dtype, num_queries, seq_len, 2 if arguments.quick else arguments.repeats)
            pairs = num_queries * (seq_len - num_queries) + num_queries * (num_queries + 1) / 2
            rate = pairs * HEADS * HEAD_DIM * 4 / Spread.of(compiled).median / 1e9
            faster, name = Spread.of_ratios(others, compiled), str(dtype).removeprefix("torch.")
            times = [Spread.of(each).show(2, 1e3) for each in (compiled, others)]
            rows.append([name, f"{num_queries} of {seq_len:,}", *times, f"{rate:.0f}", faster.show(2)])
            figures[f"{name} {num_queries} {seq_len}"] = {"compiled_s": compiled, "torch_s": others}
    columns = ("pool", "queries", "compiled, ms", "torch, ms", "compiled, GFLOP/s", "faster")
    publish(Outcome([Table(columns, rows)], figures={"seconds": figures}), machine, arguments)


if __name__ == "__main__":
    main()
