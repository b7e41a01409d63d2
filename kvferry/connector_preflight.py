"""Checks of connectors before a start: that they exist, can be imported, and that their libraries are installed.

Owns the process in which a connector of others, or NIXL, is imported: it may load torch, which a supervisor must not, and the
process has the import path of a worker. Each check raises a ConfigError that names setting, value and fix.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

from connectors.p2p.transport.nixl import INSTALL_HINT, installed_module
from connectors.registry import CONNECTORS, EC_CONNECTORS, NO_EC_CONNECTOR, find_entry_point
from core.config import P2P_TRANSPORTS, KVFerryConfig
from core.errors import ConfigError
from core.wire.messages import Role
from kvferry.reserved_memory import Workers, uses_kvstore

_IMPORT_TIMEOUT_S = 120.0  # on a machine that reads torch from a cold disk
_OUR_DISTRIBUTION = "kvferry"
_TIERS = ("offload", "store")  # connectors that prolong the hits of the prefix cache
_IMPORT = """
import json, os, sys
from core.errors import ConfigError
from kvferry.child import die_with_parent
answer_fd, parent_pid, its_import, statements, *arguments = sys.argv[1:]
die_with_parent(int(parent_pid))
reason = ""
try:
    exec(statements)
except ConfigError as error:
    reason = error.message
except Exception as error:
    reason = f"{its_import} fails: {type(error).__name__}: {' '.join(str(error).split())}"
os.write(int(answer_fd), json.dumps(reason).encode())
os._exit(0)  # before anything of theirs prints at the exit
"""
_LOAD_FACTORY = "from connectors.registry import load_factory; load_factory(*arguments)"
_LOAD_NIXL = """
import contextlib
from connectors.p2p.transport.nixl import import_library
try:
    import_library()
except ImportError:  # workers have loaded torch, and with it libraries of CUDA that NIXL may be linked against
    with contextlib.suppress(ImportError):
        import torch
    import_library()
"""


def check_connectors(config: KVFerryConfig, workers: Workers, *, are_all: bool) -> None:
    """Check that the named connectors exist, and the libraries that they, the store's tiers and traces need.

    ``are_all`` says whether the cluster has no other workers.

    Raises:
        ConfigError: one is missing.
    """
    check_names(config)
    for path, names in used_transports(workers, are_all=are_all).items():
        if set(names) == {"nixl"} and installed_module() is None:
            raise ConfigError(f"{path} = nixl: the library is not installed: {INSTALL_HINT}, or use shm, tcp", param=path)
    check_redis(config)
    check_tracing(config)


def check_p2p(workers: Workers) -> None:
    """Refuse workers whose connector p2p has no transport.

    Raises:
        ConfigError: there is one.
    """
    path = "connector.transports"
    if not used_transports(workers, are_all=False).get(path, P2P_TRANSPORTS):
        raise ConfigError(f"{path} is empty: name at least one of {', '.join(P2P_TRANSPORTS)}", param=path)


def check_prefix_caching(workers: Workers) -> None:
    """Refuse workers that would load beginnings of prompts from each other by p2p, where none of them keeps any.

    Raises:
        ConfigError: that is so.
    """
    computing = [config for role, config in workers.values() if role != "encode"]
    shares = any(config.connector.peer_prefixes and "p2p" in config.connector.names for config in computing)
    if shares and not any(config.cache.enable_prefix_caching for config in computing):
        raise ConfigError(
            "connector.peer_prefixes = true with cache.enable_prefix_caching = false: no worker keeps what others would load; "
            "leave one of them out",
            param="connector.peer_prefixes",
        )


def check_tier_caching(workers: Workers) -> None:
    """Refuse workers with a tier and without the prefix cache whose hits it prolongs.

    Raises:
        ConfigError: there is one.
    """
    for role, config in workers.values():
        tier = next((name for name in config.connector.names if name in _TIERS), None)
        if tier is not None and role != "encode" and not config.cache.enable_prefix_caching:
            raise ConfigError(
                f"{_path_of_names(config)} with {tier} and cache.enable_prefix_caching = false: {tier} prolongs the hits of "
                f"the prefix cache; leave cache.enable_prefix_caching out, or {tier}",
                param="cache.enable_prefix_caching",
            )


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
        reason = _why_not_loadable(f"{setting} = {name!r}: its import", environment, _LOAD_FACTORY, group, name, setting)
        if reason:
            raise ConfigError(reason, param=setting)


def check_nixl(workers: Workers, environment: Mapping[str, str] = os.environ) -> None:
    """Import NIXL where workers of a cluster would have no other transport, in a process that has this environment.

    Raises:
        ConfigError: it cannot be imported.
    """
    for path, names in used_transports(workers, are_all=True).items():
        reason = why_no_nixl(environment) if set(names) == {"nixl"} else ""
        if reason:
            raise ConfigError(f"{path} = nixl: {reason}; {INSTALL_HINT}, or use shm, tcp", param=path)


def why_no_nixl(environment: Mapping[str, str] = os.environ) -> str:
    """Return why a worker with this environment could not import NIXL, which is installed; "" if it could."""
    return _why_not_loadable("the library's import", environment, _LOAD_NIXL)


def used_transports(workers: Workers, *, are_all: bool) -> dict[str, tuple[str, ...]]:
    """Return the transports that workers have, by setting; if they ``are_all``, none has embeddings without encode workers."""
    found: dict[str, tuple[str, ...]] = {}
    has_embeddings = not are_all or any(role == "encode" for role, _ in workers.values())
    for role, config in workers.values():
        if _has_p2p(role, config):
            found["connector.transports"] = config.connector.transports
        if has_embeddings and config.ec_connector.name == "p2p":
            found["ec_connector.transports"] = config.ec_connector.transports
    return found


def _has_p2p(role: Role, config: KVFerryConfig) -> bool:
    """Return True if a worker has connector p2p. Of p2p alone, an aggregated worker that reads no other has none."""
    names = config.connector.names
    is_alone = role == "aggregated" and not (config.worker.can_switch_role or config.connector.peer_prefixes)
    return "p2p" in names and role != "encode" and not (is_alone and set(names) == {"p2p"})


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
    for name in config.connector.names:
        yield CONNECTORS, name, _path_of_names(config)
    if config.ec_connector.name != NO_EC_CONNECTOR:
        yield EC_CONNECTORS, config.ec_connector.name, "ec_connector.name"


def _path_of_names(config: KVFerryConfig) -> str:
    """Return the setting that names the connectors."""
    return "connector.name" if config.connector.names == (config.connector.name,) else "connector.connectors"


def _why_not_loadable(its_import: str, environment: Mapping[str, str], statements: str, *arguments: str) -> str:
    """Return why a worker could not import something; "" if it could. What the import starts is ended.

    Answer and errors are files: a pipe would stay open as long as a process that the import starts.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _IMPORT, str(answer.fileno()), str(os.getpid()), its_import, statements, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(answer.fileno(),),
            start_new_session=True,
        )
        if not _ends_in_time(process):
            return f"{its_import} takes more than {_IMPORT_TIMEOUT_S:g} s"
        answer.seek(0)
        told = answer.read()
        if told:
            reason: str = json.loads(told)
            return reason
        errors.seek(0)
        last_lines = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([f"{its_import} ends the process with exit code {process.returncode}", *last_lines])


def _ends_in_time(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the leader of a session, then kill its process group; return False if the time was over before it ended."""
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(_IMPORT_TIMEOUT_S * 1000))
    finally:
        os.close(pidfd)
        os.killpg(process.pid, signal.SIGKILL)  # before the leader is reaped: until then its id names no other group
        process.wait()
