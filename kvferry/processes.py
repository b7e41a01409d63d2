"""Child processes with an owner: started, watched, restarted with back-off, and reaped by one thread.

Owns pids, pipes and log files of the children. Knows nothing of roles and readiness (``kvferry.local``). One thread starts all
children and lives as long as they do, because the kernel ties ``die_with_parent`` to the *thread* that started a child. A child
sends its addresses, and the reason of its end, through a pipe; its end is detected by a pidfd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from core.clock import Clock
from core.errors import StartFailed
from core.log import event
from kvferry.child import FAILURE

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STDERR_FD = 2
_MAX_INPUT_BYTES = 64 << 10  # the capacity of a pipe
_PIPE_READ_BYTES = 64 << 10
_SPAWN_RETRY_S = 5.0
_LIVENESS_CHECK_S = 1.0
_HAS_DIED = "the thread that keeps the child processes has died, and they with it; its error is in the log"
_REPLACE_GRACE_S = 2.0  # a stopped process takes no notice of SIGTERM, and one that hangs seldom does


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The start options: ``command``, to which the two options of ``kvferry.child`` are added.

    ``read_input`` returns the child's standard input, made again for every start; at most a pipe's 64 KiB.
    ``log_file`` None = this process's stderr. ``environment`` is added to this process's.
    """

    name: str
    command: Sequence[str]
    log_file: Path | None
    read_input: Callable[[], str] = str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Child:
    """One child process. ``addresses`` is set once by the child, or fails if it ends before.

    ``failure`` is why it ends, from its own report or from the supervisor that replaces it; "" if unknown.
    """

    spec: ChildSpec
    process: subprocess.Popen[bytes]
    pidfd: int
    pipe_fd: int
    started_at: float
    is_exit_expected: bool = False  # set and read on the keeper's thread, as are the next two
    failure: str = ""
    unread: bytes = b""  # the beginning of a line
    addresses: Future[Mapping[str, str]] = field(default_factory=Future)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        """The process id; reused by the system once the child is reaped."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """False once the child has ended and is reaped."""
        return not self.ended.is_set()

    def note_end(self) -> None:
        """Wake all who wait for this child, which is reaped."""
        if not self.addresses.done():
            self.addresses.set_exception(ChildProcessError(self.describe_end()))
        self.ended.set()

    def describe_end(self) -> str:
        """Return how and why it has ended, in one line without its name."""
        code = self.process.returncode
        how = "is running" if code is None else f"ended with {describe_exit(code)}"
        return f"{how}: {self.failure}" if self.failure else how


class RestartBackoff:
    """The delay before the next restart: it doubles while children die young, and is reset after one that lived long."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next_delay_s(self, lived_s: float) -> float:
        """Return the delay after a child that lived for ``lived_s``."""
        if lived_s > self._max_s:
            self._next_s = self._first_s
        delay = self._next_s
        self._next_s = min(self._max_s, delay * 2)
        return delay


class ProcessKeeper:
    """The thread that owns the children; its public methods may be called from any other thread.

    ``on_exit`` is called on the keeper's thread with every child that ended without ``stop``; it returns the seconds after
    which a child of the same spec shall be started, None = never. ``has_failed`` is set if an error has ended the thread: all
    children have ended with it, and none can be started any more.
    """

    def __init__(self, clock: Clock, on_exit: Callable[[Child, float], float | None]) -> None:
        self._clock = clock
        self._on_exit = on_exit
        self._children: dict[str, Child] = {}
        self._restarts: dict[str, tuple[float, ChildSpec]] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = False
        self.has_failed = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="process-keeper", daemon=True)
        self._thread.start()

    # ---- for other threads -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Do nothing while the thread is well.

        Raises:
            StartFailed: an error has ended it, and all children with it.
        """
        if self.has_failed.is_set():
            raise StartFailed(_HAS_DIED)

    def start(self, spec: ChildSpec) -> Child:
        """Start a child under its name, which must be free."""
        return self._call(lambda: self._spawn(spec))

    def current(self, name: str) -> Child | None:
        """Return the live child of this name."""
        return None if self.has_failed.is_set() else self._call(lambda: self._children.get(name))

    def send_signal(self, child: Child, number: int) -> bool:
        """Send a signal; returns False if the child has ended."""
        return child.is_alive and self._call(lambda: self._signal(child, number))

    def replace(self, child: Child, reason: str) -> None:
        """End a hung child, and kill it if it does not leave at once; its end counts like a crash."""
        if not child.is_alive or not self._call(lambda: self._give_up(child, reason)):
            return
        if not child.ended.wait(_REPLACE_GRACE_S):
            self.send_signal(child, signal.SIGKILL)
            child.ended.wait()

    def end(self, names: Sequence[str], grace_s: float) -> None:
        """Ask these children to leave, kill the process groups of those that have not after ``grace_s``, and reap them all.

        No successor is started.
        """
        children = [] if self.has_failed.is_set() else self._call(lambda: self._ask_to_leave(names))
        deadline = self._clock.now() + grace_s
        for child in children:
            if not child.ended.wait(max(0.0, deadline - self._clock.now())):
                logger.warning(event("killed", child=child.spec.name, pid=child.pid, grace_s=grace_s))
                self.send_signal(child, signal.SIGKILL)
                child.ended.wait()

    def close(self) -> None:
        """Kill and reap the remaining children, and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        for child in self._call(self._close_down):
            child.ended.wait()
        self._call(lambda: setattr(self, "_is_closing", True))
        self._thread.join()

    # ---- on the keeper's thread --------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._commands.put(run)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
            os.write(self._wake_write, b"x")
        while not result.done() and self._thread.is_alive():
            futures.wait([result], timeout=_LIVENESS_CHECK_S)
        if not result.done():
            raise StartFailed(_HAS_DIED)
        return result.result()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wait()
                self._run_commands()
                self._start_due()
        except Exception:  # the kernel kills the children of a thread that ends; here they are reaped as well
            try:
                logger.exception(event("keeper_failed"))
            finally:
                self._kill_all()
            return
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _kill_all(self) -> None:
        try:
            for child in self._close_down():
                child.process.wait()
                child.note_end()
        finally:
            self.has_failed.set()

    def _wait(self) -> None:
        """Sleep until a child writes or ends, a command arrives, or a restart is due."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        handlers: dict[int, Callable[[], None]] = {self._wake_read: self._drain_wakeups}
        for child in self._children.values():
            if child.pipe_fd >= 0:  # before the pidfd: a child's messages are read before it is reaped
                handlers[child.pipe_fd] = lambda child=child: self._read_pipe(child)  # type: ignore[misc]
                poll.register(child.pipe_fd, select.POLLIN)
            handlers[child.pidfd] = lambda child=child: self._reap(child)  # type: ignore[misc]
            poll.register(child.pidfd, select.POLLIN)
        due = min((at for at, _ in self._restarts.values()), default=None)
        timeout_ms = None if due is None else max(0.0, (due - self._clock.now()) * 1e3)
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        for fd in [fd for fd in handlers if fd in ready]:
            handlers[fd]()

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _start_due(self) -> None:
        now = self._clock.now()
        for name, (at, spec) in list(self._restarts.items()):
            if at > now or name in self._children:
                continue
            del self._restarts[name]
            try:
                self._spawn(spec)
            except Exception as error:  # no memory or descriptors now; a later try may succeed
                logger.error(event("restart_failed", child=name, error=repr(error)))
                self._restarts[name] = (now + _SPAWN_RETRY_S, spec)

    def _spawn(self, spec: ChildSpec) -> Child:
        assert spec.name not in self._children, f"{spec.name} is running"
        self._restarts.pop(spec.name, None)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        command = [*spec.command, "--ready-fd", str(write_fd), "--parent-pid", str(os.getpid())]
        try:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(spec.log_file.open("ab")) if spec.log_file is not None else None
                process = subprocess.Popen(
                    command,
                    stdin=stack.enter_context(_pipe_of(spec.read_input())),
                    stdout=log if log is not None else _STDERR_FD,  # the output of libraries is not output of this command
                    stderr=log,
                    env=os.environ | spec.environment,
                    pass_fds=(write_fd,),
                    start_new_session=True,  # a Ctrl-C of the terminal reaches the supervisor only
                )
            pidfd = _pidfd_of(process)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        child = Child(spec, process, pidfd, read_fd, self._clock.now())
        self._children[spec.name] = child
        logger.info(event("started", child=spec.name, pid=child.pid))
        return child

    def _read_pipe(self, child: Child) -> None:
        """Read a child's messages; the end of the pipe means that the child closed it or ended."""
        try:
            chunk = os.read(child.pipe_fd, _PIPE_READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            os.close(child.pipe_fd)
            child.pipe_fd = -1
        *lines, child.unread = (child.unread + chunk).split(b"\n")
        for line in lines:
            try:
                told = msgspec.json.decode(line, type=dict[str, str])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:  # what a library writes there is not worth the child
                logger.warning(event("bad_message", child=child.spec.name, error=str(error)))
                continue
            if FAILURE in told:
                child.failure = told[FAILURE]
            elif not child.addresses.done():
                child.addresses.set_result(told)

    def _reap(self, child: Child) -> None:
        if child.pipe_fd >= 0:
            self._read_pipe(child)
        code = child.process.wait()
        if child.pipe_fd >= 0:
            os.close(child.pipe_fd)
            child.pipe_fd = -1
        os.close(child.pidfd)
        del self._children[child.spec.name]
        child.note_end()
        if child.is_exit_expected:
            return
        lived_s = self._clock.now() - child.started_at
        delay_s = self._on_exit(child, lived_s)
        logger.warning(
            event(
                "died",
                child=child.spec.name,
                pid=child.pid,
                exit=describe_exit(code),
                reason=child.failure,
                restart_in_s=delay_s,
            )
        )
        if delay_s is not None:
            self._restarts[child.spec.name] = (self._clock.now() + delay_s, child.spec)

    def _signal(self, child: Child, number: int) -> bool:
        """Signal through the pidfd, which cannot hit another process; SIGKILL goes to the whole process group."""
        if not child.is_alive:
            return False
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(child.pidfd, number)
        return True

    def _give_up(self, child: Child, reason: str) -> bool:
        if child.is_exit_expected:
            return False
        child.failure = child.failure or reason
        return self._signal(child, signal.SIGTERM)

    def _ask_to_leave(self, names: Sequence[str]) -> list[Child]:
        for name in names:
            self._restarts.pop(name, None)
        children = [self._children[name] for name in names if name in self._children]
        for child in children:
            child.is_exit_expected = True
            self._signal(child, signal.SIGTERM)
        return children

    def _close_down(self) -> list[Child]:
        self._restarts.clear()
        children = list(self._children.values())
        for child in children:
            child.is_exit_expected = True
            self._signal(child, signal.SIGKILL)
        return children


@contextlib.contextmanager
def _pipe_of(text: str) -> Iterator[int]:
    """Yield the read end of a pipe that contains all of ``text`` already."""
    if len(text.encode()) > _MAX_INPUT_BYTES:
        raise StartFailed(f"the settings of a child process take more than {_MAX_INPUT_BYTES} bytes")
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        with os.fdopen(write_fd, "w") as pipe:
            pipe.write(text)
        yield read_fd
    finally:
        os.close(read_fd)


def _pidfd_of(process: subprocess.Popen[bytes]) -> int:
    """Return a pidfd of a child; without one nobody could watch the child, so it is killed and reaped with its group."""
    try:
        return os.pidfd_open(process.pid)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"signal {names.get(-code, -code)}"  # most real-time signals have no name
