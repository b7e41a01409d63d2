"""The child's side of ``kvferry.processes``: die with the parent, and report the bound addresses or the failure.

Owns what must work however the parent ends: no orphan is left, and no port is guessed. The commands of ``kvferry.cli`` run it
first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Mapping

from core.errors import ConfigError

FAILURE = "failure"  # the key of a line with the reason of the end; all other lines are addresses
_MAX_REASON_CHARACTERS = 2000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's starting thread ends, also by SIGKILL, also while stopped.

    Raises:
        ConfigError: the kernel refuses, or the parent is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ConfigError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise ConfigError(f"the parent process {parent_pid} is gone")


class SupervisorPipe:
    """The pipe to the supervisor, one JSON object a line; without a supervisor, nothing is written."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)  # the supervisor waits for its end

    def announce(self, addresses: Mapping[str, str]) -> None:
        """Send the bound addresses."""
        self._write(dict(addresses))

    def fail(self, reason: str) -> None:
        """Send the reason why this process ends, as one line."""
        self._write({FAILURE: " ".join(reason.split())[:_MAX_REASON_CHARACTERS]})

    def _write(self, line: dict[str, str]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
