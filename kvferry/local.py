"""A whole cluster on this machine: a router and its workers as child processes.

Owns which processes there are, their configuration files, and when the cluster is ready. Child processes are
``kvferry.processes``'s; models and requests are unknown here. ``kvferry serve``, the demo, the benchmarks and the tests use
it; it never imports torch.

    with LocalCluster(load_config(assignments=["local.num_decode=2"])) as cluster:
        httpx.get(f"{cluster.base_url}/v1/models")
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from core.clock import SystemClock
from core.config import KVFerryConfig, dump_config
from core.config_router import RouterSection
from core.config_tree import STDIN
from core.config_workers import CacheSection, KVStoreSection, SchedulerSection
from core.errors import ConfigError, KVFerryError, StartFailed
from core.wire.messages import Role
from kvferry.cluster_plan import check_worker_settings, free_ports, with_cluster_key, with_ec_connector, worker_roles
from kvferry.health import HealthLimits, HealthWatch, WatchedProcess
from kvferry.http_get import get
from kvferry.preflight import check_cluster
from kvferry.processes import Child, ChildSpec, ProcessKeeper, RestartBackoff
from kvferry.reserved_memory import reserved_bytes
from kvferry.router_plan import ROUTER, RouterPlan
from kvferry.vllm_plan import VllmServers

STORE = "kvstore"
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_LOG_TAIL_LINES = 15
_VLLM_LOG_TAIL_LINES = 80  # of a vllm serve, which writes the tracebacks of all its processes after the cause
_EXIT_CONFIG = 2  # of ``kvferry``: wrong usage or configuration
_ROLE_ARGUMENTS: Mapping[Role, Sequence[str]] = {
    "encode": ("encode",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "aggregated": ("decode", "--aggregated"),
}


class _Cancelled(Exception):
    """The start was cancelled."""


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One worker as it is now; a restart gives it another pid and another operations address."""

    engine_id: str
    role: Role
    pid: int
    ops_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of a cluster's processes in addition to their configuration.

    ``environment`` is added to the environment that they inherit, such as ``UCX_TLS``, which a library reads. With
    ``keep_control_ports`` a restarted prefill worker binds the control port of its predecessor, as a pod with a stable address
    does. ``caches`` are the KV pools, ``schedulers`` the batching of roles that differ from the configuration. ``workers`` are
    settings of section ``worker`` by the worker's name; they override those that the cluster chooses, for example to insert a
    proxy.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    keep_control_ports: bool = False
    caches: Mapping[Role, CacheSection] = field(default_factory=dict)
    schedulers: Mapping[Role, SchedulerSection] = field(default_factory=dict)
    workers: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class LocalCluster:
    """A router, ``local.num_prefill`` prefill and ``local.num_decode`` decode workers, or aggregated workers, as processes.

    With ``local.engine`` "vllm" each worker is an agent with a ``vllm serve`` of its own, a process that is named after it.
    With ``local.num_encode`` also encode workers, read by EC connector "p2p" if ``ec_connector.name`` names none. With
    ``local.kvstore`` also a store, at which ``kvstore.address`` of the workers points.
    Without a ``config``, the defaults with any free port. Workers' names and addresses are chosen here, and a ``config`` that
    sets them is refused with a ConfigError; ``router.worker_address`` is used if it is not the default. Without
    ``security.cluster_key`` the cluster makes one for its processes, which other users of this machine cannot read; with
    ``security.insecure`` its sockets stay open. ``supervise`` restarts
    processes that die, with back-off, and replaces those that are not well or do not answer (``local.health_*``).
    ``log_dir`` keeps the processes' logs; without one they go to this process's stderr (``inherit_logs``) or to a folder that
    ``stop`` removes. Use it as a context manager, or call ``stop``: neither ``stop`` nor the death of this process leaves
    a child process running.
    """

    def __init__(
        self,
        config: KVFerryConfig | None = None,
        *,
        supervise: bool = False,
        log_dir: Path | None = None,
        inherit_logs: bool = False,
        options: ProcessOptions | None = None,
    ) -> None:
        self._config = with_cluster_key(with_ec_connector(config or KVFerryConfig(router=RouterSection(port=0))))
        check_worker_settings(self._config.worker)
        self._supervise = supervise
        self._log_dir = log_dir
        self._inherit_logs = inherit_logs
        self._options = options or ProcessOptions()
        self._control_ports: dict[str, int] = {}
        self._roles = worker_roles(self._config)
        self._routers = RouterPlan(self._config.router)
        self._stores = (STORE,) if self._config.local.kvstore else ()
        self._vllm = VllmServers(self._config, self._roles) if self._config.local.engine == "vllm" else None
        self._servers = self._vllm.names if self._vllm is not None else ()
        self._backoffs = {name: self._new_backoff() for name in self._names}
        self._keeper: ProcessKeeper | None = None
        self._health: HealthWatch[Child] | None = None
        self._ends: dict[str, list[str]] = {}  # name → reasons of ends that were not ordered
        self._exit_codes: dict[str, int] = {}  # of the last of them
        self._temporary_logs: Path | None = None
        self._base_url = ""
        self._is_prepared = False
        self._is_started = False

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check for obstacles to a start, and fetch the model; ``start`` does so itself otherwise.

        Raises:
            ConfigError: a setting is wrong, or the model cannot be found.
        """
        if self._is_prepared:
            return
        if self._vllm is not None:
            self._vllm.prepare(self._options.environment)
        else:
            check_cluster(self._config, self._worker_configs(), {**os.environ, **self._options.environment})
        self._is_prepared = True

    def start(self, is_cancelled: Callable[[], bool] = lambda: False) -> Self:
        """Start all processes and return once the cluster serves, or once the start is cancelled by ``is_cancelled``.

        Raises:
            ConfigError: a setting is wrong, the model cannot be found, or a process has ended for such a reason.
            StartFailed: a process ended, or the cluster was not ready within ``local.ready_timeout_s``. The end of its log,
                if it is kept, stands in the message; the reason is the last line.
        """
        self.prepare()
        deadline = time.monotonic() + self._ready_timeout_s
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        elif not self._inherit_logs:
            self._temporary_logs = Path(tempfile.mkdtemp(prefix="kvferry-"))
        self._keeper = ProcessKeeper(SystemClock(), self._on_exit)
        try:
            self._start_routers(deadline, is_cancelled)
            if self._stores:
                self._start_store(deadline, is_cancelled)
            if self._options.keep_control_ports:
                names = [name for name, role in self._roles.items() if role == "prefill"]
                self._control_ports = dict(zip(names, free_ports(len(names)), strict=True))
            for name in (*self._servers, *self._roles):
                self._keeper.start(self._spec(name))
            self._wait_until_ready(deadline, is_cancelled)
            self._is_started = True
            if not is_cancelled():
                self._check_none_has_ended()  # from here on a death is followed by a restart; this finds one before
        except _Cancelled:
            return self
        except BaseException:
            self.stop(grace_s=0.0)
            raise
        if self._supervise:
            self._health = self._watch_health()
        return self

    def stop(self, grace_s: float = 10.0, router_grace_s: float | None = None) -> None:
        """End all processes, each killed after ``grace_s``, the router after ``router_grace_s`` if given. Idempotent.

        The router is ended first: it accepts no new requests and lets the others finish, for which it needs the workers.
        """
        health, self._health = self._health, None
        if health is not None:
            health.stop()
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        try:
            keeper.end(self._routers.names, grace_s if router_grace_s is None else router_grace_s)
            keeper.end(list(self._roles), grace_s)
            keeper.end(list(self._servers), grace_s)
            keeper.end(self._stores, grace_s)
        finally:
            keeper.close()
            if self._temporary_logs is not None:
                shutil.rmtree(self._temporary_logs, ignore_errors=True)
                self._temporary_logs = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def check(self) -> None:
        """Do nothing as long as something keeps the processes.

        Raises:
            StartFailed: nothing does: the cluster is not running, or an error has ended the thread that keeps them.
        """
        self._running().check()

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """The router's address, such as ``http://127.0.0.1:8000``; the OpenAI API is below ``/v1``."""
        return self._base_url

    @property
    def workers(self) -> list[LocalWorker]:
        """The live workers that have reported their address, in the order of their work: encode, prefill, decode."""
        found = []
        for name, role in self._roles.items():
            child = self._live(name)
            if child is not None and child.addresses.done():
                found.append(LocalWorker(name, role, child.pid, child.addresses.result()["ops_address"]))
        return found

    @property
    def pids(self) -> dict[str, int]:
        """The live processes by name: ``router``, ``router-1``, ..., ``kvstore``, workers, and vLLM's by their workers."""
        children = {name: self._live(name) for name in self._names}
        return {name: child.pid for name, child in children.items() if child is not None}

    @property
    def reserved_bytes(self) -> dict[str, int]:
        """The memory that all processes together take in addition to the model, by purpose."""
        return reserved_bytes(self._config, self._worker_configs()) if self._vllm is None else {}

    @property
    def ends(self) -> dict[str, list[str]]:
        """The reasons of processes that ended on their own, by name, in order."""
        return {name: list(ends) for name, ends in self._ends.items()}

    def workers_of(self, role: Role) -> list[LocalWorker]:
        """Return the live workers of one role."""
        return [worker for worker in self.workers if worker.role == role]

    def worker(self, engine_id: str) -> LocalWorker:
        """Return one live worker.

        Raises:
            KeyError: it is not running (any more, or yet).
        """
        return {worker.engine_id: worker for worker in self.workers}[engine_id]

    def log(self, name: str) -> str:
        """Return what a process has written so far; "" with ``inherit_logs``."""
        path = self._log_file(name)
        return path.read_text(errors="replace") if path is not None and path.exists() else ""

    def metrics(self, name: str) -> str:
        """Return the metrics of a worker, of its vLLM server, of the router or of the store, in Prometheus's text format.

        Raises:
            KeyError: it is not running (any more, or yet).
        """
        child = self._live(name)
        if child is None or not child.addresses.done():
            raise KeyError(name)
        return get(f"{_ops_address(child)}/metrics", _PROBE_TIMEOUT_S)[1]

    # ---- operations --------------------------------------------------------------------------------------------------

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process.

        Raises:
            KeyError: it is not running.
        """
        child = self._live(name)
        if child is None or not self._running().send_signal(child, number):
            raise KeyError(name)

    def restart(self, name: str, grace_s: float = 10.0) -> None:
        """End a process, if it runs, and start it again under the same name; return once the cluster is ready again."""
        keeper = self._running()
        keeper.end([name], grace_s)
        keeper.start(self._spec(name))
        self.wait_until_ready()

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return once every process is up and the router has a route.

        Raises:
            StartFailed: not within ``timeout_s`` (default ``local.ready_timeout_s``), or a process ended that is not restarted.
        """
        timeout = self._ready_timeout_s if timeout_s is None else timeout_s
        self._wait_until_ready(time.monotonic() + timeout)

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._routers.names, *self._stores, *self._servers, *self._roles)

    @property
    def _ready_timeout_s(self) -> float:
        config = self._config
        if self._vllm is None:
            return config.local.ready_timeout_s
        return max(config.local.ready_timeout_s, config.agent.start_timeout_s)

    def _running(self) -> ProcessKeeper:
        if self._keeper is None:
            raise StartFailed("the cluster is not running")
        return self._keeper

    def _live(self, name: str) -> Child | None:
        return self._keeper.current(name) if self._keeper is not None else None

    def _new_backoff(self) -> RestartBackoff:
        return RestartBackoff(self._config.local.restart_backoff_s, self._config.local.restart_backoff_max_s)

    def _start_routers(self, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        """Start the routers on free ports, and pin them, so that a restarted router keeps its addresses."""
        self._routers = RouterPlan(_on_any_worker_port(self._config.router))
        first, *others = self._routers.names
        addresses = self._addresses(self._running().start(self._spec(first)), deadline, is_cancelled)
        self._base_url = addresses["http_address"]
        self._routers.pin(first, addresses)
        for child in [self._running().start(self._spec(name)) for name in others]:
            self._routers.pin(child.spec.name, self._addresses(child, deadline, is_cancelled))

    def _start_store(self, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        """Start the store on a free port, and pin it; every worker gets its address."""
        store = self._config.kvstore
        if store.bind_address == KVStoreSection().bind_address:
            store = msgspec.structs.replace(store, bind_address="tcp://127.0.0.1:0")
        self._config = msgspec.structs.replace(self._config, kvstore=store)
        child = self._running().start(self._spec(STORE))
        address = self._addresses(child, deadline, is_cancelled)["store_address"]
        store = msgspec.structs.replace(store, address=address, bind_address=address)
        self._config = msgspec.structs.replace(self._config, kvstore=store)

    def _addresses(self, child: Child, deadline: float, is_cancelled: Callable[[], bool]) -> Mapping[str, str]:
        while not child.addresses.done():
            if is_cancelled():
                raise _Cancelled
            if time.monotonic() > deadline:
                raise self._failed(child.spec.name, "did not tell its address in time")
            time.sleep(_POLL_S)
        if child.addresses.exception() is not None:
            raise self._failed(child.spec.name)
        return child.addresses.result()

    def _spec(self, name: str) -> ChildSpec:
        """Return the start options of a process; settings go through standard input, so that no key is in a file."""
        variables, role = self._options.environment, self._roles.get(name)
        if self._vllm is not None and name in self._servers:
            return self._vllm.server_spec(name, variables, self._log_file(name))
        if self._vllm is not None and role is not None:
            words, variables = ["agent", "--role", role], {**self._vllm.agent_variables, **variables}
        else:
            own = STORE if name in self._stores else ROUTER
            words = [own] if role is None else [*_ROLE_ARGUMENTS[role]]
        command = [sys.executable, "-P", "-m", "kvferry", *words, "--config", str(STDIN)]
        return ChildSpec(name, command, self._log_file(name), lambda: dump_config(self._config_of(name)), variables)

    def _config_of(self, name: str) -> KVFerryConfig:
        if name in self._routers.names:
            return msgspec.structs.replace(self._config, router=self._routers.section(name))
        return self._config if name in self._stores else self._worker_config(name)

    def _worker_configs(self) -> dict[str, tuple[Role, KVFerryConfig]]:
        return {name: (role, self._worker_config(name)) for name, role in self._roles.items()}

    def _worker_config(self, name: str) -> KVFerryConfig:
        chosen: dict[str, object] = {
            "engine_id": name,
            "router_addresses": self._routers.worker_addresses,
            "control_address": f"tcp://127.0.0.1:{self._control_ports.get(name, 0)}",
            "ops_port": 0,
            "workers_on_host": len(self._roles),
            "host_slot": list(self._roles).index(name),
            "is_supervised": self._supervise,
        }
        worker = msgspec.structs.replace(self._config.worker, **chosen | dict(self._options.workers.get(name, {})))
        role = self._roles[name]
        cache = self._options.caches.get(role, self._config.cache)
        scheduler = self._options.schedulers.get(role, self._config.scheduler)
        config = msgspec.structs.replace(self._config, worker=worker, cache=cache, scheduler=scheduler)
        return config if self._vllm is None else self._vllm.agent_config(name, config)

    def _log_file(self, name: str) -> Path | None:
        folder = self._log_dir or self._temporary_logs
        return None if self._inherit_logs or folder is None else folder / f"{name}.log"

    def _on_exit(self, child: Child, lived_s: float) -> float | None:
        """Return when to restart a child; while the cluster starts, a death fails the start instead."""
        self._ends.setdefault(child.spec.name, []).append(child.describe_end())
        self._exit_codes[child.spec.name] = child.process.returncode
        if not self._supervise or not self._is_started:
            return None
        return self._backoffs[child.spec.name].next_delay_s(lived_s)

    def _wait_until_ready(self, deadline: float, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        waiting = list(self._names)
        while waiting and not is_cancelled():
            if not (self._supervise and self._is_started):
                self._check_none_has_ended()  # those that were ready as well
            waiting = [name for name in waiting if not self._is_ready(name)]
            if waiting and time.monotonic() > deadline:
                raise self._failed(waiting[0], "did not become ready in time")
            if waiting:
                time.sleep(_POLL_S)

    def _check_none_has_ended(self) -> None:
        for name in self._names:
            if self._live(name) is None:
                raise self._failed(name)

    def _is_ready(self, name: str) -> bool:
        child = self._live(name)
        if child is None or not child.addresses.done() or child.addresses.exception() is not None:
            return False
        try:
            path = "health" if name in self._servers else "ready"
            return get(f"{_ops_address(child)}/{path}", _PROBE_TIMEOUT_S)[0] == http.client.OK
        except OSError:
            return False

    def _failed(self, name: str, what: str = "") -> KVFerryError:
        """Return the error for a process that has ended or, if ``what`` says so, does not get ready; the reason comes last."""
        num_lines = _VLLM_LOG_TAIL_LINES if name in self._servers else _LOG_TAIL_LINES
        tail = "\n".join(self.log(name).splitlines()[-num_lines:])
        ends = self._ends.get(name)
        if not what:
            what = f"did not start: it {ends[-1]}" if ends else "was ended before it was ready"
        message = (f"the end of the log of {name}:\n{tail}\n" if tail else "") + f"{name} {what}"
        is_config = self._exit_codes.get(name) == _EXIT_CONFIG
        return ConfigError(message) if is_config else StartFailed(message)

    def _watch_health(self) -> HealthWatch[Child]:
        local, keeper = self._config.local, self._running()
        limits = HealthLimits(
            interval_s=local.health_interval_s,
            timeout_s=local.health_timeout_s,
            max_failures=local.health_max_failures,
            max_silence_s=local.health_max_silence_s,
            max_start_s=self._ready_timeout_s,
        )

        def watched(name: str) -> WatchedProcess[Child]:
            return WatchedProcess(
                name=name,
                current=lambda: keeper.current(name),
                question=self._health_url,
                replace=keeper.replace,
            )

        watch = HealthWatch([watched(name) for name in self._names], limits, SystemClock(), self.pids.values())
        watch.start()
        return watch

    def _health_url(self, child: Child, has_started: bool) -> str:
        """Return the health URL of a process; of a worker that loads its model, the URL that shows whether it has started."""
        if not child.addresses.done() or child.addresses.exception() is not None:
            return ""
        path = "started" if child.spec.name in self._roles and not has_started else "health"
        return f"{_ops_address(child)}/{path}"


def _on_any_worker_port(router: RouterSection) -> RouterSection:
    """Return the settings with any port in place of the default one, so that several clusters can run at once."""
    if router.worker_address != RouterSection().worker_address:
        return router
    return msgspec.structs.replace(router, worker_address="tcp://127.0.0.1:0")


def _ops_address(child: Child) -> str:
    """Return the address for the supervisor's requests: the operations port, or the API of a router without one."""
    addresses = child.addresses.result()
    return addresses.get("ops_address") or addresses["http_address"]
