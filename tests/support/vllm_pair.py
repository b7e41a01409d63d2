"""Two ``vllm serve`` on CPU with the plug-in from its wheel: P and D of tests and of a benchmark."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.cluster_plan import free_ports
from tests.support.plugin_wheel import build_wheel, unpack_wheel
from tests.support.tiny_models import write_tiny_llama, write_tiny_tokenizer
from tests.support.vllm_server import VllmServer

CPU_LAYOUT = Path(__file__).parents[1] / "vllm/cpu_layout"
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
def vllm_pair(
    folder: Path, model: Path, settings: Mapping[str, Any], arguments: Sequence[str] = ()
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Yield P and D, which serve. ``settings`` are the plug-in's, by their full names; ``arguments`` are more ones."""
    with vllm_servers(folder, model, {"p": settings, "d": settings}, arguments=arguments) as made:
        yield made["p"], made["d"]


@contextlib.contextmanager
def vllm_servers(
    folder: Path,
    model: Path,
    settings: Mapping[str, Mapping[str, Any]],
    connector: Path | None = None,
    arguments: Sequence[str] = (),
    ports: Sequence[int] = (),
    **variables: str,
) -> Iterator[dict[str, VllmServer]]:
    """Yield servers by name, which serve; ``settings`` are the plug-in's, by their full names.

    ``connector`` is the file of another connector, a variant of ours; ``arguments`` and ``variables`` are added to the others.
    ``ports`` are two for each server, any free ones without.
    """
    unpacked = unpack_wheel(build_wheel(folder / "built"), folder / "unpacked")
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (unpacked, CPU_LAYOUT, *([connector.parent] if connector else []))))}
    ports = ports or free_ports(2 * len(settings))
    made = {}
    for (name, extra), port, control_port in zip(settings.items(), ports[::2], ports[1::2], strict=True):
        config: dict[str, Any] = {
            "kv_connector": "KvferryConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvferry.port": control_port, **extra},
        }
        if connector is not None:
            config["kv_connector_module_path"] = connector.stem
        all_arguments = [*_SERVE, *arguments, "--kv-transfer-config", json.dumps(config)]
        made[name] = VllmServer(folder / f"{name}.log", model, port, all_arguments, environment | variables)
    try:
        for server in made.values():
            server.start()
        for server in made.values():
            server.wait()
        yield made
    finally:
        for server in made.values():
            server.kill()
