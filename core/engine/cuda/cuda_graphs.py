"""Decode steps recorded once and replayed: one launch instead of some ten per layer.

Owns the recorded graphs, the tensors that they read and write, and the padding of a step to the next recorded size. Does not
know CUDA beyond ``CudaRecorder``; ``AttentionBackend.static_plan`` owns attention's part of the tensors.

A step of one token per sequence is padded to the next batch size. A padding row is a sequence of length 1 in the null block: it
writes there, sees itself only, and its output is ignored:

    rows      | sequences of the step | padding ... |      recorded size
    slot      | their own             | 0           |
    length    | their own             | 1           |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec
from core.attention.torch_kernels import refill
from core.engine.input_batch import StepInputs
from core.errors import ConfigError
from core.log import event

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Sequence[AttentionPlan]], Tensor]
_LARGEST_BATCH = 512  # sequences; larger steps keep the device busy without graphs


class GraphRecorder(Protocol):
    """Records what a function launches (``CudaRecorder``; tests have one that calls the function again)."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Return the tensor that the function fills, and what fills it again from what its inputs hold by then."""
        ...

    def give_back(self) -> None:
        """Drop all recorded graphs and free their memory."""
        ...


class CudaRecorder:
    """CUDA graphs of one device that share one pool of memory: record the largest first.

    All are recorded on one stream: cuBLAS keeps memory for each stream that it has seen, 32 MiB on Hopper.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """See ``GraphRecorder``. The first run, outside of the graph, makes what libraries make at first use."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, those of a connector, is no part of the recording and does not end it.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(here), recording:  # the outer block leaves the stream, which a recording that fails may not
            output = run()
        return output, graph.replay

    def give_back(self) -> None:
        """See ``GraphRecorder``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the recorded batch sizes, ascending: 1, 2, 4, 8, then every 8 up to 64, then every 32, and the largest itself."""
    limit = min(max_num_seqs, _LARGEST_BATCH)
    sizes = {1, 2, 4, *range(8, 65, 8), *range(96, limit + 1, 32), limit}
    return tuple(sorted(size for size in sizes if size <= limit))


@dataclass(slots=True)
class _Graph:
    """One recorded size. input_ids: int32 ``[B]``, positions: int64 ``[B]``, hidden ``[B, hidden_size]``."""

    input_ids: Tensor
    positions: Tensor
    plans: list[AttentionPlan]
    hidden: Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """The recorded steps of one decoder and pool.

    ``specs``: of the layers of each KV cache group. ``max_blocks``: widest block table of each group. Nothing is recorded until
    ``record``; without it, and for steps that fit no recorded size, ``run`` returns None.
    """

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        recorder: GraphRecorder,
        specs: Sequence[Sequence[AttentionSpec]],
        max_blocks: Sequence[int],
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._recorder = recorder
        self._specs = specs
        self._max_blocks = max_blocks
        self._batch_sizes: tuple[int, ...] = ()
        self._widths: tuple[int, ...] = ()  # of the widest group's tables
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def record(self, sizes: Sequence[int]) -> None:
        """Record every batch size at every width, the largest first, so that the others fit into its memory.

        Sizes that do not pay for the backend are left out. A backend whose work cannot be recorded, a layer that it
        cannot record, or a recording that fails, for want of memory too, leaves every step to eager execution; the log says so.
        """
        self._widths = self._attention.graph_widths(max(self._max_blocks))
        reason = "" if self._widths else f"attention backend {self._attention.name} decides on the host"
        try:
            for size in sorted(sizes, reverse=True):
                for width in reversed(self._widths_for(size)):
                    self._graphs[size, width] = self._record(size, width)
        except (ConfigError, RuntimeError) as error:  # torch's errors of memory and of CUDA are RuntimeErrors
            reason = str(error) or type(error).__name__
        if reason:
            self._graphs.clear()
            self._recorder.give_back()
            logger.warning(event("decode_graphs_off", reason=reason))
            return
        self._batch_sizes = tuple(sorted(sizes))
        logger.info(event("decode_graphs", num_graphs=len(self), batch_sizes=",".join(map(str, self._batch_sizes))))

    def run(self, inputs: StepInputs, input_ids: Tensor) -> Tensor | None:
        """Return the hidden states ``[num_seqs, hidden_size]`` of a step, in a tensor that the next call overwrites.

        None if the step is not one token per sequence, or larger than what is recorded. ``input_ids``: int32 ``[num_tokens]``
        on the device; the host may not know all of them.
        """
        num_seqs = len(inputs.rows)
        size = next((size for size in self._batch_sizes if size >= num_seqs), None)
        if size is None or len(inputs.input_ids) != num_seqs:
            return None
        needed = max(batch.block_tables.shape[1] for batch in inputs.batches)
        graph = self._graphs.get((size, next(width for width in self._widths if width >= needed)))
        if graph is None:
            return None
        graph.input_ids[:num_seqs].copy_(input_ids)  # of padding rows any token will do
        refill(graph.positions, padded(inputs.positions, size))
        for plan, batch in zip(graph.plans, inputs.batches, strict=True):
            self._attention.refill_plan(plan, padded_batch(batch, size))
        graph.replay()
        return graph.hidden[:num_seqs]

    def _widths_for(self, size: int) -> list[int]:
        limit = self._attention.max_graph_blocks
        return [width for width in self._widths if limit is None or size * width <= limit]

    def _record(self, size: int, width: int) -> _Graph:
        device = self._attention.cache.device
        input_ids = torch.zeros(size, dtype=torch.int32, device=device)
        positions = torch.zeros(size, dtype=torch.int64, device=device)
        plans = [
            self._attention.static_plan(size, min(width, widest), specs)
            for widest, specs in zip(self._max_blocks, self._specs, strict=True)
        ]
        hidden, replay = self._recorder.record(lambda: self._forward(input_ids, positions, plans))
        return _Graph(input_ids, positions, plans, hidden, replay)


def padded(array: npt.NDArray[np.generic], size: int) -> npt.NDArray[np.generic]:
    """Return ``array`` ``[n, ...]`` with zeros up to ``[size, ...]``."""
    result = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
    result[: len(array)] = array
    return result


def padded_batch(batch: AttentionBatch, size: int) -> AttentionBatch:
    """Return a decode step with padding rows up to ``size`` sequences."""
    seq_lens = np.ones(size, dtype=np.int32)
    seq_lens[: len(batch.seq_lens)] = batch.seq_lens
    return AttentionBatch(
        query_start_loc=np.arange(size + 1, dtype=np.int32),
        seq_lens=seq_lens,
        block_tables=padded(batch.block_tables, size).astype(np.int32),
        slot_mapping=padded(batch.slot_mapping, size).astype(np.int64),
        group_id=batch.group_id,
    )
