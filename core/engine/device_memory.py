"""How much of a CUDA device the KV pool may take: what is left once weights and the largest step have been measured.

Owns the measurement and the arithmetic. Does not know blocks (``core.engine.kv_sizing``). Called by ``core.engine.build``
once, between the loading of the weights and the allocation of the pool.

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
from core.engine.kv_cache import pool_shape
from core.errors import ConfigError
from core.kv.spec import KVCacheConfig
from core.log import event
from core.model.decoder import Decoder

logger = logging.getLogger(__name__)

_CONTEXT_BYTES = 768 << 20  # CUDA's context, kernels and cuBLAS workspaces: not in torch's own account
_GRAPH_BYTES = 256 << 20  # recorded decode steps: they share what the largest of them takes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes: of the device, free on it now (whoever uses the rest), of the weights, and of a largest step beside them."""

    total: int
    free: int
    weights: int
    activations: int


def pool_bytes(memory: DeviceMemory, utilization: float) -> int:
    """Return what the pool may take; see the module's diagram.

    Raises:
        ConfigError: nothing is left; says what takes it.
    """
    allowed = int(memory.total * utilization)
    reserved = memory.activations + _GRAPH_BYTES
    left = min(allowed - _CONTEXT_BYTES - memory.weights, memory.free) - reserved
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV pool: {allowed} of {memory.total} bytes are this worker's "
            f"(cache.gpu_memory_utilization = {utilization}), {memory.free} are free, the weights take {memory.weights}, the "
            f"largest step {memory.activations} (scheduler.max_num_batched_tokens)",
            param="cache.gpu_memory_utilization",
        )
    return left


def measure(device: torch.device, run_largest: Callable[[], None]) -> DeviceMemory:
    """Run a largest step and return what it took; what it has left in torch's cache is given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    run_largest()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    memory = DeviceMemory(total=total, free=free, weights=weights, activations=activations)
    logger.info(event("device_memory", total=total, free=free, weights=weights, activations=activations))
    return memory


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, backend: type[AttentionBackend], config: KVCacheConfig, section: SchedulerSection, dtype: torch.dtype
) -> None:
    """Compute as many tokens as a step may have, and logits of as many rows, over a pool of one block that all of them write.

    The result means nothing; the memory that it takes is that of any step.
    """
    device = decoder.device
    shape = pool_shape(config, backend.preferred_layout)
    pool = torch.zeros((1, *shape[1:]), dtype=dtype, device=device)
    attention = backend(PagedKVCache(pool, KVLayout(backend.preferred_layout)))
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
    rows = upload(np.arange(min(section.max_num_seqs, num_tokens)), device)
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    hidden = decoder.forward(input_ids, upload(positions, device), attention, plans, rows)
    decoder.compute_logits(hidden).softmax(-1)
