"""The child's side of being started by ``kvferry.processes``: die with the parent, and tell it the bound addresses.

Owns two things that must work however the parent ends: no orphan is left, and no port is guessed. Called by the commands of
``kvferry.cli`` before anything else happens.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable, Mapping

from core.errors import ConfigError

Announce = Callable[[Mapping[str, str]], None]

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


def announcer(ready_fd: int | None) -> Announce:
    """Return a function that writes the addresses as one JSON line to the parent's pipe and closes it; without one, nothing."""

    def announce(addresses: Mapping[str, str]) -> None:
        if ready_fd is not None:
            with os.fdopen(ready_fd, "w") as pipe:
                pipe.write(json.dumps(dict(addresses)) + "\n")

    return announce
