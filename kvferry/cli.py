"""The ``kvferry`` command.

Owns the commands and their exit codes: 0 done, 1 failed, 2 wrong usage or configuration. Each command imports what it needs
when it runs, so that ``--help``, the supervisor and the router start without torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from core.descriptors import is_full_table, too_few_descriptors
from core.errors import ConfigError, KVFerryError
from kvferry import __version__, options
from kvferry.advise.command import advise
from kvferry.bench.command import bench
from kvferry.doctor import doctor
from kvferry.operate import drain, keygen, probe, role
from kvferry.sim.command import sim


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


app = typer.Typer(
    name="kvferry",
    help="Disaggregated LLM serving: prefill and decode workers with verified KV-cache handoff.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def kvferry(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Disaggregated LLM serving: prefill and decode workers with verified KV-cache handoff."""


@app.command()
def serve(
    model: options.Model = None,
    served_model_name: options.ServedName = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    generation_config: options.GenerationConfig = None,
    prefill: options.NumPrefill = None,
    decode: options.NumDecode = None,
    encode: options.NumEncode = None,
    aggregated: Annotated[
        bool | None, typer.Option("--aggregated", help="Workers that do both, as many as the larger of the two.")
    ] = None,
    engine: options.EngineKind = None,
    vllm_command: options.VllmCommand = None,
    vllm_arguments: options.VllmArguments = None,
    host: options.Host = None,
    port: options.HttpPort = None,
    api_key: options.ApiKey = None,
    transport: options.Transports = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    insecure: options.Insecure = None,
) -> None:
    """Serve a model on this machine: a router and its workers, restarted when they die."""
    from kvferry.serve import serve_forever

    flags = {
        "model.name": model,
        "model.served_name": served_model_name,
        "model.max_model_len": max_model_len,
        "model.dtype": dtype,
        "model.generation_config": generation_config,
        "local.num_prefill": prefill,
        "local.num_decode": decode,
        "local.num_encode": encode,
        "local.aggregated": aggregated,
        "local.engine": engine,
        "local.vllm_command": vllm_command,
        "local.vllm_arguments": vllm_arguments,
        "router.host": host,
        "router.port": port,
        "router.api_key": api_key,
        "connector.transports": transport or None,
        "log.level": log_level,
        "security.insecure": insecure,
    }
    raise typer.Exit(serve_forever(options.read_config(config, assignments, flags)))


@app.command()
def router(
    model: options.Model = None,
    served_model_name: options.ServedName = None,
    generation_config: options.GenerationConfig = None,
    host: options.Host = None,
    port: options.HttpPort = None,
    api_key: options.ApiKey = None,
    worker_address: options.WorkerAddress = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    insecure: options.Insecure = None,
    ready_fd: options.ReadyFd = None,
    parent_pid: options.ParentPid = None,
) -> None:
    """Run the OpenAI API; workers find it and register themselves."""
    from kvferry.roles import run_role

    flags = {
        "model.name": model,
        "model.served_name": served_model_name,
        "model.generation_config": generation_config,
        "router.host": host,
        "router.port": port,
        "router.api_key": api_key,
        "router.worker_address": worker_address,
        "log.level": log_level,
        "security.insecure": insecure,
    }
    raise typer.Exit(run_role("router", options.read_config(config, assignments, flags), ready_fd, parent_pid))


@app.command()
def encode(
    model: options.Model = None,
    served_model_name: options.ServedName = None,
    engine_id: options.EngineId = None,
    router: options.Routers = None,
    control_address: options.ControlAddress = None,
    advertise_host: options.AdvertiseHost = None,
    ops_port: options.OpsPort = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    insecure: options.Insecure = None,
    ready_fd: options.ReadyFd = None,
    parent_pid: options.ParentPid = None,
) -> None:
    """Run one encode worker: it computes embeddings of images for the workers that read prompts."""
    from kvferry.roles import run_role

    flags = {
        **_worker_flags(model, engine_id, router, None),
        "model.served_name": served_model_name,
        "worker.control_address": control_address,
        "worker.advertise_host": advertise_host,
        "worker.ops_port": ops_port,
        "log.level": log_level,
        "security.insecure": insecure,
    }
    raise typer.Exit(run_role("encode", options.read_config(config, assignments, flags), ready_fd, parent_pid))


@app.command()
def prefill(
    model: options.Model = None,
    served_model_name: options.ServedName = None,
    engine_id: options.EngineId = None,
    router: options.Routers = None,
    transport: options.Transports = None,
    control_address: options.ControlAddress = None,
    advertise_host: options.AdvertiseHost = None,
    ops_port: options.OpsPort = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    insecure: options.Insecure = None,
    ready_fd: options.ReadyFd = None,
    parent_pid: options.ParentPid = None,
) -> None:
    """Run one prefill worker: it computes prompts, and decode workers read their KV cache."""
    from kvferry.roles import run_role

    flags = {
        **_worker_flags(model, engine_id, router, transport),
        "model.served_name": served_model_name,
        "worker.control_address": control_address,
        "worker.advertise_host": advertise_host,
        "worker.ops_port": ops_port,
        "log.level": log_level,
        "security.insecure": insecure,
    }
    raise typer.Exit(run_role("prefill", options.read_config(config, assignments, flags), ready_fd, parent_pid))


@app.command()
def decode(
    model: options.Model = None,
    served_model_name: options.ServedName = None,
    engine_id: options.EngineId = None,
    router: options.Routers = None,
    transport: options.Transports = None,
    ops_port: options.OpsPort = None,
    aggregated: Annotated[bool, typer.Option("--aggregated", help="Compute prompts here too; no prefill worker.")] = False,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    insecure: options.Insecure = None,
    ready_fd: options.ReadyFd = None,
    parent_pid: options.ParentPid = None,
) -> None:
    """Run one decode worker: it loads KV caches and generates tokens."""
    from kvferry.roles import run_role

    flags = {
        **_worker_flags(model, engine_id, router, transport),
        "model.served_name": served_model_name,
        "worker.ops_port": ops_port,
        "log.level": log_level,
        "security.insecure": insecure,
    }
    raise typer.Exit(
        run_role(
            "aggregated" if aggregated else "decode", options.read_config(config, assignments, flags), ready_fd, parent_pid
        )
    )


@app.command()
def agent(
    role: options.AgentRole,
    engine: options.Engine = None,
    model: options.Model = None,
    served_model_name: options.ServedName = None,
    engine_id: options.EngineId = None,
    router: options.Routers = None,
    ops_port: options.OpsPort = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    ready_fd: options.ReadyFd = None,
    parent_pid: options.ParentPid = None,
) -> None:
    """Run the agent of one vLLM server: it makes the server a worker of the cluster."""
    from kvferry.roles import run_agent

    flags = {
        **_worker_flags(model, engine_id, router, None),
        "agent.engine": engine,
        "model.served_name": served_model_name,
        "worker.ops_port": ops_port,
        "log.level": log_level,
    }
    raise typer.Exit(run_agent(role, options.read_config(config, assignments, flags), ready_fd, parent_pid))


@app.command()
def kvstore(
    address: options.StoreAddress = None,
    memory_bytes: options.StoreMemory = None,
    disk_path: options.StoreDisk = None,
    redis_url: options.StoreRedis = None,
    ops_port: options.OpsPort = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    log_level: options.LogLevel = None,
    insecure: options.Insecure = None,
    ready_fd: options.ReadyFd = None,
    parent_pid: options.ParentPid = None,
) -> None:
    """Run a store of KV blocks for the workers of a node or a cluster: memory, disk, Redis."""
    from kvferry.roles import run_role

    flags = {
        "kvstore.bind_address": address,
        "kvstore.memory_bytes": memory_bytes,
        "kvstore.disk_path": disk_path,
        "kvstore.redis_url": redis_url,
        "kvstore.ops_port": ops_port,
        "log.level": log_level,
        "security.insecure": insecure,
    }
    raise typer.Exit(run_role("kvstore", options.read_config(config, assignments, flags), ready_fd, parent_pid))


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = "Why is the sky blue? Answer in two sentences.",
    max_tokens: Annotated[int, typer.Option(help="Length of the answer.", min=2)] = 48,
    model: options.Model = None,
    engine: options.EngineKind = None,
    vllm_command: options.VllmCommand = None,
    vllm_arguments: options.VllmArguments = None,
    transport: options.Transports = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Start a router, a prefill and a decode worker, ask one question, and show what happened on the way."""
    from kvferry.demo import run_demo

    flags = {
        "model.name": model,
        "local.engine": engine,
        "local.vllm_command": vllm_command,
        "local.vllm_arguments": vllm_arguments,
        "connector.transports": transport or None,
        "router.port": 0,
    }
    raise typer.Exit(run_demo(options.read_config(config, assignments, flags), prompt, max_tokens))


app.command()(bench)
app.command()(sim)
app.command()(advise)
app.command()(keygen)
app.command()(drain)
app.command()(role)
app.command()(probe)
app.add_typer(doctor, name="doctor")


@app.command()
def models(
    fetch: Annotated[list[str] | None, typer.Argument(help="Models to fetch into the cache.")] = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    weights: Annotated[bool, typer.Option(help="Fetch the weights too; a router needs none.")] = True,
) -> None:
    """List the models that have a short name and whether they are cached, or fetch some."""
    from kvferry.models import fetch_models, list_models

    cache_dir = options.read_config(config, assignments, {}).model.cache_dir
    if fetch:
        fetch_models(fetch, cache_dir, needs_weights=weights)
    else:
        list_models(cache_dir)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _worker_flags(
    model: str | None, engine_id: str | None, routers: list[str] | None, transports: list[str] | None
) -> dict[str, object]:
    return {
        "model.name": model,
        "worker.engine_id": engine_id,
        "worker.router_addresses": routers or None,
        "connector.transports": transports or None,
    }


def main() -> None:
    """Run the command line; an error becomes one line on stderr, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        code = getattr(error, "exit_code", 2)
        print(f"kvferry: {error.format_message()}" if error.format_message() else "", file=sys.stderr)
    except typer.Abort:
        code = 1
    except KVFerryError as error:
        code = 2 if isinstance(error, ConfigError) else 1
        print(f"kvferry: {error.message}", file=sys.stderr)
    except Exception as error:
        if not is_full_table(error):
            raise
        code = 2
        print(f"kvferry: {too_few_descriptors(error).message}", file=sys.stderr)
    sys.exit(code)
