"""How much of a CUDA device the KV pool may take: what is left once weights and the largest step have been measured.

Owns the measurement and the arithmetic. Does not know blocks (``core.engine.kv_sizing``). Measured once, after
loading the weights and before allocating the pool.

    | context, kernels | weights | largest step | graphs | KV pool |   other processes   |
    `------------- gpu_memory_utilization of the device -----------'
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from core.attention.base import AttentionBackend, AttentionBatch, KVLayout, PagedKVCache
from core.attention.torch_kernels import upload
from core.config import SchedulerSection
from core.engine.kv_pool import pool_shape
from core.engine.sampler import launch_sampling
from core.engine.sampling_state import SamplingRows
from core.errors import ConfigError
from core.kv.spec import KVCacheConfig
from core.log import event
from core.model.decoder import Decoder

logger = logging.getLogger(__name__)

_CONTEXT_BYTES = 768 << 20  # CUDA's context, kernels and cuBLAS workspaces: not in torch's own account
# Recorded decode steps share what the largest of them takes, which is measured; this is for what each of them has of its own:
# inputs, tables, masks, results. Reckoned: 228 graphs of at most 32K table entries each (max_graph_blocks) have 1.2 million, of
# 25 (pages) or 72 bytes (gather, whose masks have a byte per token of a block of 64). A model with several masks has more.
_GRAPH_BYTES = 256 << 20
_DECODE_BLOCKS = 128 << 10  # table entries of the decode step that is measured; attention takes larger ones in slices as well
_NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes: of the device, free on it now, of the weights, and of the largest steps.

    ``activations``: of any step; ``decode``: of the forward pass of a widest decode step.
    """

    total: int
    free: int
    weights: int
    activations: int
    decode: int = 0


def pool_bytes(memory: DeviceMemory, utilization: float, *, has_graphs: bool = True) -> int:
    """Return what the pool may take; see the module's diagram.

    Raises:
        ConfigError: nothing is left; says what takes it.
    """
    allowed = int(memory.total * utilization)
    graphs = memory.decode + _GRAPH_BYTES if has_graphs else 0
    reserved = memory.activations + graphs
    left = min(allowed - _CONTEXT_BYTES - memory.weights, memory.free) - reserved
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV pool: {allowed} of {memory.total} bytes are this worker's "
            f"(cache.gpu_memory_utilization = {utilization}), {memory.free} are free, the weights take {memory.weights}, the "
            f"largest step {memory.activations} (scheduler.max_num_batched_tokens), recorded decode steps {graphs} "
            "(model.cuda_graphs)",
            param="cache.gpu_memory_utilization",
        )
    return left


def measure(device: torch.device, run_largest: Callable[[], None], run_decode: Callable[[], None]) -> DeviceMemory:
    """Run a largest step and a widest decode step and return the memory they took; torch's cache is emptied."""
    weights = torch.cuda.memory_allocated(device)
    decode = _peak(device, run_decode)
    activations = max(decode, _peak(device, run_largest))
    free, total = torch.cuda.mem_get_info(device)
    memory = DeviceMemory(total=total, free=free, weights=weights, activations=activations, decode=decode)
    logger.info(event("device_memory", total=total, free=free, weights=weights, activations=activations, decode=decode))
    return memory


def _peak(device: torch.device, run: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, backend: type[AttentionBackend], config: KVCacheConfig, section: SchedulerSection, dtype: torch.dtype
) -> None:
    """Compute as many tokens as a step may have, over a pool of one block that all of them write, and sample as many rows.

    The result means nothing; the memory that it takes is that of any step.
    """
    device = decoder.device
    attention = _over_one_block(backend, config, dtype, device)
    num_tokens, longest = section.max_num_batched_tokens, decoder.arch.max_position_embeddings
    ends = np.minimum(np.arange(longest, num_tokens + longest, longest), num_tokens)
    starts = np.concatenate(([0], ends[:-1]))
    positions = np.arange(num_tokens) - np.repeat(starts, ends - starts)
    size = config.groups[0].spec.block_size
    batch = AttentionBatch(
        query_start_loc=np.concatenate(([0], ends)).astype(np.int32),
        seq_lens=(ends - starts).astype(np.int32),
        block_tables=np.zeros((len(ends), -(-min(longest, num_tokens) // size)), dtype=np.int32),
        slot_mapping=positions % size,
    )
    plans = [attention.plan(batch)] * len(config.groups)
    rows = np.arange(min(section.max_num_seqs, num_tokens))
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    hidden = decoder.forward(input_ids, upload(positions, device), attention, plans, upload(rows, device))
    sampling = SamplingRows(len(rows))
    sampling.top_p[:] = 0.9
    sampling.num_logprobs[:] = _NUM_LOGPROBS
    launch_sampling(decoder.compute_logits(hidden), sampling, rows)


@torch.inference_mode()
def run_widest_decode(
    decoder: Decoder, backend: type[AttentionBackend], config: KVCacheConfig, section: SchedulerSection, dtype: torch.dtype
) -> None:
    """Compute one token for as many sequences as there may be, each as long as it may be, over a pool of one block."""
    device, size = decoder.device, config.groups[0].spec.block_size
    attention = _over_one_block(backend, config, dtype, device)
    num_seqs = min(section.max_num_seqs, section.max_num_batched_tokens)
    width = min(-(-decoder.arch.max_position_embeddings // size), max(1, _DECODE_BLOCKS // num_seqs))
    seq_len = min(decoder.arch.max_position_embeddings, width * size)
    batch = AttentionBatch(
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=np.full(num_seqs, seq_len, dtype=np.int32),
        block_tables=np.zeros((num_seqs, width), dtype=np.int32),
        slot_mapping=np.full(num_seqs, (seq_len - 1) % size),
    )
    plans = [attention.plan(batch)] * len(config.groups)
    input_ids = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    decoder.forward(input_ids, upload(np.full(num_seqs, seq_len - 1), device), attention, plans)


def _over_one_block(
    backend: type[AttentionBackend], config: KVCacheConfig, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    pool = torch.zeros((1, *pool_shape(config, backend.preferred_layout)[1:]), dtype=dtype, device=device)
    return backend(PagedKVCache(pool, KVLayout(backend.preferred_layout)))
