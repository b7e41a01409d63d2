"""A child of ``kvferry.processes`` that runs a program of others, such as ``vllm serve``: ``python -m kvferry.foreign``.

Owns what such a program cannot do itself: it announces the program's address, passes SIGTERM on, and leaves none of the
program's processes and sockets when it ends, however it ends. The processes all belong to its process group; a guard outside
the group, which waits for the end of a pipe, kills the group and removes the folder of the sockets. Standard input holds the
``ForeignProgram``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from types import FrameType

import msgspec

from core.errors import ConfigError
from kvferry.child import SupervisorPipe, die_with_parent

_EXIT_FAILED = 1
_EXIT_BY_SIGNAL = 128  # and the signal's number, as a shell has it
_MAX_FOLDER_BYTES = 64  # the path of a socket has at most 107 bytes, and its name may be a UUID


class ForeignProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The command, and the address ``http://host:port`` at which it will serve.

    ``folder_variable`` is the variable that names its folder for sockets. It gets one that is removed when it ends, unless the
    variable is set already.
    """

    command: tuple[str, ...]
    http_address: str
    folder_variable: str = ""


def run(program: ForeignProgram, ready_fd: int, parent_pid: int) -> int:
    """Run the program until it ends; return its exit code. This process must lead a process group of its own."""
    pipe = SupervisorPipe(ready_fd)
    try:
        die_with_parent(parent_pid)
        folder = _make_folder(program.folder_variable)
        _start_guard(ready_fd, folder)
        own = {program.folder_variable: folder} if folder else {}
        process = subprocess.Popen(program.command, stdin=subprocess.DEVNULL, env=os.environ | own)
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


def _make_folder(variable: str) -> str:
    """Return a new folder for a program's sockets, empty if it has one, or if paths in this one would be too long."""
    if not variable or os.environ.get(variable):
        return ""
    folder = tempfile.mkdtemp(prefix="kvferry-")
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        os.rmdir(folder)
        return ""
    return folder


def _start_guard(ready_fd: int, folder: str) -> None:
    """Start the process that kills this process group once this process has ended, and then removes ``folder``."""
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
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
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
