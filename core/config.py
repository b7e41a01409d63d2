"""Every setting of kvferry: all sections together, what they mean together, and how they are read.

A process gets one ``KVFerryConfig``; each part of the code receives only its section. Files (YAML, TOML or JSON),
``--set a.b=c`` and flags all go through ``load_config``, so a wrong key or value is refused in one place, with its path and
what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from core.config_checks import (
    check_address,
    check_both_or_neither,
    check_http_address,
    check_local_addresses,
    check_order,
    check_origin,
    check_peer_address,
    check_process_ports,
    check_redis_url,
)
from core.config_router import LocalSection, LogSection, RouterSection, SecuritySection, TracingSection
from core.config_tree import check_keys, check_text, explain, kind_of, parse_value, put, read_file, read_values
from core.config_types import Section
from core.config_workers import (
    MULTI_CONNECTOR,
    AgentSection,
    CacheSection,
    ConnectorSection,
    ECConnectorSection,
    EncodeSection,
    KVStoreSection,
    LMCacheSection,
    ModelSection,
    SchedulerSection,
    WorkerSection,
)
from core.constants import HASH_BLOCK_SIZE
from core.errors import ConfigError
from core.struct_types import prepared

P2P_TRANSPORTS = ("shm", "nixl", "tcp")  # what connector "p2p" can be told to use


@prepared
class KVFerryConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sections."""

    model: ModelSection = ModelSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    worker: WorkerSection = WorkerSection()
    connector: ConnectorSection = ConnectorSection()
    ec_connector: ECConnectorSection = ECConnectorSection()
    kvstore: KVStoreSection = msgspec.field(default_factory=KVStoreSection)  # its defaults are from the
    router: RouterSection = msgspec.field(default_factory=RouterSection)  # environment, as these are
    encode: EncodeSection = EncodeSection()
    agent: AgentSection = AgentSection()
    local: LocalSection = LocalSection()
    security: SecuritySection = SecuritySection()
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()

    def __post_init__(self) -> None:
        """Check what two settings mean together."""
        if self.cache.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(
                f"cache.block_size = {self.cache.block_size} is not a multiple of the hash block size {HASH_BLOCK_SIZE}",
                param="cache.block_size",
            )
        if self.cache.kv_events and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "cache.kv_events = true: there are no events without cache.enable_prefix_caching", param="cache.kv_events"
            )
        connector, router, worker = self.connector, self.router, self.worker
        check_order("connector", connector, "lease_renew_interval_s < lease_s", "lease_s <= lease_max_s")
        check_order("connector", connector, "transport_retry_s <= transport_retry_max_s")
        _check_connectors(connector)
        _check_transports("connector.transports", connector.transports, is_p2p="p2p" in connector.names)
        _check_ec_connector(self)
        _check_lmcache(connector.lmcache)
        if self.scheduler.async_scheduling == "on" and "lmcache" in connector.names:
            raise ConfigError(
                "scheduler.async_scheduling = on: connector lmcache judges each step before it schedules the next one",
                param="scheduler.async_scheduling",
            )
        _check_router(router)
        check_address("worker.control_address", worker.control_address)
        check_address("worker.kv_events_address", worker.kv_events_address)
        replay_address = worker.kv_events_replay_address or worker.kv_events_address
        check_address("worker.kv_events_replay_address", replay_address)
        check_local_addresses("agent", self.agent, "kv_events_address", "kv_events_replay_address")
        check_address("kvstore.bind_address", self.kvstore.bind_address)
        if self.kvstore.address:
            check_peer_address("kvstore.address", self.kvstore.address)
        check_order("kvstore", self.kvstore, "heartbeat_interval_s < client_timeout_s")
        if self.kvstore.redis_url:
            check_redis_url("kvstore.redis_url", self.kvstore.redis_url)
            check_order("kvstore", self.kvstore, "redis_timeout_s < request_timeout_s")
        if not worker.router_addresses:
            raise ConfigError(
                "worker.router_addresses is empty: name the routers to register with, as tcp://host:port",
                param="worker.router_addresses",
            )
        for address in worker.router_addresses:
            check_peer_address("worker.router_addresses", address)
        check_order("worker", worker, "host_slot < workers_on_host")
        if self.tracing.endpoint:
            check_http_address("tracing.endpoint", self.tracing.endpoint)


def _check_router(router: RouterSection) -> None:
    """Refuse settings of the router that contradict each other."""
    check_order("router", router, "heartbeat_interval_s < heartbeat_timeout_s", "max_body_bytes <= max_upload_bytes")
    check_both_or_neither("router", router, "tls_cert", "tls_key")
    check_order("router", router, "process_number < processes_at_port")
    if router.planner.enabled and router.processes > 1:
        raise ConfigError(
            f"router.planner.enabled = true with router.processes = {router.processes}: each process plans by its own "
            "prompts only; set router.processes = 1, or switch roles by command",
            param="router.planner.enabled",
        )
    if router.planner.enabled and router.routing != "predicted":
        raise ConfigError(
            f"router.planner.enabled = true: router.routing = {router.routing} predicts no times to plan by; set predicted",
            param="router.planner.enabled",
        )
    if router.local_prefill_itl_ms and router.routing != "predicted":
        raise ConfigError(
            f"router.local_prefill_itl_ms = {router.local_prefill_itl_ms:g}: router.routing = {router.routing} predicts no "
            "times to compare; set predicted, or router.local_prefill_itl_ms = 0",
            param="router.local_prefill_itl_ms",
        )
    check_address("router.worker_address", router.worker_address)
    check_process_ports("router.worker_address", int(router.worker_address.rpartition(":")[2]), router.processes)
    check_process_ports("router.ops_port", router.ops_port or 0, router.processes)
    for origin in router.cors_origins:
        check_origin("router.cors_origins", origin)


def _check_connectors(connector: ConnectorSection) -> None:
    """Refuse a list of connectors that cannot be meant."""
    path, names = "connector.connectors", connector.connectors
    if names and connector.name != MULTI_CONNECTOR:
        raise ConfigError(f"{path} is for connector.name = multi, not {connector.name!r}", param=path)
    if not names and connector.name == MULTI_CONNECTOR:
        raise ConfigError(f"connector.name = multi needs {path}, such as [p2p, offload]", param=path)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: {twice!r} is named twice", param=path)
    if MULTI_CONNECTOR in names:
        raise ConfigError(f"{path}: 'multi' cannot be one of its own parts", param=path)


def _check_transports(path: str, transports: Sequence[str], *, is_p2p: bool) -> None:
    """Refuse transports that connector p2p does not have; another connector gives the setting its own meaning."""
    unknown = [name for name in transports if name not in P2P_TRANSPORTS]
    if is_p2p and unknown:
        raise ConfigError(f"{path}: {unknown[0]!r} is not a transport; allowed: {', '.join(P2P_TRANSPORTS)}", param=path)


def _check_ec_connector(config: KVFerryConfig) -> None:
    """Refuse embeddings that no worker could read, and embeddings that could fill the store of the KV blocks."""
    ec_connector, kvstore = config.ec_connector, config.kvstore
    is_p2p, path = ec_connector.name == "p2p", "ec_connector.transports"
    _check_transports(path, ec_connector.transports, is_p2p=is_p2p)
    if is_p2p and not ec_connector.transports:
        raise ConfigError(f"{path} is empty: name at least one of {', '.join(P2P_TRANSPORTS)}", param=path)
    if ec_connector.kvstore_address:
        check_peer_address("ec_connector.kvstore_address", ec_connector.kvstore_address)
    elif ec_connector.name == "shared" and not (kvstore.address or config.local.kvstore):
        raise ConfigError(
            "ec_connector.name = shared needs a store that workers share: set kvstore.address, or ec_connector.kvstore_address",
            param="ec_connector.kvstore_address",
        )
    elif ec_connector.name == "shared" and "store" in config.connector.names and not kvstore.block_bytes:
        raise ConfigError(
            "ec_connector.name = shared with connector store: set kvstore.block_bytes to the size of a KV block, or the store "
            "has room for whichever comes first; or give embeddings a store of their own, ec_connector.kvstore_address",
            param="kvstore.block_bytes",
        )


def _check_lmcache(lmcache: LMCacheSection) -> None:
    """Refuse addresses at which no LMCache server can be."""
    check_peer_address("connector.lmcache.server_address", lmcache.server_address)
    path = "connector.lmcache.http_address"
    if not lmcache.http_address.startswith("http://"):
        raise ConfigError(f"{path} = {lmcache.http_address!r}: expected http://host:port", param=path)
    check_http_address(path, lmcache.http_address)


def load_config(
    path: Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> KVFerryConfig:
    """Merge a file, then ``a.b=c`` assignments, then overrides by dotted path (flags), and validate the result.

    The text of an assignment is taken as it stands where the setting is text (``router.api_key=007``), split at commas where
    it is a list of texts (``connector.transports=shm,tcp``, or in brackets), and read as YAML elsewhere. Bytes and tokens may
    be sizes such as ``1GiB``, ``512MiB`` or ``64k`` (``core.config_tree.parse_size``).

    Raises:
        ConfigError: the file cannot be read, a key does not exist, or a value is out of range; names its path and what is
            allowed.
    """
    tree = read_file(path) if path else {}
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign:
            raise ConfigError(f"--set {assignment!r}: expected a.b=value", param=assignment)
        put(tree, key.strip(), parse_value(text, kind_of(KVFerryConfig, key.strip())))
    for key, value in (overrides or {}).items():
        put(tree, key, value)
    check_text(tree)
    check_keys(tree, KVFerryConfig)
    tree = read_values(tree, KVFerryConfig)
    try:
        config = msgspec.convert(tree, KVFerryConfig, strict=False)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        raise explain(error, KVFerryConfig, tree) from None
    check_text(config)  # defaults may come from variables of the environment
    return config


def dump_config(config: KVFerryConfig) -> str:
    """Return every setting as JSON that ``load_config`` reads back, from a file or from ``STDIN``."""
    return msgspec.json.format(msgspec.json.encode(config)).decode()
