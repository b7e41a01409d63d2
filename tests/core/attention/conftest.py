"""Fixtures of the attention tests: random paged batches whose unseen slots are poisoned, and a dense oracle in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
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
from core.kv.block import NULL_BLOCK_ID


@dataclass
class Seq:
    """A sequence before it is paged. ``shares``: (index of an earlier sequence, number of its leading blocks reused)."""

    seq_len: int
    num_queries: int = 1
    shares: tuple[int, int] | None = None


@dataclass
class Case:
    """A step over a paged cache, and everything needed to compute its result densely."""

    seqs: list[Seq]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 16
    block_size: int = 16
    num_layers: int = 3
    layer: int = 1
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    chunk_size: int | None = None
    num_padding_rows: int = 0
    seed: int = 0
    poison: float = float("nan")
    keys: list[Tensor] = field(default_factory=list)  # per sequence [seq_len, num_kv_heads, head_dim]
    values: list[Tensor] = field(default_factory=list)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, 0.37, self.sliding_window, self.chunk_size)


class PagedStep:
    """Builds the pool and the batch of a case in one layout, and runs a backend on them.

    Every slot that no query sees holds ``case.poison`` (NaN by default). The step's own keys and values are not in the pool
    yet: ``run`` writes them through the backend.
    """

    def __init__(self, case: Case, layout: KVLayout) -> None:
        self.case = case
        self._whole: tuple[Tensor, Tensor, Tensor] | None = None
        self._generator = torch.Generator().manual_seed(case.seed)
        self._make_inputs()
        self.tables = self._make_tables()
        self.cache = self._make_cache(layout)
        self.batch = self._make_batch()
        self._fill_cached_prefixes()

    def refill(self, **changes: int | None) -> None:
        """Change the case (layer, mask, heads), draw new inputs, and write the prefixes again; the batch stays."""
        for name, value in changes.items():
            setattr(self.case, name, value)
        self._make_inputs()
        self._fill_cached_prefixes()

    def narrow(self, start: int, end: int) -> None:
        """Turn the only sequence into its chunk ``[start, end)``; the pool stays."""
        if self._whole is None:
            self._whole = (self.query, self.case.keys[0], self.case.values[0])
        query, key, value = self._whole
        self.query, self.case.keys, self.case.values = query[start:end], [key[:end]], [value[:end]]
        self.case.seqs = [Seq(end, end - start)]
        self.batch = self._make_batch()

    def _make_inputs(self) -> None:
        case, generator = self.case, self._generator
        num_queries = sum(s.num_queries for s in case.seqs)
        self.query = torch.randn(num_queries, case.num_heads, case.head_dim, generator=generator).to(case.dtype)
        case.keys, case.values = [], []
        for seq in case.seqs:
            key, value = torch.randn(2, seq.seq_len, case.num_kv_heads, case.head_dim, generator=generator).to(case.dtype)
            if seq.shares is not None:
                other, num_blocks = seq.shares
                num_shared = num_blocks * case.block_size
                key[:num_shared], value[:num_shared] = case.keys[other][:num_shared], case.values[other][:num_shared]
            case.keys.append(key)
            case.values.append(value)

    def _make_tables(self) -> list[list[int]]:
        case = self.case
        num_blocks = sum(-(-s.seq_len // case.block_size) for s in case.seqs)
        self.num_blocks = 2 * num_blocks + 3  # about half of the pool is free
        free = (torch.randperm(self.num_blocks - 1, generator=self._generator) + 1).tolist()
        tables: list[list[int]] = []
        for seq in case.seqs:
            other, num_shared = seq.shares or (0, 0)
            shared = tables[other][:num_shared] if num_shared else []
            tables.append(shared + [free.pop() for _ in range(-(-seq.seq_len // case.block_size) - num_shared)])
        return tables

    def _make_cache(self, layout: KVLayout) -> PagedKVCache:
        case = self.case
        inner = (case.num_kv_heads, case.block_size) if layout is KVLayout.HND else (case.block_size, case.num_kv_heads)
        pool = torch.full((self.num_blocks, case.num_layers, 2, *inner, case.head_dim), case.poison, dtype=case.dtype)
        return PagedKVCache(pool, layout)

    def _slots(self, sequence: int, start: int, end: int) -> np.ndarray:
        positions, block_size = np.arange(start, end), self.case.block_size
        return np.array(self.tables[sequence])[positions // block_size] * block_size + positions % block_size

    def _make_batch(self) -> AttentionBatch:
        case, padding = self.case, self.case.num_padding_rows
        num_queries = [s.num_queries for s in case.seqs] + [1] * padding
        tables = np.full((len(num_queries), 2 + max(map(len, self.tables))), 10**6, dtype=np.int32)  # junk past the end
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = self._table_as_seen(row, table)
        tables[len(self.tables) :, 0] = NULL_BLOCK_ID
        slots = [self._slots(s, seq.seq_len - seq.num_queries, seq.seq_len) for s, seq in enumerate(case.seqs)]
        return AttentionBatch(
            query_start_loc=np.cumsum([0, *num_queries], dtype=np.int32),
            seq_lens=np.array([s.seq_len for s in case.seqs] + [1] * padding, dtype=np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate([*slots, np.zeros(padding, dtype=np.int64)]).astype(np.int64),
        )

    def _table_as_seen(self, row: int, table: list[int]) -> list[int]:
        """Blocks below the window of the first query are freed: the engine names the null block there."""
        seq = self.case.seqs[row]
        first_block = self.case.spec.first_visible(seq.seq_len - seq.num_queries) // self.case.block_size
        return [NULL_BLOCK_ID] * first_block + table[first_block:]

    def _fill_cached_prefixes(self) -> None:
        """Write what the queries see and earlier steps have written, slot by slot, by the definition of the layouts."""
        case = self.case
        for s, seq in enumerate(case.seqs):
            first_query = seq.seq_len - seq.num_queries
            for position in range(case.spec.first_visible(first_query), first_query):
                block, offset = self.tables[s][position // case.block_size], position % case.block_size
                for half, tokens in enumerate((case.keys[s], case.values[s])):
                    plane = self.cache.pool[block, case.layer, half]
                    plane = plane if self.cache.layout is KVLayout.NHD else plane.transpose(0, 1)
                    plane[offset] = tokens[position]

    def new_key_values(self) -> Tensor:
        """Return the step's keys and values, ``[T, 2, num_kv_heads, head_dim]``, padding rows included."""
        case = self.case
        rows = [
            torch.stack((case.keys[s][-seq.num_queries :], case.values[s][-seq.num_queries :]), dim=1)
            for s, seq in enumerate(case.seqs)
        ]
        padding = torch.ones(case.num_padding_rows, 2, case.num_kv_heads, case.head_dim, dtype=case.dtype)
        return torch.cat([*rows, padding])

    def run(self, backend_type: type[AttentionBackend]) -> Tensor:
        """Return the backend's output for the real rows, ``[T, num_heads, head_dim]``."""
        backend = backend_type(self.cache)
        plan = backend.plan(self.batch)
        return self.step(backend, plan)

    def step(self, backend: AttentionBackend, plan: AttentionPlan) -> Tensor:
        """Write and attend under an existing plan."""
        case = self.case
        backend.write_kv(case.layer, self.new_key_values(), plan)
        padding = torch.zeros(case.num_padding_rows, case.num_heads, case.head_dim, dtype=case.dtype)
        output = backend.attend(case.layer, torch.cat([self.query, padding]), case.spec, plan)
        return output[: len(self.query)]

    def expected(self) -> Tensor:
        """Compute the result densely in float64, one query and head at a time."""
        case, rows, row = self.case, [], 0
        for s, seq in enumerate(case.seqs):
            for position in range(seq.seq_len - seq.num_queries, seq.seq_len):
                rows.append(self._attend_token(s, position, self.query[row]))
                row += 1
        return torch.stack(rows)

    def _attend_token(self, sequence: int, position: int, query: Tensor) -> Tensor:
        case = self.case
        seen = [j for j in range(position + 1) if self._sees(position, j)]
        key, value = case.keys[sequence][seen].double(), case.values[sequence][seen].double()
        group = case.num_heads // case.num_kv_heads
        heads = []
        for head in range(case.num_heads):
            scores = key[:, head // group] @ query[head].double() * case.spec.scale
            heads.append(torch.softmax(scores, dim=0) @ value[:, head // group])
        return torch.stack(heads)

    def _sees(self, position: int, key_position: int) -> bool:
        case = self.case
        if case.sliding_window is not None:
            return position - key_position < case.sliding_window
        if case.chunk_size is not None:
            return position // case.chunk_size == key_position // case.chunk_size
        return True


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def _check(case: Case, backend_type: type[AttentionBackend], layout: KVLayout) -> None:
    step = PagedStep(case, layout)
    actual = step.run(backend_type)
    assert actual.dtype == case.dtype
    torch.testing.assert_close(actual.double(), step.expected(), rtol=0, atol=TOLERANCE[case.dtype])


@pytest.fixture(scope="session")
def paged():
    """Names for the tests: ``paged.Case``, ``paged.Seq``, ``paged.Step``, ``paged.check(case, backend_type, layout)``."""

    class Names:
        pass

    names = Names()
    names.Case, names.Seq, names.Step, names.check, names.TOLERANCE = Case, Seq, PagedStep, _check, TOLERANCE
    return names
