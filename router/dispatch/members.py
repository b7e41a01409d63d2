"""What the router knows of one process of the cluster: what it says of itself, its load, and whether it takes requests.

Owns the types. ``router.dispatch.membership`` says who is a member, ``router.dispatch.policy`` who suits a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from core.errors import EngineDead, NoWorker, Overloaded
from core.wire.messages import ErrorInfo, Register, RegisterEncoder, Role
from router.dispatch.progress import Standing, WorkerProgress

_CLOSED = frozenset({NoWorker.code, EngineDead.code})  # it drains or has died: room has nothing to do with it


class WorkerKey(NamedTuple):
    """One process of one instance."""

    engine_id: str
    incarnation: int


@dataclass(slots=True, kw_only=True)
class Member(ABC):
    """A live process of the cluster as the router sees it.

    ``num_inflight`` is what it has of this router's own requests (choices, or images); the dispatcher moves it.
    ``is_refusing`` holds from a refusal for lack of room until the next heartbeat, which tells how things are, and so does
    ``closed_because`` from a failure by which it said, and why, that it takes nothing at all. ``cut_peer`` is a connection that
    was found gone while the router itself had stood still: the process may live, and come back by another one.
    """

    key: WorkerKey
    peer: bytes  # ZeroMQ identity that messages to it are addressed to
    last_seen: float
    peers: list[bytes] = field(default_factory=list)  # the connections it was heard on first most recently, oldest first
    is_draining: bool = False
    is_refusing: bool = False
    closed_because: str = ""
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_leased_blocks: int = 0
    num_inflight: int = 0
    last_picked: int = 0
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    cut_peer: bytes | None = None

    @property
    @abstractmethod
    def role(self) -> Role:
        """What the process does."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """How much of what it holds it works on at a time, or may hold where that is not said."""

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]:
        """How others read what it has."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The release that it runs, for people; empty if it does not say."""

    @abstractmethod
    def has_room(self, count: int) -> bool:
        """Say whether it would admit so much more, as far as is known here."""

    @property
    def why_unresponsive(self) -> str:
        """Why nothing can be expected of it at the moment, although it is a member; empty if something can."""
        if self.cut_peer is not None:
            return f"worker {self.key.engine_id} is cut off: its connection is gone"
        return f"worker {self.key.engine_id} has stalled: {self.progress.why}" if self.progress.why else ""

    @property
    def is_reserve(self) -> bool:
        """Whether it gets requests only where nobody else could serve: it is on probation, and its one request is out."""
        progress = self.progress
        return progress.standing is Standing.PROBATION and (progress.is_backing_off or self.num_inflight > 0)

    @property
    def why_closed(self) -> str:
        """Why it takes no new requests, whatever room it has; empty if it does."""
        draining = f"worker {self.key.engine_id} is draining" if self.is_draining else ""
        return self.closed_because or draining or self.why_unresponsive

    @property
    def is_closed(self) -> bool:
        """Whether it takes no new requests, whatever room it has."""
        return bool(self.why_closed)

    def note_failure(self, error: ErrorInfo) -> None:
        """Note what its failure of one request, if anything, says of all others."""
        if error.code == Overloaded.code:
            self.is_refusing = True
        elif error.code in _CLOSED:
            self.closed_because = error.message or error.code

    @property
    def num_held(self) -> int:
        """What it holds: our own count is never late, the heartbeat's includes that of other routers."""
        return max(self.num_inflight, self.num_running + self.num_waiting)


@dataclass(slots=True, kw_only=True)
class Worker(Member):
    """A prefill, decode or aggregated worker; it holds choices.

    ``may_serve_alone``: a decode worker of a cluster in which there has been a prefill worker that it can read. Before one has
    registered, the cluster is still starting, or its workers do not fit together.
    """

    facts: Register
    may_serve_alone: bool = False

    @property
    def role(self) -> Role:
        """What the worker does."""
        return self.facts.role

    @property
    def num_slots(self) -> int:
        """Choices in its batch."""
        return self.facts.max_num_seqs

    @property
    def transports(self) -> tuple[str, ...]:
        """Of KV blocks."""
        return self.facts.transports

    @property
    def version(self) -> str:
        """As it has said."""
        return self.facts.version

    @property
    def load(self) -> float:
        """Choices per slot."""
        return self.num_held / self.num_slots

    def may_hold(self, num_choices: int) -> bool:
        """Say whether so many choices would fit if it had no others."""
        limit = self.facts.max_num_choices
        return not limit or num_choices <= limit

    def has_room(self, count: int) -> bool:
        """Say whether it would admit so many choices more, as far as is known here."""
        limit = self.facts.max_num_choices
        return not self.is_refusing and (not limit or self.num_held + count <= limit)


@dataclass(slots=True, kw_only=True)
class Encoder(Member):
    """An encode worker; it holds images."""

    facts: RegisterEncoder

    @property
    def role(self) -> Role:
        """What the worker does."""
        return "encode"

    @property
    def num_slots(self) -> int:
        """Images that it holds at most."""
        return self.facts.max_num_images

    @property
    def transports(self) -> tuple[str, ...]:
        """The connector that embeddings are read by."""
        return (self.facts.ec_connector,)

    @property
    def version(self) -> str:
        """As it has said."""
        return self.facts.version

    def has_room(self, count: int) -> bool:
        """Say whether it would admit so many images more, as far as is known here."""
        return not self.is_refusing and self.num_held + count <= self.num_slots
