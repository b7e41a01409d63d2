"""Finds out whether a grammar can be compiled, in a process that is killed at the deadline.

Owns that process: started at the first check, again after it was killed. Blocks; one thread at a time. Answers are kept, so a
grammar that comes again costs nothing. A process that has ended tells something about the grammar if that has used up the CPU
time or the memory, or has made it crash; a machine that was too slow, or short of memory, is another answer and not kept.
"""

from __future__ import annotations

import errno
import logging
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import msgspec

from core.errors import InvalidRequest, KVFerryError, OutOfResources, Overloaded
from core.grammar.child import WALL_FACTOR, Check, Checked, Setup, read_frame, write_frame
from core.grammar.limits import check_limits
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.sampling import StructuredOutput

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 5.0  # of CPU time, for one grammar; by the clock ``WALL_FACTOR`` times as long
TOO_COMPLEX = "is too complex"  # a grammar whose process was ended
_START_TIMEOUT_S = 30.0  # of CPU time: of the process, its libraries and its vocabulary
_MAX_KEPT_BYTES = 4 << 20  # of the texts of grammars whose answers are kept
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # of descriptors, memory or processes
# Ends of the process that the grammar did not cause: killed by us after the time by the clock, or by the kernel for want of
# memory; its own alarm by the clock; a shutdown.
_CAUSED_BY_THE_MACHINE = frozenset((-signal.SIGKILL, -signal.SIGALRM, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP))


class GrammarChecker:
    """One process that compiles grammars on trial. ``setup`` provides the vocabulary when the process starts."""

    def __init__(self, setup: Callable[[], Setup], timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: OrderedDict[StructuredOutput, str] = OrderedDict()
        self._kept_bytes = 0
        self._is_closed = False
        self._limited_log = LimitedLog(logger, time.monotonic)

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return self._process.pid if self._process is not None else None

    def check(self, output: StructuredOutput) -> None:
        """Compile a grammar on trial.

        Raises:
            InvalidRequest: it is malformed, unsupported, takes more than ``timeout_s`` of CPU time or the memory allowed, or
                makes the process crash.
            Overloaded: the machine was too busy, or short of memory; nothing is known about the grammar.
            OutOfResources: the process does not start for want of descriptors, memory or processes.
            KVFerryError: it does not start for another reason.
        """
        check_limits(output)
        if self.check_kept(output):
            return
        answer = self._ask(output)
        self._keep(output, answer)
        if answer:
            raise InvalidRequest(answer)

    def check_kept(self, output: StructuredOutput) -> bool:
        """Return True if the kept answer is that a grammar can be compiled, False if none is kept. Any thread; does not block.

        Raises:
            InvalidRequest: the kept answer.
        """
        known = self._answers.get(output)
        if known:
            raise InvalidRequest(known)
        return known is not None

    def close(self) -> None:
        """End the process. Idempotent."""
        self._is_closed = True
        self._kill()

    def _ask(self, output: StructuredOutput) -> str:
        started = time.monotonic()
        found = self._try(output)
        is_out_of_time = found == -signal.SIGPROF
        if isinstance(found, int) and not is_out_of_time and time.monotonic() - started < self._timeout_s:
            found = self._try(output)  # it may have died of something else
        if isinstance(found, Checked):
            return found.error
        logger.warning(event("grammar_check_killed", kind=output.kind, bytes=len(output.value), exit_status=found))
        if found in _CAUSED_BY_THE_MACHINE:
            raise Overloaded(f"{output.kind} could not be checked in time: the machine is busy or short of memory")
        if not is_out_of_time and found != -signal.SIGABRT:
            return f"{output.kind} cannot be used: compiling it ends the process that does so"
        limit = f"{self._timeout_s:g} s of CPU time" if is_out_of_time else "the memory allowed"
        return f"{output.kind} {TOO_COMPLEX}: it could not be compiled within {limit}"

    def _try(self, output: StructuredOutput) -> Checked | int:
        """Return the answer of the process; if it had to be killed, or has died, its exit status, negative for a signal."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        answer = None
        try:
            with suppress(OSError):  # it ended before it had read the question
                answer = self._exchange(process, Check(output, self._timeout_s), WALL_FACTOR * self._timeout_s + 1.0)
        finally:
            if answer is None:  # one that came later would be taken for the next question's
                self._kill()
        return answer if answer is not None else process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        self._kill()
        if self._is_closed:
            raise KVFerryError("the process that checks grammars has been stopped")
        command = [sys.executable, "-P", "-m", "core.grammar.child"]
        try:
            process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            self._limited_log.warning("grammar_check_not_started", error=error)
            raise _not_started(error) from None
        assert process.stdin is not None
        answer = None
        try:
            with suppress(OSError):
                write_frame(process.stdin, self._setup())
                trial = Check(StructuredOutput(kind="json_object"), _START_TIMEOUT_S)
                answer = self._exchange(process, trial, WALL_FACTOR * _START_TIMEOUT_S)
        finally:
            if answer is None:
                self._kill()
        if answer is None:
            raise KVFerryError("the process that checks grammars does not start")
        return process

    def _exchange(self, process: subprocess.Popen[bytes], question: Check, timeout_s: float) -> Checked | None:
        """Return the answer; None if the process ended or did not answer in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        write_frame(process.stdin, question)
        poller = select.poll()  # takes any descriptor; ``select.select`` none from 1,024 on
        poller.register(process.stdout, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if poller.poll(1000 * left):  # an answer is written at once
                frame = read_frame(process.stdout)
                return msgspec.msgpack.decode(frame, type=Checked) if frame is not None else None
        return None

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what is in its buffer cannot be written any more
                    pipe.close()

    def _keep(self, output: StructuredOutput, answer: str) -> None:
        self._answers[output] = answer
        self._kept_bytes += len(output.value) + len(answer)
        while self._kept_bytes > _MAX_KEPT_BYTES:
            old, answer = self._answers.popitem(last=False)
            self._kept_bytes -= len(old.value) + len(answer)


def _not_started(error: OSError) -> KVFerryError:
    message = f"the process that checks grammars does not start: {error.strerror}"
    if error.errno in _LACKS:
        return OutOfResources(f"{message}: try again later")
    return KVFerryError(message)
