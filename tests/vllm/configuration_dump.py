"""Prints as JSON what vLLM makes of settings together with the plug-in. Runs in vLLM's environment."""

from __future__ import annotations

import json


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


if __name__ == "__main__":
    print(json.dumps({"ports": ports_of_dense_engines()}))
