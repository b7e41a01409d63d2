"""The transfer thread: the only thread that touches transports while a worker serves.

``TransferThread`` runs an executor: it sleeps until a command or a socket wakes it, and polls with a back-off only while a
transport has reads in flight that no socket announces.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from connectors.p2p.actions import TransferCommand
from connectors.p2p.transfer.executor import TransferExecutor
from core.log import event

_log = logging.getLogger(__name__)

_PR_SET_TIMERSLACK = 29  # linux/prctl.h


class TransferThread:
    """Owns an executor and runs it in a thread. ``on_death`` is called from the thread if it ends by a bug of ours.

    ``prepare`` runs first on the thread, for its thread-local settings.
    """

    def __init__(
        self,
        executor: TransferExecutor,
        on_death: Callable[[BaseException], None],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._executor = executor
        self._prepare = prepare
        self._on_death = on_death
        self._commands: deque[TransferCommand] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        """Start the thread. The transports belong to it from now on."""
        self._thread.start()

    def submit(self, command: TransferCommand) -> None:
        """Queue a command. The reads in flight bound the queue. Any thread."""
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End the thread and close the transports. Blocks until they are closed; call it once."""
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._executor.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        try:
            _sleep_exactly()
            if self._prepare is not None:
                self._prepare()
            while not self._is_stopping:
                self._turn()
        except Exception as error:
            _log.exception(event("transfer_thread_died", error=error))
            self._on_death(error)
        finally:
            self._executor.close()

    def _turn(self) -> None:
        while self._commands:
            self._executor.execute(self._commands.popleft())
        if not self._executor.poll() and not self._commands:
            self._wait(self._executor.max_wait_s())

    def _wait(self, max_wait_s: float | None) -> None:
        """Sleep until a command, a socket or the time. ZeroMQ's poll counts in ms: for less it polls once and sleeps."""
        is_short = max_wait_s is not None and 0 < max_wait_s < 0.001
        timeout_ms = -1 if max_wait_s is None else 0 if is_short else int(1000 * max_wait_s)
        sources = [(self._wake_fd, zmq.POLLIN), *((pollable, zmq.POLLIN) for pollable in self._executor.pollables())]
        ready = zmq.zmq_poll(sources, timeout_ms)
        if is_short and not ready and max_wait_s is not None:
            time.sleep(max_wait_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


def _sleep_exactly() -> None:
    """Have this thread woken up in time, prctl(2). By default sleeps are 50 us longer, much beside a read of some 100 us."""
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
