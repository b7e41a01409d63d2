"""Calls that wait, found without a clock: what Python calls on a thread that must not wait.

An event loop that waits for a disk or a server sends no heartbeats meanwhile, and its worker is given up. The wait itself is
short wherever a test runs, so the call is looked for and not its time: sleeps, files, sockets that block, ends of threads and
of processes, messages of processes, and selectors. What an extension module waits for inside shows to nobody here, nor does a
lock that another thread holds, nor calls whose waiting is in their arguments: ``os.waitpid``, ``os.read``, ``select.select``
and ``poll`` of ``select``.
"""

from __future__ import annotations

import _socket
import gc
import io
import os
import selectors
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import getmembers, iscoroutinefunction, isfunction
from multiprocessing.connection import _ConnectionBase
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_FILE_CALLS = (
    "open unlink remove rename replace link symlink utime stat lstat mkdir rmdir listdir scandir truncate fsync chmod statvfs"
)
_WAITING = {time.sleep, io.open, _socket.getaddrinfo, *(getattr(os, name) for name in _FILE_CALLS.split() if hasattr(os, name))}
_SOCKET_CALLS = frozenset(
    {"accept", "connect", "recv", "recv_into", "recvfrom", "recvmsg", "send", "sendall", "sendmsg", "sendto"}
)
_SENDS = frozenset({"send", "sendall", "sendmsg", "sendto"})
_INTERNET = {socket.AF_INET, socket.AF_INET6}
_EXCUSED_CODE = threading.Thread.start.__code__  # it waits until the thread has begun
_LIBRARY = sysconfig.get_path("stdlib")
# the text of an error, and what the worker does with a line of its log
_EXCUSED_FILES = tuple(
    os.path.join(_LIBRARY, name) for name in ("linecache.py", "traceback.py", "inspect.py", "logging" + os.sep)
)
_ASYNCIO = os.path.join(_LIBRARY, "asyncio") + os.sep
_CALLS_OF_ASYNCIO = {"stat", "unlink"}  # it removes the path of a Unix server that it closes


def _has_time(called: Mapping[str, Any]) -> bool:
    return bool(called["timeout"] != 0)


# what waits, by its code, and whether it does with these arguments
_WAITING_CODE: dict[CodeType, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    threading.Condition.wait.__code__: ("Condition.wait", _has_time),
    threading.Thread.join.__code__: ("Thread.join", lambda called: _has_time(called) and called["self"].is_alive()),
    subprocess.Popen.wait.__code__: ("Popen.wait", lambda called: _has_time(called) and called["self"].poll() is None),
    BaseProcess.join.__code__: ("Process.join", lambda called: _has_time(called) and called["self"].is_alive()),
    **{
        getattr(_ConnectionBase, name).__code__: (f"Connection.{name}", lambda called: not called["self"].poll(0))
        for name in ("recv", "recv_bytes", "recv_bytes_into")
    },
    **{
        vars(kind)["select"].__code__: (f"{kind.__name__}.select", _has_time)
        for name, kind in vars(selectors).items()
        if isinstance(kind, type) and isfunction(vars(kind).get("select")) and kind is not selectors.BaseSelector
    },
}


class WaitingCalls:
    """What has waited so far, in ``found``: the call that was watched, what it waited for, and the line that did."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(self, target: object, interface: type) -> None:
        """Watch the methods of ``interface`` at this object from now on, on whatever thread they are called."""
        for name, method in getmembers(interface, isfunction):
            if not name.startswith("_") and not iscoroutinefunction(method):
                own = getattr(target, name)
                watched = self._watched(own, f"{type(target).__name__}.{name}")
                object.__setattr__(target, name, watched)  # also of a frozen dataclass

    def _watched(self, method: Callable[P, R], name: str) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.watching(name):
                return method(*args, **kwargs)

        return call

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watch this thread; also what else its event loop does meanwhile, if the code within awaits something."""
        before, collects = sys.getprofile(), gc.isenabled()
        gc.disable()  # what ends with garbage is that of any test before
        sys.setprofile(partial(self._look, name))
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()

    def _look(self, name: str, frame: FrameType, event: str, called: object) -> None:
        """See each call of a function, in C or in Python."""
        if event == "c_call":
            waits_for = _waiting_c_call(called, frame.f_code)
        else:
            waits_for = _waiting_python_call(frame) if event == "call" else ""
        if waits_for and not _is_excused(frame):
            self.found.append(f"{name} calls {waits_for} in {_place(frame)}")


def _waiting_python_call(frame: FrameType) -> str:
    """Return the name of a function in Python that has been called and may wait; empty for another one."""
    if frame.f_code not in _WAITING_CODE or _is_of_the_loop(frame):
        return ""
    waits_for, waits = _WAITING_CODE[frame.f_code]
    try:
        return waits_for if waits(frame.f_locals) else ""
    except Exception:  # the call itself is about to raise it: what is closed, or another process's
        return ""


def _waiting_c_call(called: object, caller: CodeType) -> str:
    """Return the name of a function that may wait; empty for another one."""
    name: str = getattr(called, "__name__", "")
    owner = getattr(called, "__self__", None)
    if isinstance(owner, socket.SocketType):
        return f"socket.{name}" if name in _SOCKET_CALLS and _socket_waits(owner, name, caller) else ""
    if called not in _WAITING or (name in _CALLS_OF_ASYNCIO and caller.co_filename.startswith(_ASYNCIO)):
        return ""
    return name


def _socket_waits(used: socket.SocketType, name: str, caller: CodeType) -> bool:
    """Nobody sees the arguments of a call in C: a function that names MSG_DONTWAIT uses it."""
    is_datagram = used.type == socket.SOCK_DGRAM and used.family in _INTERNET and name in _SENDS
    return used.gettimeout() != 0 and not is_datagram and "MSG_DONTWAIT" not in caller.co_names


def _is_of_the_loop(frame: FrameType) -> bool:
    """Return whether this is the select of an event loop, which has nothing else to do."""
    return (
        frame.f_code.co_name == "select" and frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(_ASYNCIO)
    )


def _place(frame: FrameType) -> str:
    """Return the innermost line that is not in Python's library."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_LIBRARY, "<frozen")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_excused(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code is _EXCUSED_CODE or "importlib" in code.co_filename or code.co_filename.startswith(_EXCUSED_FILES):
            return True
        frame = frame.f_back
    return False
