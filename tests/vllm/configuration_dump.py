"""Prints as JSON what vLLM makes of settings together with the plug-in. Runs in vLLM's environment."""

from __future__ import annotations

import json

OURS = {"kv_connector": "KvferryConnector", "kv_connector_module_path": "connectors.vllm.connector", "kv_role": "kv_both"}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def ports_of_dense_engines() -> list[int]:
    """Return the control ports of the data-parallel engines of a dense model, each as its process sees it."""
    from vllm.config import ParallelConfig

    from connectors.vllm.settings import read_settings

    ports = []
    for index in range(3):
        parallel = ParallelConfig(data_parallel_size=3, data_parallel_rank=index)
        parallel.reconfigure_for_independent_dp_rank()
        ports.append(read_settings({"kvferry.port": 7000}).port_of(0, parallel))
    return ports


def layout_beside_offloading(extra: dict[str, str]) -> str:
    """Return the layout that vLLM is asked for by our connector with these settings and vLLM's own for host memory."""
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    children = [OURS | {"kv_connector_extra_config": extra}, OFFLOADING]
    config = VllmConfig()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    try:
        return str(get_kv_connector_cache_layout(config))
    except ValueError as error:
        return str(error)


def refusal_of(extra: dict[str, object]) -> str:
    """Return why vLLM makes no configuration with full CUDA graphs and these settings of ours, from what it asks us then."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    try:
        child = OURS | {"kv_connector_extra_config": extra}
        return str(MultiConnector.requires_piecewise_for_cudagraph({"connectors": [child]}))
    except Exception as error:
        return str(error)


def order_of_blocks(skipped_layer: int, num_bytes: int) -> str:
    """Return the order of bytes in blocks of 4 layers, one of which keeps the model's type; vLLM allocates ``num_bytes``."""
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import allocate_kv_cache

    from connectors.vllm.pool import block_layout

    config, specs = VllmConfig(), {}
    config.cache_config.kv_cache_layout = "BLHNC"
    for layer in range(4):
        dtype = torch.bfloat16 if layer == skipped_layer else torch.uint8
        specs[f"layers.{layer}.attn"] = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=dtype)
    caches = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), num_bytes)
    caches.kv_cache_layout = "BLHNC"
    views = allocate_kv_cache(caches, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout())
    return block_layout(views, caches, "fp8", []).order


if __name__ == "__main__":
    layouts = [layout_beside_offloading(extra) for extra in ({}, {"kvferry.kv_cache_layout": "LBHNC"})]
    # The second engine has more memory, the third keeps another layer in the model's type.
    orders = [order_of_blocks(layer, memory) for layer, memory in ((1, 1 << 20), (1, 3 << 20), (2, 1 << 20))]
    refusals = [refusal_of(extra) for extra in ({}, {"kvferry.transports": ["tpc"]})]
    print(json.dumps({"ports": ports_of_dense_engines(), "layouts": layouts, "orders": orders, "refusals": refusals}))
