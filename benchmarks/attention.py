"""Decode attention on CPU: the default backend, the alternatives that it replaced, and the memory floor.

    python benchmarks/attention.py [--cpu avx2] [--repeats 9] [--quick] [--json FILE] [--markdown]

Shapes of SmolLM2-135M (9 query and 3 KV heads of 64, 30 layers), fp32, one thread, scattered pages. Each call goes to the next
layer, so that pages are cold. With --cpu avx2 all compute as on a CPU without AVX-512. Columns, in us per layer (median):

    paged_cpu         the backend that serves
    gather + SDPA     pages gathered by one index_select, then scaled_dot_product_attention
    page-major bmm    one bmm per KV head over pages, merged by sequence
    SDPA contiguous   scaled_dot_product_attention on KV that lies contiguous: no paging at all
    floor             every visible byte of KV read once (sum)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from common import Machine, Outcome, Spread, Table, make_parser, publish
from cpu_choice import add_cpu_choice, compute_as_chosen
from torch import Tensor

from core.attention import compiled_decode
from core.attention.base import AttentionBatch, AttentionSpec, KVLayout, PagedKVCache
from core.attention.paged_cpu import PagedCpuBackend

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
GROUP = HEADS // KV_HEADS
SPEC = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
CASES = [(batch, context, block) for block in (64, 16) for batch in (1, 4, 16) for context in (256, 1024)]

LayerCall = Callable[[int], object]


class Problem:
    """A pool with ``batch`` sequences of ``context`` tokens in shuffled pages, and one decode query for each."""

    def __init__(self, batch: int, context: int, block_size: int) -> None:
        self.batch, self.context, self.block_size = batch, context, block_size
        self.pages_per_seq = context // block_size
        num_pages = batch * self.pages_per_seq
        self.pool = torch.randn(num_pages + 1, LAYERS, 2, KV_HEADS, block_size, HEAD_DIM)
        order = np.random.default_rng(0).permutation(num_pages) + 1
        self.tables = order.reshape(batch, self.pages_per_seq).astype(np.int32)
        self.query = torch.randn(batch, HEADS, HEAD_DIM)

    def paged_cpu(self) -> LayerCall:
        slots = self.tables[:, -1].astype(np.int64) * self.block_size + self.block_size - 1
        lengths = np.full(self.batch, self.context, np.int32)
        backend = PagedCpuBackend(PagedKVCache(self.pool, KVLayout.HND))
        plan = backend.plan(AttentionBatch(np.arange(self.batch + 1, dtype=np.int32), lengths, self.tables, slots))
        return lambda layer: backend.attend(layer, self.query, SPEC, plan)

    def gather_sdpa(self) -> LayerCall:
        rows = self.pool.view(-1, self.block_size * HEAD_DIM)  # one row per (page, layer, k|v, head)
        page_rows = LAYERS * 2 * KV_HEADS
        heads = np.arange(KV_HEADS).reshape(1, 1, KV_HEADS, 1)
        key_or_value = (np.arange(2) * KV_HEADS).reshape(2, 1, 1, 1)
        pages = self.tables.astype(np.int64).reshape(1, self.batch, 1, self.pages_per_seq) * page_rows
        index = torch.from_numpy((pages + heads + key_or_value).reshape(-1))
        buffer = torch.empty(len(index), self.block_size * HEAD_DIM)
        query = self.query.view(self.batch, KV_HEADS, GROUP, HEAD_DIM)

        def attend(layer: int) -> Tensor:
            torch.index_select(rows[2 * layer * KV_HEADS :], 0, index, out=buffer)
            key, value = buffer.view(2, self.batch, KV_HEADS, self.context, HEAD_DIM)
            return F.scaled_dot_product_attention(query, key, value)

        return attend

    def page_major(self) -> LayerCall:
        num_pages = self.batch * self.pages_per_seq
        owner = np.empty(num_pages, np.int64)
        owner[self.tables.ravel() - 1] = np.repeat(np.arange(self.batch), self.pages_per_seq)
        owners = torch.from_numpy(owner)
        slots = owners.view(1, num_pages, 1).expand(KV_HEADS, num_pages, GROUP)
        scores = torch.empty(KV_HEADS, num_pages, GROUP, self.block_size)
        partial = torch.empty(KV_HEADS, num_pages, GROUP, HEAD_DIM)
        pages = self.pool[1:]

        def attend(layer: int) -> Tensor:
            query = self.query.view(self.batch, KV_HEADS, GROUP, HEAD_DIM).transpose(0, 1).index_select(1, owners)
            for head in range(KV_HEADS):
                torch.bmm(query[head], pages[:, layer, 0, head].transpose(1, 2), out=scores[head])
            page_max = scores.mul_(SPEC.scale).amax(-1)
            page_sum = scores.sub_(page_max[..., None]).exp_().sum(-1)
            for head in range(KV_HEADS):
                torch.bmm(scores[head], pages[:, layer, 1, head], out=partial[head])
            shape = (KV_HEADS, self.batch, GROUP)
            seq_max = torch.full(shape, -1e30).scatter_reduce_(1, slots, page_max, "amax")
            weight = page_max.sub_(seq_max.gather(1, slots)).exp_()
            total = torch.zeros(shape).index_add_(1, owners, page_sum * weight)
            output = torch.zeros(*shape, HEAD_DIM).index_add_(1, owners, partial * weight[..., None])
            return (output / total[..., None]).transpose(0, 1).reshape(self.batch, HEADS, HEAD_DIM)

        return attend

    def sdpa_contiguous(self) -> LayerCall:
        caches = [torch.randn(2, self.batch, KV_HEADS, self.context, HEAD_DIM) for _ in range(LAYERS)]
        query = self.query.view(self.batch, KV_HEADS, GROUP, HEAD_DIM)
        return lambda layer: F.scaled_dot_product_attention(query, caches[layer][0], caches[layer][1])

    def floor(self) -> LayerCall:
        return lambda layer: self.pool[1:, layer].sum()


def measure(batch: int, context: int, block_size: int, repeats: int) -> dict[str, float]:
    """Return us per layer for each variant; the variants take turns, so that noise hits all of them."""
    problem = Problem(batch, context, block_size)
    calls = {
        "paged_cpu": problem.paged_cpu(),
        "gather + SDPA": problem.gather_sdpa(),
        "page-major bmm": problem.page_major(),
        "SDPA contiguous": problem.sdpa_contiguous(),
        "floor": problem.floor(),
    }
    expected = calls["paged_cpu"](3)
    for name in ("gather + SDPA", "page-major bmm"):
        actual = calls[name](3)
        assert isinstance(actual, Tensor)
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(actual.reshape(expected.shape), expected, atol=1e-5, rtol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                call(layer)
            times[name].append((time.perf_counter() - start) / LAYERS * 1e6)
    return {name: Spread.of(values[1:]).median for name, values in times.items()}  # the first round warms up


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=9, takes_model=False)
    add_cpu_choice(parser)
    arguments = parser.parse_args()
    machine = Machine.now()
    compute_as_chosen(arguments, compiled_decode.built_library())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[dict[str, float]] = [
        {
            **{"batch": batch, "context": context, "block": block},
            **measure(batch, context, block, 2 if arguments.quick else arguments.repeats),
        }
        for batch, context, block in (CASES[:1] if arguments.quick else CASES)
    ]
    table = Table(tuple(rows[0]), [[f"{value:,.0f}" for value in row.values()] for row in rows])
    publish(Outcome([table], figures={"us_per_layer": rows}), machine, arguments)


if __name__ == "__main__":
    main()
