"""The choice of the attention backend, made once at start and logged.

Owns: the order of preference per device, and the probe that a kernel must pass before it serves. Does not know: how kernels
work. The choice comes before the pool is allocated, because the pool's layout depends on it.

The probe runs a mixed batch (decode rows and a prefill chunk over a cached prefix, scattered, shared and partly filled pages)
and one of whole prompts, with the actual dtype, heads, block size, number of layers (hence strides) and masks, and compares
with the reference. The slots that no query of the mixed batch sees, those left of a window or chunk among them, hold NaN, so a
kernel that reads them fails, too.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from core.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    KVLayout,
    PagedKVCache,
    split_sequences,
)
from core.attention.batched import BatchedSdpaBackend
from core.attention.paged_cpu import PagedCpuBackend
from core.attention.paged_triton import TritonBackend
from core.attention.pages import PagesBackend
from core.attention.sdpa import SdpaBackend
from core.attention.varlen import VarlenBackend
from core.errors import ConfigError, KVFerryError
from core.log import event

logger = logging.getLogger(__name__)

# Largest absolute difference to the reference on unit-normal inputs: rounding of the result, with room for another order of
# sums.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# How kernels report that they cannot run: torch's own checks, missing optional packages, an older signature.
_REFUSALS = (KVFerryError, RuntimeError, TypeError, ValueError, ImportError, AssertionError)


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The engine's requirements of a backend. ``specs``: the distinct layer specs of the model."""

    device: torch.device
    dtype: torch.dtype
    specs: tuple[AttentionSpec, ...]
    num_layers: int
    block_size: int


CANDIDATES: tuple[type[AttentionBackend], ...] = (
    PagedCpuBackend,
    VarlenBackend,
    TritonBackend,
    PagesBackend,
    BatchedSdpaBackend,
    SdpaBackend,
)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The choice that the engine builds its pool for: the backend, with its ``preferred_layout``, and the block size."""

    backend: type[AttentionBackend]
    block_size: int  # tokens


def choose_attention(
    problem: AttentionProblem,
    name: str = "auto",
    candidates: tuple[type[AttentionBackend], ...] = CANDIDATES,
) -> AttentionChoice:
    """Return the backend to use, and the block size: the problem's, or a multiple of it if the kernel requires one.

    ``auto`` takes the first candidate for this type of device that passes the probe, and logs why others did not. A backend
    named in the settings is probed, too, but never replaced. Raises: ConfigError if the name is unknown, nothing passes, or a
    kernel may leave the device unusable.
    """
    if name == "auto":
        eligible = [c for c in candidates if not c.device_types or problem.device.type in c.device_types]
    else:
        eligible = [c for c in candidates if c.name == name]
    if not eligible:
        raise ConfigError(f"no attention backend {name!r}; known: auto, {', '.join(c.name for c in candidates)}")
    failures = []
    for candidate in eligible:
        larger = (n for n in candidate.larger_block_sizes if n > problem.block_size and n % problem.block_size == 0)
        sizes = [problem.block_size, *larger]
        refused: list[str] = []
        for size in sizes:
            failure = probe(candidate, replace(problem, block_size=size))
            if failure is None:
                return _chosen(candidate, replace(problem, block_size=size))
            refused.append(failure if len(sizes) == 1 else f"blocks of {size}: {failure}")
        reason = "; ".join(dict.fromkeys(refused))
        logger.warning(event("attention_backend_refused", backend=candidate.name, reason=reason))
        failures.append(f"{candidate.name}: {reason}")
        if _is_lost(problem.device):
            raise ConfigError(
                f"attention backend {candidate.name} has made {problem.device} useless to this process ({reason}); "
                "choose another one by model.attention",
                param="model.attention",
            )
    raise ConfigError(f"no attention backend can serve here ({'; '.join(failures)})")


def probe(backend_type: type[AttentionBackend], problem: AttentionProblem) -> str | None:
    """Run the backend against the reference; return why it must not be used, or None if it agrees."""
    try:
        errors = [_probe_spec(backend_type, problem, spec) for spec in problem.specs]
    except _REFUSALS as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    tolerance = _TOLERANCES.get(problem.dtype, _TOLERANCES[torch.float32])
    too_large = [error for error in errors if not error <= tolerance]  # NaN is one
    if not too_large:
        return None
    if any(map(math.isnan, too_large)):
        return "its result holds NaN, as slots that no query may see do: it must not read them, not even with weight 0"
    return f"differs from the reference by {too_large[0]:.2g} (allowed {tolerance:.2g})"


def _chosen(backend_type: type[AttentionBackend], problem: AttentionProblem) -> AttentionChoice:
    backend = backend_type(_probe_cache(backend_type.preferred_layout, problem, problem.specs[0]))
    logger.info(
        event(
            "attention_backend",
            backend=backend_type.name,
            layout=backend_type.preferred_layout,
            device=problem.device,
            dtype=problem.dtype,
            block_size=problem.block_size,
            **backend.kernels,
        )
    )
    return AttentionChoice(backend_type, problem.block_size)


def _is_lost(device: torch.device) -> bool:
    """Return True if this process can no longer use a device, as after an error of a kernel on CUDA."""
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError:
        return True
    return False


def _probe_spec(backend_type: type[AttentionBackend], problem: AttentionProblem, spec: AttentionSpec) -> float:
    """Return the largest absolute difference to the reference, NaN if either result holds one."""
    generator = torch.Generator().manual_seed(0)
    batch, prefix_slots = _probe_batch(problem.block_size)
    cache = _probe_cache(backend_type.preferred_layout, problem, spec)
    spec = _tightened(spec, problem.block_size)
    prefix_slots = prefix_slots[np.isin(prefix_slots, _visible_slots(batch, spec, problem.block_size))]
    layer = problem.num_layers - 1

    def normal(num_tokens: int, *shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, spec.head_dim, generator=generator).to(problem.device, problem.dtype)

    reference, backend = SdpaBackend(cache), backend_type(cache)
    prefix_rows = cache.rows_of_slots(prefix_slots)
    reference.write_kv(layer, normal(len(prefix_slots), 2, spec.num_kv_heads), AttentionPlan(prefix_rows))
    differences = []
    for step in (batch, _whole_prompts(problem.block_size)):
        heads = normal(len(step.slot_mapping), spec.num_heads + 2 * spec.num_kv_heads)  # in one buffer, as the decoder has them
        query, key_value = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
        plan = backend.plan(step)
        backend.write_kv(layer, key_value.view(-1, 2, spec.num_kv_heads, spec.head_dim), plan)
        expected = reference.attend(layer, query, spec, reference.plan(step))
        differences.append((backend.attend(layer, query, spec, plan).float() - expected.float()).abs().max())
    return float(torch.stack(differences).max())


def _tightened(spec: AttentionSpec, block_size: int) -> AttentionSpec:
    """Return the spec with its window or chunk cut so that it affects the short probe sequences; chunks stay whole blocks."""
    return replace(
        spec,
        sliding_window=None if spec.sliding_window is None else min(spec.sliding_window, block_size // 2 + 1),
        chunk_size=None if spec.chunk_size is None else min(spec.chunk_size, block_size),
    )


def _visible_slots(batch: AttentionBatch, spec: AttentionSpec, block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots that any query of the batch sees: of a shared block, those that any of its sequences does."""
    seen = []
    for sequence in split_sequences(batch, block_size):
        positions = np.arange(spec.first_visible(sequence.first_position), sequence.seq_len)
        seen.append(sequence.block_ids[positions // block_size].astype(np.int64) * block_size + positions % block_size)
    return np.concatenate(seen)


def _probe_batch(block_size: int) -> tuple[AttentionBatch, npt.NDArray[np.int64]]:
    """Return three decode rows around a prefill chunk of three tokens, and the slots of the tokens cached before them.

    Blocks, out of order: [3] with 1 token, [2, 1] with block_size + 5 tokens, [4] with block_size - 1 tokens, and [2] again,
    shared, with block_size - 2 tokens.
    """
    slots_of_block = [np.arange(block * block_size, (block + 1) * block_size) for block in range(5)]
    chunk = np.concatenate((slots_of_block[2], slots_of_block[1][:5]))
    batch = AttentionBatch(
        query_start_loc=np.array([0, 1, 4, 5, 6], dtype=np.int32),
        seq_lens=np.array([1, block_size + 5, block_size - 1, block_size - 2], dtype=np.int32),
        block_tables=np.array([[3, 0], [2, 1], [4, 0], [2, 0]], dtype=np.int32),
        slot_mapping=np.concatenate(
            (slots_of_block[3][:1], chunk[-3:], slots_of_block[4][-2:-1], slots_of_block[2][-3:-2]),
        ),
    )
    return batch, np.concatenate((chunk[:-3], slots_of_block[4][:-2]))


def _whole_prompts(block_size: int) -> AttentionBatch:
    """Return two prompts from their first token on: block_size + 5 tokens in the blocks [1, 4], and 3 in [2]."""
    long, short = np.arange(block_size + 5), np.arange(3)
    slots = np.where(long < block_size, block_size + long, 3 * block_size + long)
    return AttentionBatch(
        query_start_loc=np.array([0, len(long), len(long) + len(short)], dtype=np.int32),
        seq_lens=np.array([len(long), len(short)], dtype=np.int32),
        block_tables=np.array([[1, 4], [2, 0]], dtype=np.int32),
        slot_mapping=np.concatenate((slots, 2 * block_size + short)),
    )


def _probe_cache(layout: KVLayout, problem: AttentionProblem, spec: AttentionSpec) -> PagedKVCache:
    heads_and_tokens = (spec.num_kv_heads, problem.block_size)
    inner = heads_and_tokens if layout is KVLayout.HND else heads_and_tokens[::-1]
    shape = (5, problem.num_layers, 2, *inner, spec.head_dim)
    return PagedKVCache(torch.full(shape, float("nan"), dtype=problem.dtype, device=problem.device), layout)
