"""``kvferry doctor memory``: the KV pool of a worker with these settings, and how many requests fit into it.

Owns the display. The numbers come from ``core.engine.kv_sizing``, as for the engine itself; no memory is allocated and no
weight is read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from core.config import KVFerryConfig
from core.engine.kv_sizing import KVCacheSizing, size_kv_cache
from core.errors import ConfigError
from core.kv.spec import ChunkedLocalAttentionSpec, KVCacheGroup, SlidingWindowSpec
from kvferry import options


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One KV cache group: its attention, its layers, and the most blocks that one request holds of it."""

    attention: str
    layers: tuple[int, ...]
    bytes_per_token: int
    max_blocks_per_request: int
    max_bytes_per_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The KV pool of a worker, without the null block; ``concurrency`` is the number of requests of length ``context``."""

    model: str
    dtype: str
    groups: tuple[GroupReport, ...]
    block_size: int
    block_bytes: int
    num_blocks: int
    pool_bytes: int
    max_in_flight_tokens: int
    max_model_len: int
    context: int
    blocks_per_request: int
    concurrency: int
    tokens_that_fit: int


def report_memory(config: KVFerryConfig, context: int | None = None) -> MemoryReport:
    """Size the KV cache as a worker of this configuration does; ``context`` in tokens, None for the longest possible.

    Raises:
        ConfigError: the settings do not fit the model, or no request can be as long as ``context``.
    """
    from core.engine.build import device_of, dtype_of, resolve_scheduling
    from core.model.arch import parse_arch
    from core.model.hub import resolve_model

    files = resolve_model(config.model.name, Path(config.model.cache_dir))
    device = device_of(config.model)
    arch = parse_arch(files.config)
    dtype = dtype_of(config.model, arch, device)
    sizing = size_kv_cache(resolve_scheduling(config, device), arch, dtype.itemsize)
    return _report(files.name, str(dtype).removeprefix("torch."), sizing, context or sizing.max_model_len)


def _report(model: str, dtype: str, sizing: KVCacheSizing, context: int) -> MemoryReport:
    if not 0 < context <= sizing.max_model_len:
        raise ConfigError(
            f"no request can have {context} tokens: model and KV pool allow {sizing.max_model_len}", param="context"
        )
    pool = sizing.config
    blocks_per_request = sizing.num_blocks_of(context)
    concurrency = (pool.num_blocks - 1) // blocks_per_request
    return MemoryReport(
        model=model,
        dtype=dtype,
        groups=tuple(_group_report(group, sizing) for group in pool.groups),
        block_size=pool.groups[0].spec.block_size,
        block_bytes=pool.block_bytes,
        num_blocks=pool.num_blocks - 1,
        pool_bytes=pool.num_blocks * pool.block_bytes,
        max_in_flight_tokens=sizing.max_in_flight_tokens,
        max_model_len=sizing.max_model_len,
        context=context,
        blocks_per_request=blocks_per_request,
        concurrency=concurrency,
        tokens_that_fit=concurrency * context,
    )


def _group_report(group: KVCacheGroup, sizing: KVCacheSizing) -> GroupReport:
    spec, bounds = group.spec, (sizing.max_in_flight_tokens, sizing.max_model_len)
    return GroupReport(
        attention=_attention_of(group),
        layers=group.layer_indices,
        bytes_per_token=len(group.layer_indices) * spec.page_size_bytes // spec.block_size,
        max_blocks_per_request=spec.max_admission_blocks_per_request(*bounds),
        max_bytes_per_request=len(group.layer_indices) * spec.max_memory_usage_bytes(*bounds),
    )


def _attention_of(group: KVCacheGroup) -> str:
    if isinstance(group.spec, SlidingWindowSpec):
        return f"window of {group.spec.sliding_window}"
    if isinstance(group.spec, ChunkedLocalAttentionSpec):
        return f"chunks of {group.spec.attention_chunk_size}"
    return "full"


def memory(
    model: options.Model = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of a request; default the longest that fits.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Show the KV pool of a worker with these settings: groups, blocks, and how many requests of a length fit at once."""
    found = report_memory(options.read_config(config, assignments, {"model.name": model}), context)
    print(json.dumps(asdict(found)) if as_json else show(found))


def show(report: MemoryReport) -> str:
    """Return the report as text."""
    lines = [
        f"model                {report.model}, keys and values in {report.dtype}",
        f"KV pool              {report.num_blocks:,} blocks of {report.block_size} tokens and {report.block_bytes:,} bytes, "
        f"{report.pool_bytes / 2**20:,.1f} MiB in all",
    ]
    for number, group in enumerate(report.groups):
        layers = ", ".join(map(str, group.layers))
        most = f"{group.max_blocks_per_request:,} blocks ({group.max_bytes_per_request / 2**20:,.1f} MiB)"
        lines.append(
            f"group {number:<14} {group.attention:<16} {group.bytes_per_token:>9,} bytes per token, at most {most} per "
            f"request; layers {layers}"
        )
    return "\n".join(
        [
            *lines,
            f"bytes per token      {sum(group.bytes_per_token for group in report.groups):,} where every group keeps the token",
            f"longest request      {report.max_model_len:,} tokens, {report.max_in_flight_tokens:,} of them in flight",
            f"requests at once     {report.concurrency:,} of {report.context:,} tokens, {report.blocks_per_request:,} blocks "
            f"each; {report.tokens_that_fit:,} tokens in all",
        ]
    )
