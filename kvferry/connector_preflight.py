"""Checks of connectors before a start: that they exist, can be imported, and that their libraries are installed.

Owns the process in which a connector of others is imported: it may load torch, which a supervisor must not, and the process has
the import path of a worker. Each check raises a ConfigError that names setting, value and fix.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from connectors.p2p.transport.nixl import INSTALL_HINT, installed_module
from connectors.registry import CONNECTORS, EC_CONNECTORS, NO_EC_CONNECTOR, find_entry_point
from core.config import KVFerryConfig
from core.errors import ConfigError
from kvferry.reserved_memory import uses_kvstore

_IMPORT_TIMEOUT_S = 120.0  # on a machine that reads torch from a cold disk
_OUR_DISTRIBUTION = "kvferry"
_LOAD = """
import json, os, sys
from connectors.registry import load_factory
from core.errors import ConfigError
reason = ""
try:
    load_factory(*sys.argv[1:])
except ConfigError as error:
    reason = error.message
print("\\n" + json.dumps(reason), flush=True)
os._exit(0)  # before anything of theirs prints at the exit
"""


def check_connectors(config: KVFerryConfig) -> None:
    """Check that the named connectors exist, and the libraries that they, the store's tiers and traces need.

    Raises:
        ConfigError: one is missing.
    """
    check_names(config)
    for path, names in used_transports(config).items():
        if set(names) == {"nixl"} and installed_module() is None:
            raise ConfigError(f"{path} = nixl: the library is not installed: {INSTALL_HINT}, or use shm, tcp", param=path)
    check_redis(config)
    check_tracing(config)


def check_names(config: KVFerryConfig) -> None:
    """Look for the entry points of the named connectors. Nothing is imported.

    Raises:
        ConfigError: there is no such connector; lists the existing ones.
    """
    for group, name, setting in _named(config):
        if ":" not in name:
            find_entry_point(group, name, setting)


def check_factories(config: KVFerryConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Import the connectors that are not kvferry's own, in a process that has this environment.

    Raises:
        ConfigError: one cannot be imported, or there is no such factory.
    """
    for group, name, setting in _named(config):
        if ":" not in name:
            found = find_entry_point(group, name, setting).dist
            if found is not None and found.name == _OUR_DISTRIBUTION:
                continue
        reason = _why_not_loadable(group, name, setting, environment)
        if reason:
            raise ConfigError(reason, param=setting)


def used_transports(config: KVFerryConfig) -> dict[str, tuple[str, ...]]:
    """Return the transports by setting, without those of a connector that has none."""
    found = {"connector.transports": config.connector.transports} if "p2p" in config.connector.names else {}
    if config.ec_connector.name == "p2p":
        found["ec_connector.transports"] = config.ec_connector.transports
    return found


def check_redis(config: KVFerryConfig) -> None:
    """Check for the library of the store's Redis tier, if there is one.

    Raises:
        ConfigError: it is not installed.
    """
    if config.kvstore.redis_url and uses_kvstore(config) and importlib.util.find_spec("redis") is None:
        raise ConfigError(
            "kvstore.redis_url: the redis library is not installed: pip install 'kvferry[redis]', or leave it out",
            param="kvstore.redis_url",
        )


def check_tracing(config: KVFerryConfig) -> None:
    """Check for the library that sends traces, if they are wanted.

    Raises:
        ConfigError: it is not installed.
    """
    if config.tracing.endpoint and not has_otlp_exporter():
        raise ConfigError(
            "tracing.endpoint: OpenTelemetry is not installed: pip install 'kvferry[otel]', or leave it out",
            param="tracing.endpoint",
        )


def has_otlp_exporter() -> bool:
    """Return True if the library that sends traces is installed."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ImportError:
        return False


def _named(config: KVFerryConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the entry point's group, the name and the setting of each connector."""
    path = "connector.name" if config.connector.names == (config.connector.name,) else "connector.connectors"
    for name in config.connector.names:
        yield CONNECTORS, name, path
    if config.ec_connector.name != NO_EC_CONNECTOR:
        yield EC_CONNECTORS, config.ec_connector.name, "ec_connector.name"


def _why_not_loadable(group: str, name: str, setting: str, environment: Mapping[str, str]) -> str:
    """Return why a worker could not import a connector; "" if it could."""
    command = [sys.executable, "-P", "-c", _LOAD, group, name, setting]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"{setting} = {name!r}: its import takes more than {_IMPORT_TIMEOUT_S:g} s"
    if done.returncode == 0:
        reason: str = json.loads(done.stdout.splitlines()[-1])  # what the connector itself prints stands before it
        return reason
    last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"{setting} = {name!r}: its import fails: {last_line}"
