"""Programs that run in a process of their own, in which descriptors can be made scarce: libzmq would abort ours."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


def leave_descriptors(num_free: int) -> None:
    """Lower the soft limit of this process so that it can open ``num_free`` more descriptors."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_free + 1)]  # the lowest numbers that are free
    for descriptor in opened:
        os.close(descriptor)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1], hard))


def leave_none() -> None:
    """Let this process open nothing, however many descriptors it closes, except for input, output and errors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # ``poll`` takes no more at once, either


def run_program(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child; its exit status is negative if a signal has ended it."""
    command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]  # a wheel's modules come first
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
