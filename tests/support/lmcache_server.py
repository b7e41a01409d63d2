"""The real LMCache server as a child process, for tests and benchmarks: start, kill, freeze, restart.

Owns the process, its ports and its command line. The server runs from an environment of its own (``make install-lmcache``),
of which nothing is imported here. Telemetry is off.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from core.config_types import default_cache_dir
from core.errors import StartFailed
from kvferry.cluster_plan import free_ports

VERSION = "0.5.6"
START_TIMEOUT_S = 120.0  # mostly its imports
STOP_TIMEOUT_S = 10.0

_SETTINGS = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1", "OMP_NUM_THREADS": "1"}
_POLL_S = 0.05


def lmcache_executable() -> Path:
    """Return where ``make install-lmcache`` puts the server's command."""
    return Path(default_cache_dir()) / f"lmcache-{VERSION}" / "bin" / "lmcache"


class LMCacheServer:
    """A server on free ports of this machine, the same ones after a restart. ``log_path`` gets what it writes.

    A context manager: what starts it ends it.
    """

    def __init__(self, log_path: Path, chunk_size: int = 64, l1_size_gb: float = 0.25, options: Sequence[str] = ()) -> None:
        self._log_path = log_path
        self._port, self._http_port = free_ports(2)
        self._command = [
            str(lmcache_executable()),
            "server",
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--chunk-size", str(chunk_size), "--l1-size-gb", str(l1_size_gb), "--eviction-policy", "LRU"),
            *("--max-gpu-workers", "2"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def server_address(self) -> str:
        """For ``connector.lmcache.server_address``."""
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def http_address(self) -> str:
        """For ``connector.lmcache.http_address``."""
        return f"http://127.0.0.1:{self._http_port}"

    def start(self) -> Self:
        """Start the server and return once it serves.

        Raises:
            StartFailed: it ended, or did not serve in time.
        """
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=os.environ | _SETTINGS
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End it as an operator would, or by force if that takes too long. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End it at once. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """Suspend it at once, and return when none of its threads runs any more."""
        process = self._process
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while process is not None and not _is_stopped(process.pid):
            if time.monotonic() > deadline:
                raise TimeoutError("the LMCache server does not stop")
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def log(self) -> str:
        """Return what it has written."""
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        """Start it."""
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop it."""
        self.stop()

    def _signal(self, number: int) -> None:
        assert self._process is not None, "the server runs"
        self._process.send_signal(number)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartFailed(f"the LMCache server did not start; the end of its log:\n{self.log()[-2000:]}")
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_address}/healthcheck", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:  # URLError is one
            return False


def _is_stopped(pid: int) -> bool:
    """True if every thread of a process is stopped, by what ``/proc`` says behind each one's name."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
