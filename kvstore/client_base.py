"""The base of all clients: the ``BlockStore`` interface on top of a ``ClientState`` and a lock.

It owns the lock, the verification of returned blocks, and the copies into the caller's memory. Subclasses carry out the actions
of the state.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from core.clock import Clock
from core.errors import CorruptBlock, StaleBlock
from kvstore.base import BlockStore, GetTicket, LookupTicket, PutTicket, StoredBlock, StoreStatistics, Ticket
from kvstore.client_state import ClientState, ConnectionState
from kvstore.key import StoreKey
from kvstore.seal_check import BlockVerifier


class StoreClientBase(BlockStore):
    """A client on top of a ``ClientState``. ``_lock`` guards it; ``_progress`` is notified when tickets may be done."""

    def __init__(self, machine: ClientState, clock: Clock) -> None:
        self._machine = machine
        self._clock = clock
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._local = threading.local()  # a verifier for each thread

    @property
    def is_connected(self) -> bool:
        """See ``BlockStore``."""
        return self._machine.state is ConnectionState.UP

    @property
    def is_local(self) -> bool:
        """Whether blocks are read and written in the store's own memory."""
        return self._machine.calls.is_local

    def lookup(self, keys: Sequence[StoreKey]) -> LookupTicket:
        """See ``BlockStore``."""
        with self._lock:
            ticket = self._machine.calls.lookup(keys, self._clock.now())
            self._carry_out()
        return ticket

    def get(self, keys: Sequence[StoreKey]) -> GetTicket:
        """See ``BlockStore``."""
        with self._lock:
            ticket = self._machine.calls.get(keys, self._clock.now())
            self._carry_out()
        return ticket

    def put(self, keys: Sequence[StoreKey], blocks: Sequence[memoryview], seals: Sequence[bytes]) -> PutTicket:
        """See ``BlockStore``."""
        with self._lock:
            ticket = self._machine.calls.put(keys, blocks, seals, self._clock.now())
            self._carry_out()
        return ticket

    def release(self, ticket: GetTicket) -> None:
        """See ``BlockStore``."""
        with self._lock:
            self._machine.calls.release(ticket)
            self._carry_out()

    def copy_out(self, block: StoredBlock, target: memoryview) -> None:
        """See ``BlockStore``. The copy and its digest are one pass, with the GIL released."""
        content = block.content
        if target.nbytes != content.nbytes:
            self._reject(block, StaleBlock(f"a block of {content.nbytes} bytes where one of {target.nbytes} was expected"))
        with self._rejecting(block):
            self._verifier().copy(block.key, block.seal, content, target)

    def verify(self, block: StoredBlock) -> None:
        """See ``BlockStore``."""
        with self._rejecting(block):
            self._verifier().check(block.key, block.seal, block.content)

    def statistics(self) -> StoreStatistics:
        """See ``BlockStore``."""
        with self._lock:
            return self._machine.statistics()

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """Wait for a ticket, for tools and tests; an engine asks ``is_done`` instead."""
        with self._progress:
            return self._progress.wait_for(lambda: ticket.is_done, timeout_s)

    @abstractmethod
    def _carry_out(self) -> None:
        """Carry out the queued actions, or pass them to the thread that does. Called with the lock held."""

    @contextmanager
    def _rejecting(self, block: StoredBlock) -> Iterator[None]:
        """Reject a block that does not pass the check inside, or whose slot was reused meanwhile."""
        try:
            yield
        except (StaleBlock, CorruptBlock) as error:
            self._reject(block, error)
        if not block.is_current():
            self._reject(block, StaleBlock("the slot was reused while it was read"))

    def _reject(self, block: StoredBlock, error: StaleBlock | CorruptBlock) -> None:
        """Count a block that failed verification. If its slot was reused, the bytes prove nothing about the block."""
        is_reused = not block.is_current()
        found = StaleBlock("the slot was reused while it was read") if is_reused else error
        with self._lock:
            self._machine.calls.reject(block, found.code, tell=not is_reused)
            self._carry_out()
        raise found from None

    def _verifier(self) -> BlockVerifier:
        if not hasattr(self._local, "verifier"):
            self._local.verifier = BlockVerifier()
        verifier: BlockVerifier = self._local.verifier
        return verifier
