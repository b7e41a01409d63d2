"""SIGTERM, SIGINT and SIGHUP, and the end of a process: exit code 0 at any moment, from the first import to the last line.

Owns the beginning and the end of a process, where no event loop handles signals: at the beginning the process has nothing to
clean up, so the first signal ends it at once; at the end a thread may still be inside torch, and the interpreter's teardown
would abort the process ("terminate called without an active exception"). Nothing is lost by ``os._exit``: pools are anonymous
memory files, locks are the kernel's, and the next start removes half-written model folders. Imports nothing heavy, because it
runs before everything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # it takes longer to import than this module may
    import asyncio

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def own_signals() -> tuple[signal.Signals, ...]:
    """Return the signals to handle: all but a SIGHUP that whoever started this process has had it ignore, as nohup does."""
    is_kept_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or not is_kept_ignored)


def exit_on_signals() -> None:
    """End this process at the first signal, with exit code 0, until ``handled_signals`` takes over, and again after it."""
    for number in own_signals():
        signal.signal(number, _exit_in_handler)


@contextlib.contextmanager
def handled_signals(loop: asyncio.AbstractEventLoop, handler: Callable[[], None]) -> Iterator[None]:
    """Have the event loop call ``handler`` for each signal; afterwards the signals have their previous effect.

    A SIGHUP after another signal is left out: a terminal that closes often sends two, its shell's and the kernel's.
    ``loop.remove_signal_handler`` restores the kernel's default first; a signal in that moment would end the process
    with another exit code than 0. Here one handler replaces the other.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers, has_come = own_signals(), False

    def on_readable() -> None:
        nonlocal has_come
        for number in os.read(readable, 64):
            if number in numbers and not (has_come and number == signal.SIGHUP):
                has_come = True
                handler()

    loop.add_reader(readable, on_readable)
    wakeup_fd_before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)  # written in any thread that gets the signal
    before = {number: signal.signal(number, _leave_to_loop) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(wakeup_fd_before)
        loop.remove_reader(readable)
        os.close(readable)
        os.close(writable)


def _leave_to_loop(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the signal's number to the wakeup descriptor."""


def exit_process(code: int) -> NoReturn:
    """End the process without the interpreter's teardown, after flushing its output."""
    import logging  # not before the first signal is handled

    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(code)


def _exit_in_handler(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)  # no flush: the signal may have interrupted one
