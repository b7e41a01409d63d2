"""vLLM's KV caches as one pool of blocks: a row per block, with all layers of it.

In a block-outermost layout the views of all layers lie in one allocation, in which a block of all layers is one run of bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from connectors.vllm.engine import LAYOUT, attention_specs, block_size
from core.digest import BlockDigester, TensorDigester
from core.errors import ConfigError
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import DigestBlocks, SealTable, each_by_itself, layout_fingerprint, map_seal_memory
from core.wire.kv import KVLayoutInfo


def block_layout(kv_caches: Mapping[str, Any], kv_cache_config: Any, cache_dtype: str) -> KVLayoutInfo:
    """Return the layout of a block on this rank.

    Raises:
        ConfigError: the blocks are no runs of bytes.
    """
    specs = attention_specs(kv_cache_config)
    return KVLayoutInfo(
        dtype=f"{cache_dtype}:{str(next(iter(kv_caches.values())).dtype).removeprefix('torch.')}",
        order=str(kv_cache_config.kv_cache_layout),
        block_size=block_size(kv_cache_config),
        num_layers=len(kv_caches),
        num_kv_heads=max(int(spec.num_kv_heads) for spec in specs),
        head_dim=max(int(spec.head_size) for spec in specs),
        block_bytes=_block_bytes(kv_caches, kv_cache_config),
        num_groups=len(kv_cache_config.transfer_group_ids),
    )


def pool_of(
    kv_caches: Mapping[str, Any], num_blocks: int, layout: KVLayoutInfo, incarnation: int, *, has_digests: bool
) -> KVPoolRegion:
    """Return the pool with a new table of seals; ``has_digests`` says whether they hold digests.

    The tensors must live as long as the pool is used.
    """
    storage = next(iter(kv_caches.values())).untyped_storage()
    new_digester = _new_digester(storage, num_blocks, layout.block_bytes)
    seals = SealTable(
        map_seal_memory(num_blocks), incarnation, layout_fingerprint(layout), new_digester() if has_digests else None
    )
    is_on_host = storage.device.type == "cpu"
    return KVPoolRegion(
        base_address=storage.data_ptr(),
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        layout=layout,
        device=str(storage.device),
        buffer=_buffer(storage) if is_on_host else None,
        seals=seals,
        new_digester=new_digester,
        bind_thread=None if is_on_host else _use_device(storage.device),
    )


def _block_bytes(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> int:
    layout, num_blocks = kv_cache_config.kv_cache_layout, kv_cache_config.num_blocks
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in kv_caches.values()}
    if layout != LAYOUT or len(storages) != 1:
        raise ConfigError(
            f"KvferryConnector needs the KV cache layout {LAYOUT}, in which a block is one run of bytes; this engine has "
            f"{layout} in {len(storages)} allocations: choose an attention backend that supports it"
        )
    (num_bytes,) = storages.values()
    block_bytes, rest = divmod(num_bytes, num_blocks)
    for name, cache in kv_caches.items():
        num_kernel_blocks = cache.shape[0] // num_blocks
        if rest or cache.stride(0) * cache.element_size() * num_kernel_blocks != block_bytes:
            raise ConfigError(
                f"KvferryConnector: {num_bytes} bytes of KV cache are not {num_blocks} equal blocks (layer {name} has strides "
                f"{tuple(cache.stride())})"
            )
    return int(block_bytes)


def _buffer(storage: Any) -> memoryview:
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(memory).cast("B")


def _new_digester(storage: Any, num_blocks: int, block_bytes: int) -> Callable[[], DigestBlocks]:
    if storage.device.type == "cpu":
        buffer = _buffer(storage)

        def on_host() -> DigestBlocks:
            digester = BlockDigester(block_bytes)
            return each_by_itself(
                lambda block_id: digester.digest(buffer[block_id * block_bytes : (block_id + 1) * block_bytes])
            )

        return on_host

    def on_device() -> DigestBlocks:
        import torch

        words = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage).view(num_blocks, -1)
        return TensorDigester(words).digests

    return on_device


def _use_device(device: Any) -> Callable[[], None]:
    def bind() -> None:
        import torch

        torch.cuda.set_device(device)

    return bind
