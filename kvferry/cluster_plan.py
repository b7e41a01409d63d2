"""The processes of a local cluster, and the settings that the cluster decides itself.

Owns names, roles and the refusal of settings that contradict them. Starts nothing (``kvferry.local``).
"""

from __future__ import annotations

import contextlib
import random
import socket

import msgspec

from core.config import KVFerryConfig
from core.config_workers import WorkerSection
from core.errors import ConfigError
from core.ids import RandomIds
from core.wire.curve import new_cluster_key
from core.wire.messages import Role

CHOSEN_SETTINGS = (
    "engine_id",
    "router_addresses",
    "control_address",
    "ops_port",
    "workers_on_host",
    "host_slot",
    "is_supervised",
)
_PORTS = range(20_000, 30_000)  # below those that Linux takes for connections and for sockets that ask for any port


def worker_roles(config: KVFerryConfig) -> dict[str, Role]:
    """Return the workers' names and roles in the order of their start.

    Raises:
        ConfigError: no worker besides encode workers, or prefill workers without decode workers or the other way round.
    """
    local = config.local
    encoders: dict[str, Role] = {f"encode-{number}": "encode" for number in range(local.num_encode)}
    if local.aggregated:
        count = max(local.num_prefill, local.num_decode)
        if not count:
            raise ConfigError(
                "local.aggregated = true with local.num_prefill = 0 and local.num_decode = 0: "
                "the larger of the two is the number of workers; set one of them to at least 1",
                param="local.num_prefill",
            )
        return encoders | {f"aggregated-{number}": "aggregated" for number in range(count)}
    if not local.num_prefill or not local.num_decode:
        raise ConfigError(
            f"local.num_prefill = {local.num_prefill} and local.num_decode = {local.num_decode}: "
            "at least one of each is needed, or local.aggregated",
            param="local.num_prefill",
        )
    prefills: dict[str, Role] = {f"prefill-{number}": "prefill" for number in range(local.num_prefill)}
    return encoders | prefills | {f"decode-{number}": "decode" for number in range(local.num_decode)}


def is_for_serve(config: KVFerryConfig) -> bool:
    """Return True if these settings are for ``kvferry serve``: none of them is for a single process."""
    defaults = WorkerSection()
    return all(getattr(config.worker, name) == getattr(defaults, name) for name in CHOSEN_SETTINGS)


def workers_here(config: KVFerryConfig) -> dict[str, tuple[Role, KVFerryConfig]]:
    """Return the workers of this machine by name: those that ``serve`` starts, or ``worker.workers_on_host`` single ones.

    A single worker may have any role: all count as prefill workers, which have a pool. vLLM engines are left out.

    Raises:
        ConfigError: as ``worker_roles``.
    """
    if not is_for_serve(config):
        config = without_local_store(config)
        return {f"worker-{number}": ("prefill", config) for number in range(config.worker.workers_on_host)}
    if config.local.engine == "vllm":
        return {}
    return {name: (role, config) for name, role in worker_roles(config).items()}


def without_local_store(config: KVFerryConfig) -> KVFerryConfig:
    """Return the configuration of a worker that is started by itself: the local store is that of ``serve``, not its."""
    return msgspec.structs.replace(config, local=msgspec.structs.replace(config.local, kvstore=False))


def with_ec_connector(config: KVFerryConfig) -> KVFerryConfig:
    """Return the configuration with an EC connector between encode workers and the others, if there are encode workers."""
    if not config.local.num_encode or config.ec_connector.name != "none":
        return config
    return msgspec.structs.replace(config, ec_connector=msgspec.structs.replace(config.ec_connector, name="p2p"))


def with_cluster_key(config: KVFerryConfig) -> KVFerryConfig:
    """Return the configuration with a new cluster key, unless it has one or is insecure."""
    if config.security.cluster_key or config.security.insecure:
        return config
    security = msgspec.structs.replace(config.security, cluster_key=new_cluster_key(RandomIds()))
    return msgspec.structs.replace(config, security=security)


def free_ports(count: int) -> list[int]:
    """Return free ports that the system gives to no socket by itself; another program could still ask for one of them."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def free_port_ranges(count: int, length: int) -> list[range]:
    """Return ranges of successive ports that are free, as ``free_ports`` does."""
    starts = _PORTS[: len(_PORTS) - length : length]
    found: list[range] = []
    for start in random.SystemRandom().sample(starts, len(starts)):
        if len(found) == count:
            break
        ports = range(start, start + length)
        if all(_is_free(port) for port in ports):
            found.append(ports)
    return found


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def check_worker_settings(worker: WorkerSection) -> None:
    """Refuse settings of workers that the cluster decides itself, rather than overwrite them silently."""
    defaults = WorkerSection()
    for name in CHOSEN_SETTINGS:
        value = getattr(worker, name)
        if value != getattr(defaults, name):
            raise ConfigError(
                f"worker.{name} = {value!r}: a local cluster chooses it for each of its workers; leave it out, "
                "or start the processes one by one with kvferry router, prefill, decode and encode",
                param=f"worker.{name}",
            )
