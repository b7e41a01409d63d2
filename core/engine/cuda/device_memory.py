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

import torch

from core.errors import ConfigError
from core.log import event

logger = logging.getLogger(__name__)

_CONTEXT_BYTES = 768 << 20  # CUDA's context, kernels and cuBLAS workspaces: not in torch's own account
# Recorded decode steps share what the largest of them takes, which is measured; this is for what each of them has of its own:
# the driver's nodes, inputs, tables, masks, results. On an H100, with 32 layers, 122 graphs of "pages" took 678 MiB in all and
# 11 of "triton" 76. A model with several masks has more tables.
_GRAPH_BYTES = 512 << 20


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
            f"largest step {memory.activations} (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, "
            f"model.max_model_len), recorded decode steps {graphs} (model.cuda_graphs)",
            param="cache.gpu_memory_utilization",
        )
    return left


def memory_before_steps(device: torch.device) -> DeviceMemory:
    """Return what is known before any step has run; torch's cache is emptied."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, free=free, weights=torch.cuda.memory_allocated(device), activations=0)


def measure(device: torch.device, run_largest: Callable[[], None], run_decode: Callable[[], None]) -> DeviceMemory:
    """Run a largest step and a widest decode step and return the memory they took; torch's cache is emptied.

    Raises:
        ConfigError: the device has not enough memory for one of them.
    """
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
    try:
        run()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest step does not fit the device's memory beside {before} bytes of weights: lower "
            f"scheduler.max_num_batched_tokens, scheduler.max_num_seqs or model.max_model_len ({error})",
            param="scheduler.max_num_batched_tokens",
        ) from error
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
