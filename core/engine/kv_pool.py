"""The KV pool of a worker and its seals: one block-major run of memory, allocated once, shared by attention and connectors.

Owns the memory. Does not know which request holds which block (``core.kv``). On CPU the pool is an anonymous memory file, so
that a process of the same host can map it; every page is present before the first request, and stays mapped while the worker
serves.

    [num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]     HND; NHD swaps heads and tokens

The table of seals (``core.kv.seals``) lies in host memory on every device.

Block 0 is the null block. Slots past a sequence's end in its last block are zero: ``core.engine.runner`` zeroes a block in
the step that first writes into it, if that step does not fill it. So at most one block per sequence is cleared every
``block_size`` tokens (0.1 % of the time it takes to compute them), nothing has to be cleared at a handoff, and bytes that a
failed transfer has left in a freed block are gone before they can be read.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from core.attention.base import KVLayout, PagedKVCache
from core.block_copier import cuda_block_copier, on_side_stream
from core.config_types import HugePages
from core.digest import BlockDigester, TensorDigester
from core.engine.cuda.pinned_memory import pin_for_cuda
from core.errors import ConfigError
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import (
    DigestBlocks,
    SealTable,
    each_by_itself,
    layout_fingerprint,
    map_seal_memory,
    num_landing_rows,
    seal_memory_bytes,
)
from core.kv.spec import KVCacheConfig
from core.log import event
from core.memory_file import MemoryFile, create_memory_file, huge_page_stock
from core.peer_memory import CudaPeerMemory
from core.wire.kv import KVLayoutInfo

logger = logging.getLogger(__name__)

_POOL_FILE_NAME = "kvferry-kv"
_SEALS_FILE_NAME = "kvferry-seals"


def layout_info(config: KVCacheConfig, dtype: torch.dtype, layout: KVLayout) -> KVLayoutInfo:
    """Return what two workers compare before one reads the other's blocks."""
    spec = config.groups[0].spec
    return KVLayoutInfo(
        dtype=str(dtype).removeprefix("torch."),
        order=layout.value,
        block_size=spec.block_size,
        num_layers=config.layers_per_group,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_bytes=config.block_bytes,
        num_groups=len(config.groups),
    )


def pool_shape(config: KVCacheConfig, layout: KVLayout) -> tuple[int, ...]:
    """Return the shape of the pool; see the module's diagram."""
    spec = config.groups[0].spec
    heads_and_tokens = (spec.num_kv_heads, spec.block_size)
    inner = heads_and_tokens if layout is KVLayout.HND else heads_and_tokens[::-1]
    return (config.num_blocks, config.layers_per_group, 2, *inner, spec.head_dim)


@dataclass(slots=True)
class KVPool:
    """The allocated pool: ``cache`` is what attention sees of it, ``region`` what connectors see, its seals included."""

    config: KVCacheConfig
    cache: PagedKVCache
    region: KVPoolRegion
    _is_closed: bool = field(default=False, init=False, repr=False)

    @property
    def layout(self) -> KVLayoutInfo:
        """What one block looks like."""
        return self.region.layout

    def zero_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill whole blocks with zeros, all layers at once: one contiguous run each."""
        for block_id in block_ids:
            self.cache.pool[block_id].zero_()

    @property
    def seals(self) -> SealTable:
        """The table in which peers read what the blocks hold."""
        assert self.region.seals is not None
        return self.region.seals

    def close(self) -> None:
        """Close the memory files, once no peer can ask for them. The mappings live as long as a tensor or view. Idempotent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        for memory_fd in (self.region.memory_fd, self.seals.memory.memory_fd):
            if memory_fd is not None:
                os.close(memory_fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """The facts that a pool's seals state in addition to the block's content, and its pages of host memory."""

    incarnation: int = 0
    makes_digests: bool = False  # of each block
    huge_pages: HugePages = "never"


def allocate_kv_pool(
    config: KVCacheConfig,
    dtype: torch.dtype,
    layout: KVLayout,
    device: torch.device,
    options: PoolOptions | None = None,
) -> KVPool:
    """Allocate the pool, zeroed, with every page present, and the table of its seals.

    Raises:
        ConfigError: the memory is not there.
    """
    options = options or PoolOptions()
    info = layout_info(config, dtype, layout)
    shape = pool_shape(config, layout)
    is_on_host = device.type == "cpu"
    pool, buffer, memory_fd = (
        _pool_in_host_memory(shape, dtype, options.huge_pages) if is_on_host else _pool_on(device, shape, dtype)
    )
    region = KVPoolRegion(
        base_address=pool.data_ptr(),
        num_blocks=config.num_blocks,
        block_bytes=info.block_bytes,
        layout=info,
        device=str(pool.device),
        buffer=buffer,
        memory_fd=memory_fd,
        seals=_allocate_seals(info, config.num_blocks, options.incarnation, _digester(pool) if options.makes_digests else None),
        new_digester=partial(_digester, pool),
        new_copier=None if buffer is not None else partial(cuda_block_copier, pool.flatten(1).view(torch.uint8)),
        bind_thread=None if buffer is not None else partial(torch.cuda.set_device, pool.device),
        synchronize=None if buffer is not None else partial(torch.cuda.synchronize, pool.device),
        pin_memory=None if buffer is not None else pin_for_cuda,
        new_peer_memory=None if buffer is not None else partial(CudaPeerMemory, pool.flatten(1).view(torch.uint8)),
    )
    return KVPool(config, PagedKVCache(pool, layout), region)


def _pool_in_host_memory(
    shape: tuple[int, ...], dtype: torch.dtype, huge_pages: HugePages
) -> tuple[torch.Tensor, memoryview, int]:
    """Return the pool, the view and the descriptor of its memory file; all pages are allocated, zero and mapped."""
    num_bytes = math.prod(shape) * dtype.itemsize
    # The kernel would rather kill a process than refuse a page, so a pool that cannot fit is refused before the first one.
    # Huge pages are set aside already, and not among what is available.
    available = _available_bytes()
    if num_bytes > available and (huge_pages == "never" or huge_page_stock().lacks(num_bytes)):
        raise _no_memory(num_bytes, f"{available} bytes of memory are available")
    file = _memory_file(_POOL_FILE_NAME, num_bytes, huge_pages)
    try:
        memory = file.map()[:num_bytes]
    except OSError as error:
        os.close(file.fd)
        raise _no_memory(num_bytes, error) from None
    if huge_pages != "never":
        logger.info(event("kv_pool_pages", page_bytes=file.page_bytes, num_pages=file.num_bytes // file.page_bytes))
    return torch.frombuffer(memory, dtype=dtype).view(shape), memory, file.fd


def _pool_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, None, None]:
    try:
        return torch.zeros(shape, dtype=dtype, device=device), None, None
    except torch.OutOfMemoryError as error:
        raise _no_memory(math.prod(shape) * dtype.itemsize, error) from None


def _digester(pool: torch.Tensor) -> DigestBlocks:
    """Return a function that computes digests of blocks of this pool, for the use of one thread.

    On a device it has a stream of its own: blocks are sealed, or have arrived, when the host knows that their bytes are there,
    so nothing has to be waited for, least of all the step that has been launched meanwhile.
    """
    if pool.device.type == "cpu":
        rows = pool.flatten(1).view(torch.uint8).numpy()
        digester = BlockDigester(rows.shape[1])
        return each_by_itself(lambda block_id: digester.digest(rows[block_id]))
    on_device = on_side_stream(pool.device, TensorDigester)(pool.flatten(1).view(torch.int64))
    return on_side_stream(pool.device, on_device.digests)


def _allocate_seals(layout: KVLayoutInfo, num_blocks: int, incarnation: int, digest_blocks: DigestBlocks | None) -> SealTable:
    num_landing = num_landing_rows(layout.block_size)
    file = _memory_file(_SEALS_FILE_NAME, seal_memory_bytes(num_blocks, num_landing))
    memory = map_seal_memory(num_blocks, file.fd, num_landing)
    return SealTable(memory, incarnation, layout_fingerprint(layout), digest_blocks)


def _memory_file(name: str, num_bytes: int, huge_pages: HugePages = "never") -> MemoryFile:
    try:
        return create_memory_file(name, num_bytes, huge_pages, "cache.huge_pages")
    except OSError as error:
        raise _no_memory(num_bytes, error) from None


def _available_bytes() -> int:
    """Return how much memory the host can give without swapping (``MemAvailable``, see proc(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: the size of the KV pool cannot be checked")


def _no_memory(num_bytes: int, reason: object) -> ConfigError:
    return ConfigError(f"cannot allocate a KV pool of {num_bytes} bytes: {reason}", param="cache.memory_bytes")
