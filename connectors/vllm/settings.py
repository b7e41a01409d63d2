"""The plug-in's settings, from ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``.

Keys begin with ``kvferry.``; keys without the prefix belong to others and are ignored.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from connectors.p2p.settings import TransferSettings
from connectors.vllm.peer_rules import LOCALHOST, LOOPBACK, PeerRules, names_host
from core.config_checks import check_order
from core.errors import ConfigError
from core.wire.curve import ClusterKeys, derive_keys
from core.wire.kv import KVVerify
from core.wire.sockets import is_loopback

PREFIX = "kvferry."
KEY_VARIABLE, KEY_FILE_VARIABLE = "KVFERRY_CLUSTER_KEY", "KVFERRY_CLUSTER_KEY_FILE"
PRIVATE_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fd00::/8", "::1/128")

MAX_PORT = 65535

Seconds = Annotated[float, msgspec.Meta(gt=0, le=365 * 86400)]
TransportName = Literal["shm", "nixl", "tcp"]


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user sets. Durations are in seconds.

    ``host`` is the address that the sockets bind and that peers connect to; empty = this machine's address with a cluster
    key, loopback without. ``port`` is that of rank 0's control socket, rank n has ``port + n``, and the next engine of data
    parallelism goes on from there; 0 = any.
    """

    transports: Annotated[tuple[TransportName, ...], msgspec.Meta(min_length=1)] = ("nixl", "tcp")
    kv_verify: KVVerify = "auto"
    host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0
    cluster_key_file: str = ""
    insecure: bool = False  # without a key, bind other addresses than loopback all the same
    peers: tuple[str, ...] | None = None  # names and networks; None = private networks, without a key loopback only
    kv_cache_layout: Literal["BLHNC", "LBHNC"] = "BLHNC"  # that vLLM is asked for
    model: str = ""  # name of the weights, the same on both sides; empty = vLLM's, which may be a path
    transfer_deadline_s: Seconds = 30.0
    transfer_stall_s: Seconds = 5.0
    transport_retry_s: Seconds = 1.0
    transport_retry_max_s: Seconds = 60.0
    handshake_timeout_s: Seconds = 5.0
    lease_s: Seconds = 30.0
    lease_renew_interval_s: Seconds = 5.0
    lease_max_s: Seconds = 600.0
    max_quarantined_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def transfer(self) -> TransferSettings:
        """The part that concerns transfers."""
        return TransferSettings(**{name: getattr(self, name) for name in TransferSettings.__dataclass_fields__})

    def port_of(self, rank: int, parallel: Any) -> int:
        """Return the port of a tensor-parallel rank by vLLM's ``ParallelConfig``; data-parallel engines follow each other.

        They are told apart by their index: engines of a dense model are independent, and each has data-parallel rank 0.

        Raises:
            ConfigError: there is no such port.
        """
        if not self.port:
            return 0
        found = int(self.port + parallel.data_parallel_index * parallel.tensor_parallel_size + rank)
        if found > MAX_PORT:
            message = f"kvferry.port: {self.port} leaves no port for rank {rank} of data-parallel engine "
            raise ConfigError(f"{message}{parallel.data_parallel_index}: it would be {found}", param="kvferry.port")
        return found

    def peer_rules(self, has_key: bool) -> PeerRules:
        """Return which peers may be connected to.

        Raises:
            ConfigError: an entry is neither a name nor a network.
        """
        if self.peers is not None:
            return PeerRules(self.peers)
        return PeerRules(PRIVATE_NETWORKS if has_key else (f"{LOOPBACK}/8", "::1/128"))

    def bind_host(self, has_key: bool, own_address: str) -> str:
        """Return the host that the sockets bind; ``own_address`` is this machine's.

        Raises:
            ConfigError: other machines could connect, and nothing would keep strangers out.
        """
        host = self.host or (own_address if has_key else LOOPBACK)
        if host.lower() == LOCALHOST:  # peers compare addresses as text, and what a name stands for is not ours to say
            host = LOOPBACK
        if not has_key and not self.insecure and not is_loopback(host):
            raise ConfigError(
                f"kvferry.host: {host} can be reached from other machines, and there is no cluster key: set "
                f"kvferry.cluster_key_file or {KEY_FILE_VARIABLE}, or kvferry.insecure to true",
                param="kvferry.host",
            )
        return host


def read_settings(extra_config: Mapping[str, Any]) -> PluginSettings:
    """Return the settings of this configuration.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or size, or two that contradict each other; the message names
            the keys.
    """
    own = {key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)}
    unknown = sorted(own.keys() - set(PluginSettings.__struct_fields__))
    if unknown:
        known = ", ".join(PREFIX + name for name in PluginSettings.__struct_fields__)
        raise ConfigError(f"{PREFIX}{unknown[0]}: no such setting; there are {known}", param=PREFIX + unknown[0])
    try:
        found = msgspec.convert(own, PluginSettings)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        allowed = _allowed_values(path.partition("[")[0])
        message += f"; allowed: {', '.join(allowed)}" if allowed else ""
        raise ConfigError(f"{PREFIX}{path}: {message}", param=PREFIX + path) from None
    _check(found)
    return found


def read_keys(settings: PluginSettings, environment: Mapping[str, str] = os.environ) -> ClusterKeys | None:
    """Return the keys of the cluster, None without a secret: from the file of the settings, or from the environment.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    path = settings.cluster_key_file or environment.get(KEY_FILE_VARIABLE, "")
    name = "kvferry.cluster_key_file" if settings.cluster_key_file else KEY_FILE_VARIABLE if path else KEY_VARIABLE
    if not path:
        return derive_keys(environment.get(KEY_VARIABLE, ""), name)
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error}", param=name) from None
    if not secret:
        raise ConfigError(f"{name}: {path} is empty", param=name)
    return derive_keys(secret, name)


def _allowed_values(name: str) -> tuple[str, ...]:
    """Return the values of a setting, or of its items, if they are a few names."""
    (kind,) = (field.type for field in msgspec.structs.fields(PluginSettings) if field.name == name)
    while get_origin(kind) in (Annotated, tuple):
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


def _check(settings: PluginSettings) -> None:
    """Check what the types do not say, before the engine loads its model and starts the agent, which has other names for it.

    Raises:
        ConfigError: a value that cannot work, or two that contradict each other.
    """
    section = PREFIX.rstrip(".")
    check_order(section, settings, "lease_renew_interval_s < lease_s", "lease_s <= lease_max_s")
    check_order(section, settings, "transport_retry_s <= transport_retry_max_s")
    if len(set(settings.transports)) < len(settings.transports):
        raise ConfigError(f"kvferry.transports: {list(settings.transports)} names one twice", param="kvferry.transports")
    if settings.host:
        _check_host(settings.host)
    if settings.peers is not None:
        PeerRules(settings.peers)


def _check_host(host: str) -> None:
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = ipaddress.ip_address(host)
    except ValueError:
        address = None  # a name
    if host == "*" or (address is not None and address.is_unspecified):
        raise ConfigError(
            f"kvferry.host: peers cannot connect to {host}, which stands for all addresses of a machine; set it to the host "
            "name or IP address at which decode engines reach this one",
            param="kvferry.host",
        )
    if not names_host(host) or (address is None and ":" in host):
        raise ConfigError(
            f"kvferry.host: {host!r} is neither a host name nor an IP address, without port and brackets", param="kvferry.host"
        )
