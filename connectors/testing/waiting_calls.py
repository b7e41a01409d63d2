"""Calls that wait, found without a clock: what Python calls on a thread that must not wait.

An event loop that waits for a disk or a server sends no heartbeats meanwhile, and its worker is given up. The wait itself is
short wherever a test runs, so the call is looked for and not its time: sleeps, files, sockets that block, ends of threads. What
an extension module waits for inside shows to nobody here, nor does a lock that another thread holds.
"""

from __future__ import annotations

import _socket
import io
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import getmembers, iscoroutinefunction, isfunction
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_FILE_CALLS = (
    "open unlink remove rename replace link symlink utime stat lstat mkdir rmdir listdir scandir truncate fsync chmod statvfs"
)
_WAITING = {time.sleep, io.open, _socket.getaddrinfo, *(getattr(os, name) for name in _FILE_CALLS.split() if hasattr(os, name))}
_SOCKET_CALLS = frozenset(
    {"accept", "connect", "recv", "recv_into", "recvfrom", "recvmsg", "send", "sendall", "sendmsg", "sendto"}
)
_WAITING_CODE = {threading.Condition.wait.__code__: "Condition.wait", threading.Thread.join.__code__: "Thread.join"}
_EXCUSED_CODE = threading.Thread.start.__code__  # it waits until the thread has begun
_LIBRARY = sysconfig.get_path("stdlib")
_EXCUSED_FILES = ("importlib", "linecache.py", "traceback.py")  # an import, or the text of an error


class WaitingCalls:
    """What has waited so far, in ``found``: the call that was watched, what it waited for, and the line that did."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(self, target: object, interface: type) -> None:
        """Watch the methods of ``interface`` at this object from now on, on whatever thread they are called."""
        for name, method in getmembers(interface, isfunction):
            if not name.startswith("_") and not iscoroutinefunction(method):
                own = getattr(target, name)
                setattr(target, name, self._watched(own, f"{type(target).__name__}.{name}"))

    def _watched(self, method: Callable[P, R], name: str) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.watching(name):
                return method(*args, **kwargs)

        return call

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watch this thread; also what else its event loop does meanwhile, if the code within awaits something."""
        before = sys.getprofile()
        sys.setprofile(partial(self._look, name))
        try:
            yield
        finally:
            sys.setprofile(before)

    def _look(self, name: str, frame: FrameType, event: str, called: object) -> None:
        """See each call of a function, in C or in Python."""
        if event == "c_call":
            waits_for = _waiting_c_call(called)
        elif event == "call" and frame.f_code in _WAITING_CODE and frame.f_locals["timeout"] != 0:
            waits_for = _WAITING_CODE[frame.f_code]
        else:
            return
        if waits_for and not _is_excused(frame):
            self.found.append(f"{name} calls {waits_for} in {_place(frame)}")


def _waiting_c_call(called: object) -> str:
    """Return the name of a function that may wait; empty for another one."""
    name: str = getattr(called, "__name__", "")
    owner = getattr(called, "__self__", None)
    if isinstance(owner, socket.SocketType):
        return f"socket.{name}" if name in _SOCKET_CALLS and owner.gettimeout() != 0 else ""
    return name if called in _WAITING else ""


def _place(frame: FrameType) -> str:
    """Return the innermost line that is not in Python's library."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_LIBRARY, "<frozen")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_excused(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code is _EXCUSED_CODE or any(part in code.co_filename for part in _EXCUSED_FILES):
            return True
        frame = frame.f_back
    return False
