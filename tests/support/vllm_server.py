"""A real ``vllm serve`` on CPU as a group of child processes, for the tests of the plug-in over HTTP.

It runs from an environment of its own (``make install-vllm``). The server starts an engine core and a worker as children: the
group gets every signal, so that none of them is left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from core.errors import StartFailed
from tests.support import shared_memory
from tests.support.vllm_engine import CPU_ENVIRONMENT, temporary_files, vllm_python

MODEL = "tiny"  # its name in requests
START_TIMEOUT_S = 600.0  # mostly imports; a minute on a machine that does nothing else
TRACKERS_TIMEOUT_S = 5.0  # of what a killed process has left
REQUEST_TIMEOUT_S = 120.0

_POLL_S = 0.1


class VllmServer:
    """A server on a port of loopback, the same one after a restart. A context manager: what starts it ends it.

    ``arguments`` are those of ``vllm serve`` after the model; ``log_path`` gets what its processes write.
    """

    def __init__(
        self, log_path: Path, model: Path, port: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._log_path = log_path
        self._netloc = f"127.0.0.1:{port}"
        self._command = [
            *(str(vllm_python().with_name("vllm")), "serve", str(model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port), *arguments),
        ]
        self._environment = os.environ | CPU_ENVIRONMENT | (environment or {})
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of files that a killed server leaves
        self._process: subprocess.Popen[bytes] | None = None
        self._shared_memory: set[str] = set()  # names in /dev/shm

    @property
    def base_url(self) -> str:
        """Of the API."""
        return f"http://{self._netloc}"

    def start(self) -> Self:
        """Start the processes; ``wait`` returns when they serve, so that several servers can start together."""
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment | temporary_files(self._folder.name),
                start_new_session=True,
            )
        return self

    def wait(self) -> Self:
        """Return once the server is healthy.

        Raises:
            StartFailed: it ended, or did not serve in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_healthy():
            if self._running.poll() is not None or time.monotonic() > deadline:
                raise StartFailed(f"vllm serve did not start; the end of its log:\n{self.log()[-4000:]}")
            time.sleep(_POLL_S)
        self._note_shared_memory()
        return self

    def freeze(self) -> None:
        """Stop all processes where they are."""
        os.killpg(self._running.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        os.killpg(self._running.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End all processes at once, and remove the shared memory and the files that they leave. Idempotent."""
        if self._process is None or self._folder is None:
            return
        self._note_shared_memory()
        process, self._process = self._process, None
        trackers = _kill_all_but_trackers(process.pid)
        psutil.wait_procs(trackers, TRACKERS_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shared_memory.remove(self._shared_memory)
        self._shared_memory = set()
        self._folder.cleanup()

    def _note_shared_memory(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._shared_memory |= shared_memory.mapped_by(self.pids)

    @property
    def pids(self) -> list[int]:
        """Of all its processes."""
        return [self._running.pid, *(child.pid for child in psutil.Process(self._running.pid).children(recursive=True))]

    def process(self, title: str) -> psutil.Process:
        """Return the child process with this in its title: ``EngineCore``, ``Worker``."""
        children = psutil.Process(self._running.pid).children(recursive=True)
        (found,) = [child for child in children if any(title in word for word in child.cmdline())]
        return found

    def log(self) -> str:
        """Return what the processes have written."""
        return self._log_path.read_text(errors="replace")

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and answer of a request that is not streamed."""
        connection = http.client.HTTPConnection(self._netloc, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels; 0 without any."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=REQUEST_TIMEOUT_S) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it has been started"
        return self._process

    def is_healthy(self) -> bool:
        """Return whether it answers, and its engine is alive."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:  # URLError is one
            return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _kill_all_but_trackers(pid: int) -> list[psutil.Process]:
    """Kill a process and its children; return Python's resource trackers, which now remove the semaphores and end."""
    trackers = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("resource_tracker" in word for word in process.cmdline()):
                    trackers.append(process)
                else:
                    process.kill()
    return trackers
