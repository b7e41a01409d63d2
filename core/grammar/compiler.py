"""Compiles grammars on a thread while the engine runs, and caches them.

Owns the thread that compiles, the grammars that are kept, and their bound in bytes. A grammar is compiled on trial in a
process that can be killed (``core.grammar.checker``), and only then on the thread, where nothing could stop it. The engine's
thread asks and collects; it never waits.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from core.errors import KVFerryError, Overloaded
from core.grammar.checker import GrammarChecker
from core.grammar.child import Setup
from core.grammar.compiled import CompiledGrammar, Vocabulary
from core.wire.sampling import FORM_FIELD, StructuredOutput

CACHE_BYTES = 256 << 20  # of the grammars that are kept, estimated; requests hold theirs beyond that
MAX_PENDING = 32  # grammars that wait for the thread, without those for one request

THREAD_NAME = "kvferry-grammar"

_Job = tuple[StructuredOutput, str]  # and the only request that it is for, if any


@dataclass(frozen=True, slots=True)
class Compiled:
    """The end of one compilation: a grammar, or why there is none. ``owner`` names the only request that it is for, if any."""

    output: StructuredOutput
    result: CompiledGrammar | KVFerryError
    owner: str = ""


class GrammarCompiler:
    """Grammars of one worker. ``setup`` makes the vocabulary when the first one is needed, on the thread.

    ``get``, ``request``, ``renew``, ``abandon`` and ``take_compiled`` are for the engine's thread.
    """

    def __init__(self, setup: Callable[[], Setup], cache_bytes: int = CACHE_BYTES) -> None:
        self._setup: Callable[[], Setup] | None = setup  # until it has been used
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._pending: set[_Job] = set()
        self._shared_jobs: deque[_Job] = deque()
        self._owned_jobs: deque[_Job] = deque()
        self._num_queued = threading.Semaphore(0)  # jobs in both
        self._compiled: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._wakeup: Callable[[], None] = lambda: None
        self._vocabulary: Vocabulary | None = None
        self._checker: GrammarChecker | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set what is called, from the thread, after each compilation."""
        self._wakeup = wakeup

    @property
    def num_bytes(self) -> int:
        """What is kept, estimated."""
        return sum(grammar.num_bytes for grammar in self._kept.values())

    def get(self, output: StructuredOutput) -> CompiledGrammar | None:
        """Return a grammar that is compiled already."""
        found = self._kept.get(output)
        if found is None:
            return None
        if found.is_broken:  # its shared states are full: the next request begins with none
            del self._kept[output]
            return None
        self._kept.move_to_end(output)
        return found

    def request(self, output: StructuredOutput) -> None:
        """Have a grammar compiled; ``take_compiled`` returns it, once however often it was requested meanwhile.

        Raises:
            Overloaded: too many wait; names the field of the form, since the worker has room for other requests.
        """
        num_shared = sum(not owner for _, owner in self._pending)
        if (output, "") not in self._pending and num_shared >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} grammars wait to be compiled", param=FORM_FIELD)
        self.renew(output)

    def renew(self, output: StructuredOutput, owner: str = "") -> None:
        """Have a grammar compiled for requests that have begun, however many wait; with ``owner``, for this request alone."""
        job = (output, owner)
        if job in self._pending:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()
        self._pending.add(job)
        (self._owned_jobs if owner else self._shared_jobs).append(job)
        self._num_queued.release()

    def abandon(self, owners: Collection[str]) -> None:
        """Compile nothing more for these requests alone: they have ended."""
        abandoned = [job for job in self._pending if job[1] and job[1] in owners]
        self._pending.difference_update(abandoned)

    def take_compiled(self) -> list[Compiled]:
        """Return what has been compiled since the last call, and keep what is for any request."""
        found: list[Compiled] = []
        while not self._compiled.empty():
            done = self._compiled.get_nowait()
            self._pending.discard((done.output, done.owner))
            found.append(done)
            if isinstance(done.result, CompiledGrammar) and not done.owner:
                self._kept[done.output] = done.result
        if found:
            self._evict()
        return found

    def has_compiled(self) -> bool:
        """True if ``take_compiled`` would return something."""
        return not self._compiled.empty()

    def close(self) -> None:
        """End the process and, after its present grammar, the thread. Idempotent."""
        self._is_closed = True
        self._num_queued.release()
        checker = self._checker
        if checker is not None:
            checker.close()

    def _evict(self) -> None:
        total = self.num_bytes
        while total > self._cache_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            total -= oldest.num_bytes

    def _run(self) -> None:
        is_owned_next = False
        while (job := self._next_job(is_owned_next)) is not None:
            output, owner = job
            is_owned_next = not owner
            if job not in self._pending:
                continue  # its request has ended
            try:
                result: CompiledGrammar | KVFerryError = self._compile(output)
            except KVFerryError as error:
                result = error
            except Exception as error:  # the boundary of a request: it must get an answer
                result = KVFerryError(f"the grammar could not be compiled: {error!r}")
            self._compiled.put(Compiled(output, result, owner))
            self._wakeup()

    def _next_job(self, is_owned_next: bool) -> _Job | None:
        """Wait for a job, for one request or for any; None at the end. They take turns, so that neither holds up the other."""
        self._num_queued.acquire()
        if self._is_closed:
            return None
        first, second = self._shared_jobs, self._owned_jobs
        if is_owned_next:
            first, second = second, first
        return (first or second).popleft()

    def _compile(self, output: StructuredOutput) -> CompiledGrammar:
        if self._checker is None or self._vocabulary is None:
            assert self._setup is not None, "it made both"
            setup = self._setup()
            self._vocabulary = Vocabulary(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
            self._checker = GrammarChecker(lambda: setup)
            self._setup = None  # with the tokenizer's file
        try:
            self._checker.check(output)
        except Overloaded as error:
            error.param = FORM_FIELD
            raise
        return CompiledGrammar(output, self._vocabulary)
