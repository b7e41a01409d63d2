"""The flags that the commands of ``kvferry`` share, and how they become a configuration.

Owns names and help texts of the flags. A flag that is not given leaves the file's or the default value alone. Everything that
has no flag is reached by ``--set``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from core.config import KVFerryConfig, load_config

_COMMON = "Settings"
_PROCESS = "Started by a supervisor"

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML, TOML or JSON file.", rich_help_panel=_COMMON)]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Any setting by its path; repeatable.", rich_help_panel=_COMMON),
]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR.", rich_help_panel=_COMMON)]
Model = Annotated[str | None, typer.Option("--model", help="Alias, folder, GGUF file or Hugging Face id.")]
ServedName = Annotated[str | None, typer.Option("--served-model-name", help="The model's name for clients.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt and answer together, in tokens.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
GenerationConfig = Annotated[
    str | None,
    typer.Option("--generation-config", help="Sampling defaults: auto = the model's generation_config.json; none = neutral."),
]
Host = Annotated[str | None, typer.Option("--host", help="Address of the HTTP API.")]
HttpPort = Annotated[int | None, typer.Option("--port", help="Port of the HTTP API; 0 = any free one.")]
WorkerAddress = Annotated[str | None, typer.Option("--worker-address", help="Where workers connect, tcp://host:port.")]
EngineId = Annotated[str | None, typer.Option("--engine-id", help="Stable name of the instance; default role, host and pid.")]
Routers = Annotated[list[str] | None, typer.Option("--router", help="A router's worker address; repeatable.")]
Transports = Annotated[
    list[str] | None, typer.Option("--transport", help="Transport of the KV blocks, in order of preference; repeatable.")
]
ControlAddress = Annotated[str | None, typer.Option("--control-address", help="Where readers shake hands.")]
AdvertiseHost = Annotated[str | None, typer.Option("--advertise-host", help="Host that peers use; default the bound one.")]
OpsPort = Annotated[int | None, typer.Option("--ops-port", help="Port of /health, /ready, /metrics and others; 0 = any.")]
StoreAddress = Annotated[str | None, typer.Option("--address", help="Where clients connect, tcp://host:port; port 0 = any.")]
StoreMemory = Annotated[int | None, typer.Option("--memory-bytes", help="Size of the arena.")]
StoreDisk = Annotated[str | None, typer.Option("--disk-path", help="Folder of the disk tier; default none.")]
StoreRedis = Annotated[str | None, typer.Option("--redis-url", help="Redis or Valkey below it, redis://host:port/db.")]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure", help="Without a cluster key, listen where other machines can reach it.", rich_help_panel=_COMMON
    ),
]
ReadyFd = Annotated[
    int | None, typer.Option("--ready-fd", hidden=True, help="Pipe for the bound addresses.", rich_help_panel=_PROCESS)
]
ParentPid = Annotated[
    int | None, typer.Option("--parent-pid", hidden=True, help="Die with this process.", rich_help_panel=_PROCESS)
]


def read_config(path: Path | None, assignments: Sequence[str] | None, flags: Mapping[str, object]) -> KVFerryConfig:
    """Return the configuration of file, ``--set`` and flags by their paths; a flag that is None was not given.

    Raises:
        ConfigError: see ``core.config.load_config``.
    """
    return load_config(path, assignments or (), {key: value for key, value in flags.items() if value is not None})
