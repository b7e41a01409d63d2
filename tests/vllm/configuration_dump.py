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


if __name__ == "__main__":
    layouts = [layout_beside_offloading(extra) for extra in ({}, {"kvferry.kv_cache_layout": "LBHNC"})]
    print(json.dumps({"ports": ports_of_dense_engines(), "layouts": layouts}))
