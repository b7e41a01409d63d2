"""The cluster under test: real processes, every connection between them through a proxy, and every fault as a method.

Knows how to make a fault and how to end it. What goes wrong when is up to ``tests.chaos.faults``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from core.config import load_config
from kvferry.cluster_plan import free_ports
from kvferry.local import ROUTER, LocalCluster, ProcessOptions
from tests.chaos.questions import MODEL
from tests.support.tcp_proxy import TcpProxy
from tests.support.transport_cells import CELLS, HELD

_SETTINGS = (
    f"model.name={MODEL}",
    "router.port=0",
    "cache.block_size=16",
    "cache.num_blocks=192",
    "worker.cpu_threads=1",
    "worker.pin_cpus=false",
    "connector.name=gray_connector:make_connector",
    "connector.lease_s=6",
    "connector.lease_renew_interval_s=1",
    "connector.transfer_deadline_s=4",
    "local.ready_timeout_s=240",
    "local.restart_backoff_s=0.2",
    "local.restart_backoff_max_s=0.5",
)
_HTTP_TIMEOUT_S = 2.0
_POLL_S = 0.1


class ChaosCluster:
    """``num_pairs`` prefill and as many decode workers, supervised, over one transport. Use it as a context manager.

    ``folder`` takes the logs and the switches of the gray failures.
    """

    def __init__(self, transport: str, num_pairs: int, folder: Path, settings: Sequence[str] = ()) -> None:
        name, environment = CELLS[transport]
        self.num_pairs = num_pairs
        self.prefills = tuple(f"prefill-{number}" for number in range(num_pairs))
        self.decodes = tuple(f"decode-{number}" for number in range(num_pairs))
        self._folder = folder
        self._stack = contextlib.ExitStack()
        import_path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        self._wires = Wires(self._stack, self.prefills, self.workers)
        config = load_config(
            assignments=[
                *_SETTINGS,
                f"connector.transports=[{name}]",
                f"connector.extra.gray={folder}",
                f"local.num_prefill={num_pairs}",
                f"local.num_decode={num_pairs}",
                f"router.worker_address={self._wires.router_address}",
                *settings,
            ]
        )
        options = ProcessOptions(environment={"PYTHONPATH": import_path, **environment}, workers=self._wires.worker_settings())
        self._cluster = LocalCluster(config, supervise=True, log_dir=folder / "logs", options=options)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.push(self._stack)
            self._stack.enter_context(self._cluster)
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    # ---- what there is -----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers' names."""
        return self.prefills + self.decodes

    @property
    def base_url(self) -> str:
        """Where clients ask."""
        return self._cluster.base_url

    @property
    def pids(self) -> dict[str, int]:
        """The live processes by name."""
        return self._cluster.pids

    def log_tail(self, name: str, num_lines: int = 30) -> str:
        """Return the end of a process's log."""
        return "\n".join(self._cluster.log(name).splitlines()[-num_lines:])

    def why_not_whole(self) -> str:
        """Say what is missing until every worker serves; "" if nothing is."""
        for role in ("prefill", "decode"):
            try:
                found = self._samples(ROUTER).get(("kvferry_workers", role), 0.0)
            except (OSError, http.client.HTTPException, KeyError) as error:
                return f"the router does not answer: {error!r}"
            if found != self.num_pairs:
                return f"the router has {found:g} {role} workers"
        addresses = {worker.engine_id: worker.ops_address for worker in self._cluster.workers}
        for name in self.workers:
            try:
                if name not in addresses or _status(f"{addresses[name]}/ready") != http.client.OK:
                    return f"{name} is not ready"
            except (OSError, http.client.HTTPException) as error:
                return f"{name} does not answer: {error!r}"
        return ""

    def wait_whole(self, timeout_s: float) -> str:
        """Wait until the cluster is whole; returns what is missing when the time is over, "" if nothing is."""
        deadline = time.monotonic() + timeout_s
        while (missing := self.why_not_whole()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return missing

    def held(self) -> dict[str, float]:
        """Return every gauge of a worker that counts something held and is not 0."""
        found = {}
        for name in self.workers:
            try:
                samples = self._samples(name)
            except (OSError, http.client.HTTPException, KeyError) as error:
                found[f"{name}: no answer ({error!r})"] = 1.0
                continue
            found |= {f"{name}:{gauge}": samples[gauge,] for gauge in HELD if samples.get((gauge,))}
        return found

    def _samples(self, name: str) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self._cluster.metrics(name))
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}

    # ---- faults ------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a process at once."""
        self._cluster.kill(name, signal.SIGKILL)

    def freeze(self, name: str) -> int:
        """Stop a process; returns its pid, for ``thaw``."""
        pid = self.pids[name]
        self._cluster.kill(name, signal.SIGSTOP)
        return pid

    def thaw(self, name: str, pid: int) -> None:
        """Let a stopped process continue, if it is still the same one."""
        with contextlib.suppress(KeyError):
            if self.pids.get(name) == pid:
                self._cluster.kill(name, signal.SIGCONT)

    def drain(self, name: str) -> None:
        """Ask a worker to finish its requests and leave."""
        address = self._cluster.worker(name).ops_address
        _status(f"{address}/drain", "POST")

    def switch(self, name: str, kind: str, *, on: bool) -> None:
        """Turn a gray failure of a worker on or off: ``hang`` or ``blackhole``."""
        path = self._folder / f"{name}.{kind}"
        path.touch() if on else path.unlink(missing_ok=True)

    def cut(self, name: str) -> None:
        """Let nothing pass between a worker and the router."""
        self._wires.to_router[name].silence()

    def reset(self, name: str) -> None:
        """Break a worker's connections to the router."""
        self._wires.to_router[name].reset()

    def cut_data(self, name: str) -> None:
        """Let nothing pass from a prefill worker's data port, which transport tcp reads from."""
        self._wires.data[name].silence()

    def cut_control(self, name: str) -> None:
        """Let nothing pass from a prefill worker's control port."""
        self._wires.control[name].silence()

    def heal_wires(self, name: str) -> None:
        """Let everything pass again from and to a worker."""
        self._wires.heal([name])

    def heal(self) -> None:
        """End every fault that has to be ended."""
        self._wires.heal(self.workers)
        for path in (*self._folder.glob("*.hang"), *self._folder.glob("*.blackhole")):
            path.unlink(missing_ok=True)
        for pid in self.pids.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_STOPPED:
                    process.resume()


class Wires:
    """Proxies from each worker to the router, and in front of each prefill worker's control and data port."""

    def __init__(self, stack: contextlib.ExitStack, prefills: Sequence[str], workers: Sequence[str]) -> None:
        free = free_ports(1 + 2 * len(prefills))
        router = ("127.0.0.1", free[0])
        control = {name: ("127.0.0.1", port) for name, port in zip(prefills, free[1::2], strict=True)}
        data = {name: ("127.0.0.1", port) for name, port in zip(prefills, free[2::2], strict=True)}
        self.router_address = f"tcp://127.0.0.1:{router[1]}"
        self.to_router = {name: stack.enter_context(TcpProxy(router)) for name in workers}
        self.control = {name: stack.enter_context(TcpProxy(at, ("127.0.0.2", at[1]))) for name, at in control.items()}
        self.data = {name: stack.enter_context(TcpProxy(at, ("127.0.0.2", at[1]))) for name, at in data.items()}

    def worker_settings(self) -> dict[str, dict[str, object]]:
        """Return what makes the workers talk through the proxies."""
        settings: dict[str, dict[str, object]] = {
            name: {"router_addresses": (f"tcp://127.0.0.1:{proxy.address[1]}",)} for name, proxy in self.to_router.items()
        }
        for name, control in self.control.items():
            settings[name] |= {
                "control_address": f"tcp://127.0.0.1:{control.address[1]}",
                "data_port": self.data[name].address[1],
                "advertise_host": control.address[0],
            }
        return settings

    def heal(self, names: Sequence[str]) -> None:
        """Let everything pass again from and to these workers."""
        for name in names:
            for proxy in (self.to_router[name], self.control.get(name), self.data.get(name)):
                if proxy is not None:
                    proxy.heal()


def _status(url: str, method: str = "GET") -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_HTTP_TIMEOUT_S)
    try:
        connection.request(method, parts.path)
        return connection.getresponse().status
    finally:
        connection.close()
