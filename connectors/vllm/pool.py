"""vLLM's KV caches as one pool of blocks, whose views of all layers lie in one allocation.

In the layout ``BLHNC`` a block of all layers is one run of bytes; in ``LBHNC`` each layer is a plane that holds its part of
every block. Hybrid models use one block for layers of different groups in turn, so several views may be of the same bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from connectors.vllm.engine import LAYERS_APART, LAYOUTS, attention_specs, block_size, holds_latents
from connectors.vllm.sealing import KVWritten
from core.digest import BlockDigester, TensorDigester
from core.errors import ConfigError
from core.kv.pool_region import BlockCopier, KVPoolRegion
from core.kv.seals import DigestBlocks, SealTable, each_by_itself, layout_fingerprint, map_seal_memory, num_landing_rows
from core.wire.kv import HNC, HNC_VEC, OPAQUE, KVLayoutInfo


def block_layout(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, cache_dtype: str, instruction_sets: Sequence[str]
) -> KVLayoutInfo:
    """Return the layout of a block on this rank. ``instruction_sets`` are those by which a CPU packs blocks.

    Raises:
        ConfigError: the blocks are no runs of bytes.
    """
    specs = attention_specs(kv_cache_config)
    block_bytes, num_layers = _check_memory(kv_caches, kv_cache_config)
    return KVLayoutInfo(
        dtype=f"{cache_dtype}:{str(next(iter(kv_caches.values())).dtype).removeprefix('torch.')}",
        order=_order(kv_caches, kv_cache_config, block_bytes, cache_dtype, instruction_sets),
        block_size=block_size(kv_cache_config),
        num_layers=num_layers,
        num_kv_heads=max(int(spec.num_kv_heads) for spec in specs),
        head_dim=max(int(spec.head_size) for spec in specs),
        block_bytes=block_bytes,
        num_groups=len(kv_cache_config.transfer_group_ids),
        num_planes=num_layers if kv_cache_config.kv_cache_layout == LAYERS_APART else 1,
    )


def pool_of(
    kv_caches: Mapping[str, Any], num_blocks: int, layout: KVLayoutInfo, incarnation: int, *, has_digests: bool
) -> KVPoolRegion:
    """Return the pool with a new table of seals; ``has_digests`` says whether they hold digests.

    The tensors must live as long as the pool is used.
    """
    storage = next(iter(kv_caches.values())).untyped_storage()
    is_on_host = storage.device.type == "cpu"
    new_digester = partial(_host_digester if is_on_host else _device_digester, storage, num_blocks, layout)
    seals = SealTable(
        map_seal_memory(num_blocks, num_landing=num_landing_rows(layout.block_size)),
        incarnation,
        layout_fingerprint(layout),
        new_digester() if has_digests else None,
    )
    return KVPoolRegion(
        base_address=storage.data_ptr(),
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        layout=layout,
        device=str(storage.device),
        buffer=_buffer(storage) if is_on_host else None,
        seals=seals,
        new_digester=new_digester,
        new_copier=None if is_on_host else partial(_new_copier, storage, num_blocks * layout.num_planes),
        bind_thread=None if is_on_host else partial(_use_device, storage.device),
        synchronize=None if is_on_host else partial(_synchronize, storage.device),
    )


def kv_written(device: Any) -> KVWritten | None:
    """Return the moment in which the KV of the step that was just submitted is in memory; None: on a CPU it is by now."""
    if device.type == "cpu":
        return None
    import torch

    written: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    written.record(torch.cuda.current_stream(device))
    return written


def _check_memory(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> tuple[int, int]:
    """Return the bytes of a block, and how many layers it has."""
    layout, num_blocks = kv_cache_config.kv_cache_layout, kv_cache_config.num_blocks
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in kv_caches.values()}
    if layout not in LAYOUTS or len(storages) != 1:
        raise ConfigError(
            f"KvferryConnector needs the KV cache layout {' or '.join(LAYOUTS)}; this engine has {layout} in {len(storages)} "
            "allocations: choose an attention backend that supports it"
        )
    (num_bytes,) = storages.values()
    offsets = sorted({_offset(cache) for cache in kv_caches.values()})
    num_planes = len(offsets) if layout == LAYERS_APART else 1
    plane_bytes = num_bytes // num_planes
    row_bytes, rest = divmod(num_bytes, num_planes * num_blocks)
    in_planes = layout != LAYERS_APART or offsets == list(range(0, num_bytes, plane_bytes))
    for name, cache in kv_caches.items():
        num_kernel_blocks = cache.shape[0] // num_blocks
        if rest or not in_planes or cache.stride(0) * cache.element_size() * num_kernel_blocks != row_bytes:
            raise ConfigError(
                f"KvferryConnector: {num_bytes} bytes of KV cache in layout {layout} are not {num_blocks} equal blocks: layer "
                f"{name} begins at byte {_offset(cache)} and has strides {tuple(cache.stride())}"
            )
    return row_bytes * num_planes, len(offsets)


def _order(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, block_bytes: int, cache_dtype: str, instruction_sets: Sequence[str]
) -> str:
    """Return what is known of the order of bytes in a block, see ``core.kv.block_form``."""
    specs = attention_specs(kv_cache_config)
    offsets = sorted({_offset(cache) for cache in kv_caches.values()})
    run_bytes = block_bytes // len(offsets)  # of a layer in a block, if there is no padding
    num_types = len({cache.dtype for cache in kv_caches.values()})
    are_alike = num_types == 1 and len({(spec.num_kv_heads, spec.head_size) for spec in specs}) == 1
    are_heads = all(getattr(spec, "num_head_slots", None) is None for spec in specs)  # else H counts something else
    are_even = len(set(np.diff(offsets).tolist())) <= 1
    are_whole = all(
        cache.shape[0] == kv_cache_config.num_blocks
        and cache[0].is_contiguous()
        and cache[0].numel() * cache.element_size() == run_bytes
        for cache in kv_caches.values()
    )
    if not (are_alike and are_heads and are_even and are_whole):
        return f"{OPAQUE}-{_digest_of_places(kv_caches, kv_cache_config)}"
    if not instruction_sets:
        return HNC
    are_pairs = not holds_latents(specs) and all(
        getattr(spec, "head_size_v", spec.head_size) == spec.head_size for spec in specs
    )
    is_plain = are_pairs and len(instruction_sets) == 1 and not cache_dtype.startswith("fp8")
    if is_plain and instruction_sets[0] in {"vec", "vec16"}:
        return HNC_VEC
    return f"{HNC}-{'+'.join([*instruction_sets, cache_dtype])}"


def _digest_of_places(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> str:
    """Return a digest of which bytes of a block belong to which layer, and in what form; the number of blocks plays no part.

    vLLM puts layers of one kind side by side: two engines that give other layers another type have blocks of the same size
    with other contents.
    """
    num_blocks = kv_cache_config.num_blocks
    places, are_apart = [], kv_cache_config.kv_cache_layout == LAYERS_APART
    for name, cache in kv_caches.items():
        block = cache[: cache.shape[0] // num_blocks]
        strides = [stride for stride, size in zip(block.stride(), block.shape, strict=True) if size > 1]
        place = _offset(cache) // (num_blocks if are_apart else 1)  # the layers apart have planes of all blocks between them
        places.append((place, name, str(block.dtype), list(block.shape), strides))
    return hashlib.blake2b(json.dumps(sorted(places)).encode(), digest_size=8).hexdigest()


def _offset(cache: Any) -> int:
    """Return where a layer begins in the allocation that all share, in bytes."""
    return int(cache.data_ptr() - cache.untyped_storage().data_ptr())


def _buffer(storage: Any) -> memoryview:
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(memory).cast("B")


def _host_digester(storage: Any, num_blocks: int, layout: KVLayoutInfo) -> DigestBlocks:
    digester = BlockDigester(layout.block_bytes)
    planes = np.frombuffer(_buffer(storage), dtype=np.uint8).reshape(layout.num_planes, num_blocks, -1)
    return each_by_itself(lambda block_id: digester.digest(np.ascontiguousarray(planes[:, block_id]).reshape(-1)))


def _device_digester(storage: Any, num_blocks: int, layout: KVLayoutInfo) -> DigestBlocks:
    import torch

    from core.block_copier import on_side_stream

    words = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage)
    planes = words.view(layout.num_planes, num_blocks, -1)
    return on_side_stream(storage.device, TensorDigester(planes.transpose(0, 1)).digests)


def _new_copier(storage: Any, num_rows: int) -> BlockCopier:
    import torch

    from core.block_copier import cuda_block_copier

    return cuda_block_copier(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(num_rows, -1))


def _use_device(device: Any) -> None:
    import torch

    torch.cuda.set_device(device)


def _synchronize(device: Any) -> None:
    import torch

    torch.cuda.synchronize(device)
