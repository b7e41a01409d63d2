"""The flags that the commands of ``kvferry`` share, and how they become a configuration.

Owns names and help texts of the flags. A missing flag keeps the file's or the default value. Settings without a flag are set
by ``--set``. Numbers are text here: the configuration rejects wrong ones, in one way for all sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from core.config import KVFerryConfig, load_config
from core.errors import ConfigError

_DEFAULTS = KVFerryConfig()
_COMMON = "Settings"
_PROCESS = "Started by a supervisor"

ConfigFile = Annotated[  # a list, to see whether there is a second one, of which the command line would take the last
    list[Path] | None, typer.Option("--config", metavar="FILE", help="YAML, TOML or JSON file.", rich_help_panel=_COMMON)
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Any setting by its path; repeatable.", rich_help_panel=_COMMON),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        help="DEBUG, INFO, WARNING or ERROR.",
        show_default=_DEFAULTS.log.level,
        rich_help_panel=_COMMON,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Alias, folder, GGUF file or Hugging Face id.", show_default=_DEFAULTS.model.name),
]
ServedName = Annotated[
    str | None, typer.Option("--served-model-name", help="The model's name for clients.", show_default="as --model")
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        "--max-model-len",
        metavar="TOKENS",
        help="Longest prompt and answer together, such as 4096 or 8Ki.",
        show_default="what model and KV pool allow",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", show_default=_DEFAULTS.model.dtype)
]
GenerationConfig = Annotated[
    str | None,
    typer.Option(
        "--generation-config",
        help="Sampling defaults: auto = the model's generation_config.json; none = neutral.",
        show_default=_DEFAULTS.model.generation_config,
    ),
]
NumPrefill = Annotated[
    str | None,
    typer.Option("--prefill", metavar="N", help="Number of prefill workers.", show_default=str(_DEFAULTS.local.num_prefill)),
]
NumDecode = Annotated[
    str | None,
    typer.Option("--decode", metavar="N", help="Number of decode workers.", show_default=str(_DEFAULTS.local.num_decode)),
]
NumEncode = Annotated[
    int | None,
    typer.Option(
        "--encode",
        help="Number of encode workers, for a model that sees images.",
        show_default=str(_DEFAULTS.local.num_encode),
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="Address of the HTTP API.", show_default=_DEFAULTS.router.host)]
HttpPort = Annotated[
    str | None,
    typer.Option(
        "--port", metavar="PORT", help="Port of the HTTP API; 0 = any free one.", show_default=str(_DEFAULTS.router.port)
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="What clients send as a bearer token; several: by commas. Lists of processes show it, the variable is not shown.",
        show_default="$KVFERRY_API_KEY, or none",
    ),
]
WorkerAddress = Annotated[str | None, typer.Option("--worker-address", help="Where workers connect, tcp://host:port.")]
AgentRole = Annotated[
    Literal["prefill", "decode", "aggregated"], typer.Option("--role", help="What the server does for the cluster.")
]
EngineKind = Annotated[
    str | None,
    typer.Option("--engine", help="Engine of the workers: kvferry, or vllm.", show_default=_DEFAULTS.local.engine),
]
VllmCommand = Annotated[
    str | None,
    typer.Option(
        "--vllm-command",
        help="vLLM's command, from an environment of its own, such as /opt/vllm/bin/vllm.",
        show_default=_DEFAULTS.local.vllm_command,
    ),
]
VllmArguments = Annotated[
    str | None,
    typer.Option(
        "--vllm-arguments", metavar="TEXT", help="More arguments of each vllm serve, in one text.", show_default="none"
    ),
]
Engine = Annotated[str | None, typer.Option("--engine", metavar="URL", help="The vLLM server, on this machine.")]
EngineId = Annotated[str | None, typer.Option("--engine-id", help="Stable name of the instance; default role, host and pid.")]
Routers = Annotated[list[str] | None, typer.Option("--router", help="A router's worker address; repeatable.")]
Transports = Annotated[
    list[str] | None,
    typer.Option(
        "--transport",
        help="Transport of the KV blocks, in order of preference; repeatable.",
        show_default=" ".join(_DEFAULTS.connector.transports),
    ),
]
ControlAddress = Annotated[str | None, typer.Option("--control-address", help="Where readers shake hands.")]
AdvertiseHost = Annotated[str | None, typer.Option("--advertise-host", help="Host that peers use; default the bound one.")]
OpsPort = Annotated[
    str | None, typer.Option("--ops-port", metavar="PORT", help="Port of /health, /ready, /metrics and others; 0 = any.")
]
StoreAddress = Annotated[str | None, typer.Option("--address", help="Where clients connect, tcp://host:port; port 0 = any.")]
StoreMemory = Annotated[
    str | None,
    typer.Option(
        "--memory-bytes",
        metavar="BYTES",
        help="Size of the arena, such as 512MiB.",
        show_default=str(_DEFAULTS.kvstore.memory_bytes),
    ),
]
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


def read_config(paths: Sequence[Path] | None, assignments: Sequence[str] | None, flags: Mapping[str, object]) -> KVFerryConfig:
    """Return the configuration of file, ``--set`` and flags by their paths; a flag that is None was not given.

    Raises:
        ConfigError: there are two files, or see ``core.config.load_config``.
    """
    if paths and len(paths) > 1:
        named = " and ".join(map(str, paths))
        raise ConfigError(f"--config is given {len(paths)} times, {named}: give one file, and the rest by --set")
    given = {key: value for key, value in flags.items() if value is not None}
    return load_config(paths[0] if paths else None, assignments or (), given)
