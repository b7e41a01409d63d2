"""The CPU backend: decode rows through one kernel, prefill chunks through another, in any mixture.

Owns: the split of a batch between the kernels. Does not know: how any of them works.

The rule: a sequence with one query goes to ``CompiledDecode`` if it was built and takes the heads, else to ``DecodeRows`` if
the pool is fp32 (``sampled_addmm`` has no bf16 on the CPU); everything else to ``CompiledPrefill`` under the same condition,
else to ``GatherKernel``. In this order they were the fastest at every batch size (1 to 16) and context (256 to 4096) that was
measured, so the rule needs no thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from core.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    BatchedSequence,
    KVLayout,
    PagedKVCache,
    split_sequences,
)
from core.attention.compiled_decode import CompiledDecode, CompiledDecodeIndex, can_compile_decode
from core.attention.compiled_prefill import CompiledPrefill, CompiledPrefillIndex, can_compile_prefill
from core.attention.compiled_write import CompiledWrite, can_compile_write
from core.attention.decode_rows import DecodeIndex, DecodeRows
from core.attention.gathered import GatherIndex, GatherKernel


@dataclass(slots=True)
class MaskedStep:
    """One step under one mask. ``decode_rows``: int64, the query rows of the decode sequences, or None if all rows are."""

    decode: CompiledDecodeIndex | DecodeIndex | None
    decode_rows: Tensor | None
    prefills: list[CompiledPrefillIndex | GatherIndex]


@dataclass(slots=True)
class PagedCpuPlan(AttentionPlan):
    """The batch's sequences, and one ``MaskedStep`` per distinct layer spec, made when a layer first asks for it."""

    sequences: list[BatchedSequence]
    steps: dict[AttentionSpec, MaskedStep] = field(default_factory=dict)


class PagedCpuBackend(AttentionBackend):
    """Paged attention with plain torch operators."""

    name = "paged_cpu"
    preferred_layout = KVLayout.HND
    device_types = frozenset({"cpu"})
    may_be_compiled: ClassVar[bool] = True  # False: torch's operators even where the C kernels were built

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        is_compiled = self.may_be_compiled and can_compile_prefill(cache)
        self._prefill: CompiledPrefill | GatherKernel = CompiledPrefill(cache) if is_compiled else GatherKernel(cache)
        self._decode = _decode_kernel(cache, self.may_be_compiled)
        self._write = CompiledWrite(cache) if self.may_be_compiled and can_compile_write(cache) else None

    @property
    def kernels(self) -> dict[str, str]:
        """See ``AttentionBackend.kernels``."""
        is_compiled = {
            "decode": isinstance(self._decode, CompiledDecode),
            "prefill": isinstance(self._prefill, CompiledPrefill),
            "write": self._write is not None,
        }
        return {part: "compiled" if compiled else "torch" for part, compiled in is_compiled.items()}

    def plan(self, batch: AttentionBatch) -> PagedCpuPlan:
        """See ``AttentionBackend.plan``."""
        if self._write is not None:
            self._write.check(batch.slot_mapping)
        return PagedCpuPlan(self._write_rows(batch), split_sequences(batch, self.cache.block_size))

    def write_kv(self, layer: int, key_value: Tensor, plan: AttentionPlan) -> None:
        """See ``AttentionBackend.write_kv``."""
        if self._write is not None and self._write.takes(key_value):
            self._write.write(layer, key_value, plan.write_rows)
        else:
            super().write_kv(layer, key_value, plan)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        assert isinstance(plan, PagedCpuPlan)
        step = plan.steps.get(spec)
        if step is None:
            step = plan.steps[spec] = self._masked_step(plan.sequences, spec)
        if step.decode is not None and step.decode_rows is None:
            return self._attend_decode(layer, query, spec.scale, step.decode)
        output = query.new_empty(query.shape)
        if step.decode is not None and step.decode_rows is not None:
            decoded = self._attend_decode(layer, query[step.decode_rows], spec.scale, step.decode)
            output.index_copy_(0, step.decode_rows, decoded)
        for index in step.prefills:
            self._attend_prefill(layer, query[index.rows], index, output[index.rows])
        return output

    def _attend_decode(self, layer: int, query: Tensor, scale: float, index: CompiledDecodeIndex | DecodeIndex) -> Tensor:
        exact = query if query.dtype is self.cache.dtype else query.to(self.cache.dtype)
        if isinstance(self._decode, CompiledDecode):
            assert isinstance(index, CompiledDecodeIndex)
            output = self._decode.attend(layer, exact, index)
            return output if exact is query else output.to(query.dtype)
        assert self._decode is not None
        assert isinstance(index, DecodeIndex)
        return self._decode.attend(layer, exact, scale, index).to(query.dtype)

    def _attend_prefill(self, layer: int, query: Tensor, index: CompiledPrefillIndex | GatherIndex, output: Tensor) -> None:
        if isinstance(self._prefill, CompiledPrefill):
            assert isinstance(index, CompiledPrefillIndex)
            self._prefill.attend(layer, query, index, output)
            return
        assert isinstance(index, GatherIndex)
        self._prefill.attend(layer, query, index, output)

    def _masked_step(self, sequences: list[BatchedSequence], spec: AttentionSpec) -> MaskedStep:
        decoding = [s for s in sequences if s.num_queries == 1] if self._decode is not None else []
        others = [s for s in sequences if s.num_queries > 1 or self._decode is None]
        decode = self._decode.index(decoding, spec) if self._decode is not None and decoding else None
        rows = torch.tensor([s.query_start for s in decoding]) if others and decoding else None
        return MaskedStep(decode, rows, [self._prefill.index(s, spec) for s in others])


def _decode_kernel(cache: PagedKVCache, may_be_compiled: bool) -> CompiledDecode | DecodeRows | None:
    if may_be_compiled and can_compile_decode(cache):
        return CompiledDecode(cache)
    return DecodeRows(cache) if cache.dtype is torch.float32 else None
