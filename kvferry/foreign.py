"""A child of ``kvferry.processes`` that runs a program of others, such as ``vllm serve``: ``python -m kvferry.foreign``.

Owns what such a program cannot do itself: it announces the program's address, passes SIGTERM on, and leaves none of the
program's processes when it ends, however it ends. They all belong to its process group; a guard outside the group, which waits
for the end of a pipe, kills the group. Standard input holds the ``ForeignProgram``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

import msgspec

from core.errors import ConfigError
from kvferry.child import SupervisorPipe, die_with_parent

_EXIT_FAILED = 1
_EXIT_BY_SIGNAL = 128  # and the signal's number, as a shell has it


class ForeignProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The command, and the address ``http://host:port`` at which it will serve."""

    command: tuple[str, ...]
    http_address: str


def run(program: ForeignProgram, ready_fd: int, parent_pid: int) -> int:
    """Run the program until it ends; return its exit code. This process must lead a process group of its own."""
    pipe = SupervisorPipe(ready_fd)
    try:
        die_with_parent(parent_pid)
        _start_guard(ready_fd)
        process = subprocess.Popen(program.command, stdin=subprocess.DEVNULL)
    except (ConfigError, OSError) as error:
        pipe.fail(str(error))
        return _EXIT_FAILED

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    pipe.announce({"http_address": program.http_address})
    code = process.wait()
    return code if code >= 0 else _EXIT_BY_SIGNAL - code


def _start_guard(ready_fd: int) -> None:
    """Start the process that kills this process group once this process has ended."""
    assert os.getpgrp() == os.getpid(), "the group is its own"
    group = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(read_fd)  # the other end stays open until this process ends
        return
    try:
        os.setsid()  # no signal to the group reaches the guard
        os.close(write_fd)
        os.close(ready_fd)
        os.read(read_fd, 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def main() -> None:
    """Run the program of standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    program = msgspec.json.decode(sys.stdin.buffer.read(), type=ForeignProgram)
    sys.exit(run(program, arguments.ready_fd, arguments.parent_pid))


if __name__ == "__main__":
    main()
