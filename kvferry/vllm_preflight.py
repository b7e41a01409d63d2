"""Checks before a local cluster with vLLM engines starts any process: the settings, and the environment of vLLM.

Each raises a ConfigError that names setting, value and fix. vLLM itself is not imported: that takes many seconds. The versions
come from the metadata of the environment that the command belongs to; a command that does not say which one, such as
``docker run``, is started as it is.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.config import KVFerryConfig
from core.errors import ConfigError
from core.model.hub import peek_config, resolve_model
from kvferry.connector_preflight import check_tracing
from kvferry.preflight import check_ports, check_router
from kvferry.progress import shown_progress

SUPPORTED_MINORS = ("0.32",)  # of vLLM, by the plug-in
_CHOSEN_OPTIONS = (
    "--host",
    "--port",
    "--uds",
    "--served-model-name",
    "--kv-transfer-config",
    "--api-key",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--root-path",
)
_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps({name: version(name) for name in ("vllm", "kvferry-vllm")}))
"""
_SHEBANG_BYTES = 4096
INSTALL_PLUGIN = "run `make wheel-vllm` and `{python} -m pip install dist/kvferry_vllm-*.whl`"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstallation:
    """How vLLM is started: the words of its command, those that name the model, and the user's arguments.

    ``version`` is empty if it cannot be known before the start.
    """

    command: tuple[str, ...]
    model: tuple[str, ...]
    arguments: tuple[str, ...]
    version: str = ""

    @property
    def is_for_cpu(self) -> bool:
        """True for vLLM's CPU build."""
        return self.version.endswith("+cpu")


def check_vllm_cluster(config: KVFerryConfig, environment: Mapping[str, str]) -> VllmInstallation:
    """Check everything that a start needs; a model that has an alias is fetched if it is missing.

    Raises:
        ConfigError: a check failed; names the setting, its value and the fix.
    """
    check_settings(config)
    command = find_command(config.local.vllm_command, environment)
    arguments = vllm_arguments(config.local.vllm_arguments)
    check_router(config)
    check_tracing(config)
    check_ports(config, {})
    version = check_versions(command, environment, needs_plugin=not config.local.aggregated)
    return VllmInstallation(command=command, model=_find_model(config), arguments=arguments, version=version)


def check_settings(config: KVFerryConfig) -> None:
    """Refuse settings that vLLM engines do not have.

    Raises:
        ConfigError: there is one.
    """
    local, connector = config.local, config.connector
    if local.num_encode:
        raise ConfigError(
            f"local.num_encode = {local.num_encode}: encode workers are for kvferry's own engine; leave them out, "
            "vLLM computes the embeddings of images itself",
            param="local.num_encode",
        )
    if config.model.quantization != "none":
        raise ConfigError(
            f"model.quantization = {config.model.quantization}: it is for kvferry's own engine; leave it out, "
            "and give vLLM its --quantization in local.vllm_arguments",
            param="model.quantization",
        )
    if local.kvstore:
        raise ConfigError("local.kvstore = true: the store is for kvferry's own engine; leave it out", param="local.kvstore")
    if connector.name != "p2p":
        raise ConfigError(
            f"connector.name = {connector.name}: vLLM engines hand off by p2p; leave it out", param="connector.name"
        )
    if not {"tcp", "nixl"}.intersection(connector.transports) and not local.aggregated:
        raise ConfigError(
            "connector.transports: vLLM engines need tcp or nixl, as they have no pool in shared memory",
            param="connector.transports",
        )


def find_command(text: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of vLLM's command, the first as the path of a program.

    Raises:
        ConfigError: there is no such program.
    """
    words = _words(text, "local.vllm_command")
    path = shutil.which(os.path.expanduser(words[0]), path=environment.get("PATH")) if words else None
    if path is None:
        raise ConfigError(
            f"local.vllm_command = {text!r}: no such command: name vLLM's, such as --vllm-command /opt/vllm/bin/vllm, "
            f"of an environment into which vLLM {SUPPORTED_MINORS[-1]} is installed",
            param="local.vllm_command",
        )
    return (path, *words[1:])


def vllm_arguments(text: str) -> tuple[str, ...]:
    """Return the user's own arguments of ``vllm serve``.

    Raises:
        ConfigError: one of them is chosen by the cluster.
    """
    words = _words(text, "local.vllm_arguments")
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option in _CHOSEN_OPTIONS:
            raise ConfigError(
                f"local.vllm_arguments: {option}: a local cluster chooses it for each of its servers; leave it out",
                param="local.vllm_arguments",
            )
    return words


def check_versions(command: tuple[str, ...], environment: Mapping[str, str], *, needs_plugin: bool) -> str:
    """Return the version of vLLM in the command's environment; "" if the command does not say which one that is.

    Raises:
        ConfigError: vLLM is not there, or with ``needs_plugin`` is of another minor than the plug-in's, or has no plug-in.
    """
    python = _interpreter_of(Path(command[0]))
    if python is None:
        return ""
    versions = _installed_versions(python, environment)
    version = versions["vllm"]
    where = f"local.vllm_command = {shlex.join(command)}"
    if not version:
        raise ConfigError(f"{where}: vllm is not installed for {python}", param="local.vllm_command")
    if not needs_plugin:
        return version
    if ".".join(version.split(".")[:2]) not in SUPPORTED_MINORS:
        raise ConfigError(
            f"{where}: it is vLLM {version}, and the plug-in supports {', '.join(SUPPORTED_MINORS)}; "
            "install that one, or use --aggregated",
            param="local.vllm_command",
        )
    if not versions["kvferry-vllm"]:
        raise ConfigError(
            f"{where}: the plug-in kvferry-vllm is not installed there: {INSTALL_PLUGIN.format(python=python)}, "
            "or use --aggregated",
            param="local.vllm_command",
        )
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "kvferry" not in [name.strip() for name in plugins.split(",")]:
        raise ConfigError(f"$VLLM_PLUGINS = {plugins!r} leaves out the plug-in: add kvferry to it, or unset it")
    return version


def _words(text: str, path: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{path} = {text!r}: {error}", param=path) from None


def _interpreter_of(program: Path) -> Path | None:
    """Return the Python of a program's first lines, or the program itself if it is one; None if it is neither."""
    if program.name.startswith("python"):
        return program
    try:
        with program.open("rb") as file:
            head = file.read(_SHEBANG_BYTES).decode(errors="replace")
    except OSError:
        return None
    first, _, rest = head.partition("\n")
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or not words:
        return None
    if words[0] == "/bin/sh" and rest.startswith("'''exec' "):  # how pip writes a path that is too long for a first line
        words = shlex.split(rest.partition("\n")[0].removeprefix("'''exec'"))
    path = Path(words[0])
    return path if path.name.startswith("python") and path.is_file() else None


def _installed_versions(python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE],
            cwd="/",  # not where a folder could be taken for a package
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
            text=True,
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"local.vllm_command: {python} cannot be asked for its packages: {error}") from None
    return found


def _find_model(config: KVFerryConfig) -> tuple[str, ...]:
    """Return the arguments that name the model: a folder, or a Hugging Face id, which vLLM fetches itself.

    The router's part, tokenizer and configuration, is fetched here. Which weights of a folder count is vLLM's to say.
    """
    name, cache_dir = config.model.name, Path(config.model.cache_dir)
    is_hub_id = "/" in name and peek_config(name, cache_dir) is None
    with shown_progress() as progress:
        files = resolve_model(name, cache_dir, progress, needs_weights=False)
    if not is_hub_id:
        return (str(files.path),)
    repo_id, _, revision = name.partition("@")
    return (repo_id, "--revision", revision) if revision else (repo_id,)
