"""A real Redis or Valkey server as a child process, for tests: start, kill, freeze, restart.

Owns the process, its port and its command line. Nothing is kept on disk: what a killed server knew is gone.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from types import TracebackType
from typing import Self

from core.errors import StartFailed
from kvferry.cluster_plan import free_ports

START_TIMEOUT_S = 30.0
_POLL_S = 0.02


def redis_executable() -> str | None:
    """Return the server's command on this machine, None if there is none."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A server on a free port of this machine, the same one after a restart; ``password`` counts from the next start on.

    A context manager: what starts it ends it. Raises: StartFailed if it does not answer in time.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self.password = ""
        (self.port,) = free_ports(1)
        self.start()

    @property
    def url(self) -> str:
        """Where clients connect; it holds no password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the process and wait until it answers."""
        settings = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        settings += ["--requirepass", self.password] if self.password else []
        self.process = subprocess.Popen([self._program, *settings], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() >= deadline:
                self.kill()
                raise StartFailed(f"{self._program} does not answer on port {self.port}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End the process at once, frozen or not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End it."""
        self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
