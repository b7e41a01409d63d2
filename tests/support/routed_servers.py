"""Our router and an agent beside each vLLM server, as processes: what `kvferry router` and `kvferry agent` start."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from core.errors import StartFailed
from kvferry.cluster_plan import free_ports
from tests.support.vllm_server import MODEL

_ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class HasUrl(Protocol):
    """A server, or a relay to one."""

    @property
    def base_url(self) -> str:
        """Of the API."""


class RoutedServers:
    """A router, and agents by name. ``roles`` maps a name to its server and role. A context manager: what starts it ends it.

    The servers are not its own.
    """

    def __init__(self, folder: Path, model: Path, roles: Mapping[str, tuple[HasUrl, str]], *settings: str) -> None:
        self._folder = folder
        self._roles = roles
        self._options = ["--model", str(model), "--served-model-name", MODEL]
        for setting in settings:
            self._options += ["--set", setting]
        port, worker_port, *ops_ports = free_ports(2 + len(roles))
        self.base_url = f"http://127.0.0.1:{port}"
        self._worker_address = f"tcp://127.0.0.1:{worker_port}"
        self._port = port
        self._ops_ports = dict(zip(roles, ops_ports, strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> list[int]:
        """Of the router and the agents that run."""
        return [process.pid for process in self._processes.values()]

    def start(self) -> Self:
        """Start all; return when the router has a route."""
        self.start_missing()
        for name in self._roles:
            self.wait_for_agent(name)
        self.wait_for(f"{self.base_url}/ready")
        return self

    def start_missing(self) -> None:
        """Start the router and agents that do not run."""
        for name in ("router", *self._roles):
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                self.start_router() if name == "router" else self.start_agent(name)

    def start_router(self) -> None:
        """Start the router, at the addresses that it had before."""
        self._spawn("router", "--port", str(self._port), "--worker-address", self._worker_address)

    def ops_url(self, name: str) -> str:
        """Return the address of the operations port of an agent, or of the router."""
        return self.base_url if name == "router" else f"http://127.0.0.1:{self._ops_ports[name]}"

    def pid(self, name: str) -> int:
        """Of a process that runs."""
        return self._processes[name].pid

    def start_agent(self, name: str) -> None:
        """Start an agent."""
        server, role = self._roles[name]
        self._spawn(
            name,
            *("--role", role, "--engine", server.base_url, "--engine-id", name),
            *("--router", self._worker_address, "--ops-port", str(self._ops_ports[name])),
        )

    def wait_for_agent(self, name: str) -> None:
        """Return once an agent is registered."""
        self.wait_for(f"http://127.0.0.1:{self._ops_ports[name]}/ready")

    def drain_agent(self, name: str) -> int:
        """Have an agent leave in good order; return its exit code."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._ops_ports[name]}/drain", method="POST")
        with urllib.request.urlopen(request, timeout=10):
            return self.wait_for_end(name)

    def kill(self, name: str) -> None:
        """End a process at once."""
        self._processes[name].kill()
        self._processes.pop(name).wait()

    def wait_for_end(self, name: str) -> int:
        """Return the exit code of a process that ends by itself."""
        return self._processes.pop(name).wait(START_TIMEOUT_S)

    def wait_for(self, url: str) -> None:
        """Return once an address answers well.

        Raises:
            StartFailed: it did not in time.
        """
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError as error:
                if time.monotonic() > end:
                    raise StartFailed(f"{url}: {error}\n{self.logs()}") from None
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log")))

    def _spawn(self, name: str, *options: str) -> None:
        command = name if name == "router" else "agent"
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvferry", command, *self._options, *options],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
