"""The ``vllm serve`` of each worker of a local cluster with vLLM engines: command, environment, ports and GPUs.

Starts nothing (``kvferry.local``). Each server is a child process of its own, named after its worker, whose agent makes it a
worker of the cluster. Servers listen on loopback, behind an API key that only the cluster knows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.config import KVFerryConfig
from core.config_checks import check_header_key
from core.config_workers import AgentSection
from core.errors import ConfigError
from core.ids import RandomIds
from core.wire.curve import new_cluster_key
from core.wire.messages import Role
from kvferry.cluster_plan import free_port_ranges
from kvferry.foreign import ForeignProgram
from kvferry.machine import visible_gpus
from kvferry.processes import ChildSpec
from kvferry.vllm_preflight import VllmInstallation, check_vllm_cluster

HOST = "127.0.0.1"
_SUFFIX = "-vllm"
_NUM_RANK_PORTS = 16  # for the control sockets of one server: one for each rank
_FORWARDED = (  # settings of section connector that the plug-in has under the same names
    "kv_verify",
    "transfer_deadline_s",
    "transfer_stall_s",
    "transport_retry_s",
    "transport_retry_max_s",
    "handshake_timeout_s",
    "lease_s",
    "lease_renew_interval_s",
    "lease_max_s",
    "max_quarantined_blocks",
)
_GIB = 1 << 30
REPLAY_SUFFIX = "-replay"  # of the address that repeats KV events
_OWN_EVENTS = frozenset({"--kv-events-config", "--data-parallel-size", "-dp"})


def server_name(worker: str) -> str:
    """Return the name of the child process that is a worker's server."""
    return worker + _SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerPlan:
    """One server: the first of its ``ports`` is that of HTTP, the others are its ranks'. No ``gpus``: all that there are."""

    worker: str
    role: Role
    ports: range
    gpus: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its child process."""
        return server_name(self.worker)

    @property
    def events_address(self) -> str:
        """Where its agent reads its KV events: a name in this network namespace, which only local processes reach."""
        return f"ipc://@kv-events-{self.ports[0]}"

    @property
    def url(self) -> str:
        """Where its agent finds it."""
        return f"http://{HOST}:{self.ports[0]}"

    def spec(
        self, config: KVFerryConfig, installation: VllmInstallation, variables: Mapping[str, str], log_file: Path | None
    ) -> ChildSpec:
        """Return the start options; ``variables`` are set in addition to those that the server needs."""
        program = ForeignProgram(
            command=tuple(self.command(config, installation)),
            http_address=self.url,
            folder_variable="VLLM_RPC_BASE_PATH",  # a server that is killed leaves the sockets of its engines
        )
        return ChildSpec(
            self.name,
            [sys.executable, "-P", "-m", "kvferry.foreign"],
            log_file,
            lambda: msgspec.json.encode(program).decode(),
            {**self._environment(config, installation), **variables},
        )

    def command(self, config: KVFerryConfig, installation: VllmInstallation) -> list[str]:
        """Return the command line."""
        model = config.model
        command = [*installation.command, "serve", *installation.model]
        command += ["--served-model-name", model.served_name or model.name, "--host", HOST, "--port", str(self.ports[0])]
        command += ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        if model.dtype != "auto":
            command += ["--dtype", model.dtype]
        if model.max_model_len:
            command += ["--max-model-len", str(model.max_model_len)]
        if publishes_kv_events(config, installation.arguments):
            command += self.events_arguments()
        if self.role != "aggregated":
            command += ["--kv-transfer-config", json.dumps(self._transfer_config(config))]
        return [*command, *installation.arguments]

    def events_arguments(self) -> list[str]:
        """Return the options by which the server publishes; it binds an ``ipc`` endpoint, and would connect to ``tcp://host``."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_address,
            "replay_endpoint": self.events_address + REPLAY_SUFFIX,
        }
        return ["--kv-events-config", json.dumps(config)]

    def _transfer_config(self, config: KVFerryConfig) -> dict[str, object]:
        connector = config.connector
        extra: dict[str, object] = {name: getattr(connector, name) for name in _FORWARDED}
        extra |= {"transports": vllm_transports(config), "host": HOST, "port": self.ports[1], "peers": [HOST]}
        return {
            "kv_connector": "KvferryConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": connector.kv_load_failure_policy,
            "kv_connector_extra_config": {f"kvferry.{name}": value for name, value in extra.items()},
        }

    def _environment(self, config: KVFerryConfig, installation: VllmInstallation) -> dict[str, str]:
        """Return the variables: the cluster's key, the GPUs, and on a CPU what several servers on one machine need."""
        found = {"KVFERRY_CLUSTER_KEY": config.security.cluster_key, "KVFERRY_CLUSTER_KEY_FILE": ""}
        if self.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if installation.is_for_cpu:
            found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else all servers bind the same cores
            found["OMP_WAIT_POLICY"] = "PASSIVE"
            found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, config.cache.memory_bytes // _GIB))
        return found


class VllmServers:
    """The servers of a cluster's workers. ``names`` are those of their processes; ``prepare`` comes before all else.

    Raises:
        ConfigError: a setting is set that the cluster chooses itself.
    """

    def __init__(self, config: KVFerryConfig, roles: Mapping[str, Role]) -> None:
        check_agent_settings(config.agent)
        self._config = config
        self._roles = roles
        self._plans: dict[str, VllmServerPlan] = {}
        self._installation: VllmInstallation | None = None
        self._api_key = check_header_key("$VLLM_API_KEY", os.environ.get("VLLM_API_KEY", "")) or new_cluster_key(RandomIds())
        self.names = tuple(server_name(worker) for worker in roles)

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Check for obstacles to a start, and choose ports; ``variables`` are added to the environment.

        Raises:
            ConfigError: a setting is wrong, vLLM cannot be started, or the model cannot be found.
        """
        environment = {**os.environ, **variables}
        self._installation = check_vllm_cluster(self._config, environment)
        self._plans = plan_servers(self._roles, environment)

    @property
    def agent_variables(self) -> dict[str, str]:
        """The environment of an agent."""
        return {"VLLM_API_KEY": self._api_key}

    def server_spec(self, name: str, variables: Mapping[str, str], log_file: Path | None) -> ChildSpec:
        """Return the start options of a server."""
        assert self._installation is not None, "it is prepared"
        plan = self._plans[name.removesuffix(_SUFFIX)]
        return plan.spec(self._config, self._installation, {**self.agent_variables, **variables}, log_file)

    def agent_config(self, worker: str, config: KVFerryConfig) -> KVFerryConfig:
        """Return the configuration of a worker's agent."""
        assert self._installation is not None, "it is prepared"
        plan = self._plans[worker]
        agent = msgspec.structs.replace(config.agent, engine=plan.url)
        if publishes_kv_events(config, self._installation.arguments):
            address = plan.events_address
            agent = msgspec.structs.replace(agent, kv_events_address=address, kv_events_replay_address=address + REPLAY_SUFFIX)
        return msgspec.structs.replace(config, agent=agent)


def publishes_kv_events(config: KVFerryConfig, arguments: Sequence[str]) -> bool:
    """Return True if servers publish KV events to their agents: unless nobody uses them, or the user's arguments have others.

    An engine of several data-parallel ranks publishes on an endpoint for each, which an agent does not read.
    """
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return config.router.routing == "predicted" and not flags & _OWN_EVENTS


def check_agent_settings(agent: AgentSection) -> None:
    """Refuse settings of agents that the cluster decides itself, rather than overwrite them silently."""
    for name in ("engine", "api_key_file", "kv_events_address", "kv_events_replay_address"):
        value = getattr(agent, name)
        if value != getattr(AgentSection(), name):
            raise ConfigError(
                f"agent.{name} = {value!r}: a local cluster chooses it for each of its agents; leave it out, or start the "
                "processes one by one with kvferry router and kvferry agent",
                param=f"agent.{name}",
            )


def plan_servers(roles: Mapping[str, Role], environment: Mapping[str, str]) -> dict[str, VllmServerPlan]:
    """Return the servers by the names of their workers, in the same order; the GPUs are shared out evenly."""
    gpus = visible_gpus(environment)
    share = len(gpus) // len(roles)
    ranges = free_port_ranges(len(roles), 1 + _NUM_RANK_PORTS)
    return {
        worker: VllmServerPlan(worker=worker, role=role, ports=ports, gpus=tuple(gpus[number * share : (number + 1) * share]))
        for number, ((worker, role), ports) in enumerate(zip(roles.items(), ranges, strict=True))
    }


def vllm_transports(config: KVFerryConfig) -> list[str]:
    """Return the transports that a vLLM engine can have: it has no pool in shared memory."""
    return [name for name in config.connector.transports if name != "shm"]
