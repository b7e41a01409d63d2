"""The plug-in's settings, from ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``.

Keys begin with ``kvferry.``; keys without the prefix belong to others and are ignored.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from connectors.p2p.settings import TransferSettings
from connectors.vllm.peer_rules import PeerRules
from core.errors import ConfigError
from core.wire.curve import ClusterKeys, derive_keys
from core.wire.kv import KVVerify

PREFIX = "kvferry."
LOOPBACK = "127.0.0.1"
KEY_VARIABLE, KEY_FILE_VARIABLE = "KVFERRY_CLUSTER_KEY", "KVFERRY_CLUSTER_KEY_FILE"
PRIVATE_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fd00::/8", "::1/128")

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user sets. Durations are in seconds.

    ``host`` is the address that the sockets bind and that peers connect to; empty = this machine's address with a cluster
    key, loopback without. ``port`` is that of rank 0's control socket, rank n has ``port + n``, and the next engine of data
    parallelism goes on from there; 0 = any.
    """

    transports: tuple[str, ...] = ("nixl", "tcp")
    kv_verify: KVVerify = "auto"
    host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
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
        """
        if not self.port:
            return 0
        return int(self.port + parallel.data_parallel_index * parallel.tensor_parallel_size + rank)

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
        if not has_key and not self.insecure and not _is_loopback(host):
            raise ConfigError(
                f"kvferry.host: {host} can be reached from other machines, and there is no cluster key: set "
                f"kvferry.cluster_key_file or {KEY_FILE_VARIABLE}, or kvferry.insecure to true",
                param="kvferry.host",
            )
        return host


def read_settings(extra_config: Mapping[str, Any]) -> PluginSettings:
    """Return the settings of this configuration.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or size; the message names the key.
    """
    own = {key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)}
    unknown = sorted(own.keys() - set(PluginSettings.__struct_fields__))
    if unknown:
        known = ", ".join(PREFIX + name for name in PluginSettings.__struct_fields__)
        raise ConfigError(f"{PREFIX}{unknown[0]}: no such setting; there are {known}", param=PREFIX + unknown[0])
    try:
        return msgspec.convert(own, PluginSettings)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{PREFIX}{path.rstrip('`')}: {message}", param=PREFIX + path.rstrip("`")) from None


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
