"""Two ``vllm serve`` on CPU with the plug-in from its wheel: P and D of tests and of a benchmark."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvferry.cluster_plan import free_ports
from tests.support.plugin_wheel import build_wheel, unpack_wheel
from tests.support.tiny_models import write_tiny_llama, write_tiny_tokenizer
from tests.support.vllm_server import VllmServer

_CPU_LAYOUT = Path(__file__).parents[1] / "vllm/cpu_layout"
_SERVE = (
    *("--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log", "--max-model-len", "1024"),
    *("--block-size", "32", "--num-gpu-blocks-override", "100", "--enable-scale-out", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def write_served_model(folder: Path) -> Path:
    """Write a tiny model with a tokenizer; return its folder."""
    model = write_tiny_llama(folder)
    write_tiny_tokenizer(model)
    return model


@contextlib.contextmanager
def vllm_pair(folder: Path, model: Path, settings: Mapping[str, Any]) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Yield P and D, which serve. ``settings`` are the plug-in's, by their full names."""
    unpacked = unpack_wheel(build_wheel(folder / "built"), folder / "unpacked")
    environment = {"PYTHONPATH": os.pathsep.join([str(unpacked), str(_CPU_LAYOUT)])}
    ports = free_ports(4)
    made = []
    for name, port, control_port in zip("pd", ports[:2], ports[2:], strict=True):
        transfer = {
            "kv_connector": "KvferryConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**settings, "kvferry.port": control_port},
        }
        arguments = [*_SERVE, "--kv-transfer-config", json.dumps(transfer)]
        made.append(VllmServer(folder / f"{name}.log", model, port, arguments, environment))
    try:
        for server in made:
            server.start()
        for server in made:
            server.wait()
        yield made[0], made[1]
    finally:
        for server in made:
            server.kill()
