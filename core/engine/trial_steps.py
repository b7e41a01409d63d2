"""Steps that serve no request: they show how much memory a step takes, or how long it takes.

They compute over a pool of one block of their own, which all tokens write; their results mean nothing.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from core.attention.base import AttentionBackend, AttentionBatch, KVLayout, PagedKVCache
from core.attention.torch_kernels import upload
from core.config_workers import SchedulerSection
from core.engine.kv_pool import pool_shape
from core.engine.sampler import launch_sampling
from core.engine.sampling_state import SamplingRows
from core.engine.step_watch import StepSize
from core.kv.spec import KVCacheConfig
from core.model.decoder import Decoder

_TABLE_ENTRIES = 128 << 10  # of measured steps with long sequences, but for a longest one; attention cuts larger steps, too
_NUM_LOGPROBS = 20
_USUAL_TOKENS = 16  # few: each start of a worker on a CPU takes that time


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, backend: type[AttentionBackend], config: KVCacheConfig, section: SchedulerSection, dtype: torch.dtype
) -> None:
    """Compute as many tokens as a step may have, and sample as many rows."""
    device = decoder.device
    attention = _over_one_block(backend, config, dtype, device)
    num_tokens, longest = section.step_tokens, decoder.arch.max_position_embeddings
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


def run_usual_step(
    decoder: Decoder, backend: type[AttentionBackend], config: KVCacheConfig, section: SchedulerSection, dtype: torch.dtype
) -> StepSize:
    """Compute one short prompt, and return the size of that step."""
    size = StepSize(min(_USUAL_TOKENS, section.step_tokens, decoder.arch.max_position_embeddings), num_requests=1)
    small = msgspec.structs.replace(section, max_num_batched_tokens=size.num_tokens, max_num_seqs=1)
    run_largest_step(decoder, backend, config, small, dtype)
    return size


@torch.inference_mode()
def run_longest_prefills(
    decoder: Decoder,
    backend: type[AttentionBackend],
    config: KVCacheConfig,
    section: SchedulerSection,
    dtype: torch.dtype,
    longest: int,
) -> None:
    """Compute the tokens of a step for as many sequences as there may be, behind long prefixes, which attention may gather.

    The last sequence has ``longest`` tokens.
    """
    device, size = decoder.device, config.groups[0].spec.block_size
    num_seqs = max(1, min(section.max_num_seqs, section.step_tokens // 2))  # a single query would be one of decode
    ends = np.arange(num_seqs + 1) * section.step_tokens // num_seqs
    num_queries = np.minimum(np.diff(ends), longest)
    seq_lens = np.clip(_TABLE_ENTRIES // num_seqs * size, num_queries, longest)
    seq_lens[-1] = longest
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(num_queries, seq_lens, strict=True)])
    batch = AttentionBatch(
        query_start_loc=np.concatenate(([0], num_queries.cumsum())).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=np.zeros((num_seqs, -(-longest // size)), dtype=np.int32),
        slot_mapping=positions % size,
    )
    attention = _over_one_block(backend, config, dtype, device)
    plans = [attention.plan(batch)] * len(config.groups)
    decoder.forward(torch.zeros(len(positions), dtype=torch.int32, device=device), upload(positions, device), attention, plans)


@torch.inference_mode()
def run_widest_decode(
    decoder: Decoder,
    backend: type[AttentionBackend],
    config: KVCacheConfig,
    section: SchedulerSection,
    dtype: torch.dtype,
    longest: int,
) -> None:
    """Compute one token for as many sequences as there may be, each as long as it may be, at most ``longest``."""
    device, size = decoder.device, config.groups[0].spec.block_size
    attention = _over_one_block(backend, config, dtype, device)
    num_seqs = min(section.max_num_seqs, section.step_tokens)
    width = min(-(-longest // size), max(1, _TABLE_ENTRIES // num_seqs))
    seq_len = min(longest, width * size)
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
