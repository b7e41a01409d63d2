"""What the router knows of one process of the cluster: its registration, its load, and whether it takes requests.

Owns the types. ``router.dispatch.membership`` decides which processes are members, ``router.dispatch.policy`` which of them
suit a request.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from core.errors import EngineDead, NoWorker, Overloaded
from core.wire.messages import ErrorInfo, Heartbeat, Register, RegisterEncoder, Role
from router.dispatch.progress import Standing, WorkerProgress

_MAX_WAIT_FOR_READERS_S = 2.0
_REGULAR_SHARE = 0.9  # of the interval of heartbeats: the network may bring two closer together
_CLOSED = frozenset({NoWorker.code, EngineDead.code})  # it drains or has died, however much room it has


class WorkerKey(NamedTuple):
    """One process: a worker's name and the incarnation of its process."""

    engine_id: str
    incarnation: int


def is_of_one_request(error: ErrorInfo) -> bool:
    """Return True if a worker has room, only not for what one field of this request asks for, as a grammar to be compiled."""
    return error.code == Overloaded.code and error.param is not None


@dataclass(slots=True, kw_only=True)
class Member(ABC):
    """A live process of the cluster as the router sees it.

    ``num_inflight`` counts choices or images of this router's own requests, ``num_inflight_tokens`` the most tokens of these
    choices, and ``num_reserved`` those of them whose prompts another worker computes; ``reserved_until`` tells by request when
    that will be done, as was predicted when it was placed (router time; 0 = not known). ``is_refusing`` is set by a refusal for
    lack of room, unless it is of one request only, and ``closed_because`` by a failure that says why the process takes no
    requests; the next regular heartbeat clears both, the last one at ``refusals_ended_at`` (router time).
    ``cut_peer`` is a connection that was found lost after a pause of the router itself: the process may be alive, and may
    return on another connection. ``takeover`` is the highest number of a takeover that its registrations have named.
    ``awaits_readers_since`` is the router time of the first of its latest heartbeats that all reported waiting requests, leased
    blocks and no running request; None if the last one did not.
    """

    key: WorkerKey
    peer: bytes  # the ZeroMQ identity that messages are sent to
    last_seen: float
    peers: list[bytes] = field(default_factory=list)  # its latest connections, oldest first
    is_draining: bool = False
    is_refusing: bool = False
    closed_because: str = ""
    refusals_ended_at: float = -math.inf
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_leased_blocks: int = 0
    num_inflight: int = 0
    num_inflight_tokens: int = 0
    num_reserved: int = 0
    reserved_until: dict[str, float] = field(default_factory=dict)
    last_picked: int = 0
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    cut_peer: bytes | None = None
    takeover: int = 0
    awaits_readers_since: float | None = None

    def note_load(self, heartbeat: Heartbeat, now: float, interval_s: float = 0.0) -> None:
        """Record how loaded it is at router time ``now``, in seconds, by its heartbeat.

        A regular one comes each ``interval_s``. Only that ends a refusal: there are others between two of these while other
        routers send it prompts, and so most while it is full.
        """
        self.num_running = heartbeat.num_running
        self.num_waiting = heartbeat.num_waiting
        self.kv_cache_usage = heartbeat.kv_cache_usage
        self.num_leased_blocks = heartbeat.num_leased_blocks
        self.is_draining = heartbeat.is_draining
        if now - self.refusals_ended_at >= _REGULAR_SHARE * interval_s:
            self.is_refusing, self.closed_because, self.refusals_ended_at = False, "", now
        self.progress.on_heartbeat(heartbeat, now)
        if not heartbeat.num_waiting or not heartbeat.num_leased_blocks or heartbeat.num_running:
            self.awaits_readers_since = None
        elif self.awaits_readers_since is None:
            self.awaits_readers_since = now

    def why_full(self, now: float) -> str:
        """Return why its waiting requests should go elsewhere: readers have kept its blocks for too long. Empty if not."""
        since = self.awaits_readers_since
        if since is None or now - since <= _MAX_WAIT_FOR_READERS_S:
            return ""
        return f"worker {self.key.engine_id} has waited {now - since:.1f} s for readers to release blocks"

    @property
    @abstractmethod
    def role(self) -> Role:
        """The role of the process."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """How many choices it computes at a time, or how many images it may hold."""

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]:
        """How other workers read its data."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The release it runs, for display; empty if it does not report one."""

    @abstractmethod
    def has_room(self, count: int) -> bool:
        """Return True if it would admit ``count`` more, as far as this router knows."""

    @property
    def why_unresponsive(self) -> str:
        """Why this member makes no progress now: its connection is lost, or it has stalled. Empty if it makes progress."""
        if self.cut_peer is not None:
            return f"worker {self.key.engine_id} is cut off: its connection is gone"
        return f"worker {self.key.engine_id} has stalled: {self.progress.why}" if self.progress.why else ""

    @property
    def is_reserve(self) -> bool:
        """True if it gets requests only as a last resort: it is on probation and backs off, or has a request already."""
        progress = self.progress
        return progress.standing is Standing.PROBATION and (progress.is_backing_off or self.num_inflight > 0)

    @property
    def why_closed(self) -> str:
        """Why it takes no new requests, however much room it has; empty if it takes them."""
        draining = f"worker {self.key.engine_id} is draining" if self.is_draining else ""
        return self.closed_because or draining or self.why_unresponsive

    @property
    def is_closed(self) -> bool:
        """True if it takes no new requests, however much room it has."""
        return bool(self.why_closed)

    def note_failure(self, error: ErrorInfo) -> None:
        """Record whether this failure of one request means that the worker would refuse others too."""
        if error.code == Overloaded.code and not is_of_one_request(error):
            self.is_refusing = True
        elif error.code in _CLOSED:
            self.closed_because = error.message or error.code

    @property
    def num_held(self) -> int:
        """The larger of this router's own count, which is current, and the heartbeat's, which covers all routers."""
        return max(self.num_inflight, self.num_running + self.num_waiting)

    def next_begins_in_s(self, now: float) -> float:
        """Return in how many seconds the first request may begin here whose prompt is computed elsewhere; inf without any."""
        return max(0.0, min(self.reserved_until.values(), default=math.inf) - now)

    @property
    def num_present(self) -> int:
        """As ``num_held``, without those that are still elsewhere."""
        return max(self.num_inflight - self.num_reserved, self.num_running + self.num_waiting)


@dataclass(slots=True, kw_only=True)
class GenerationWorker(Member):
    """A prefill, decode or aggregated worker; it holds choices.

    ``may_serve_alone`` is set on a decode worker once a prefill worker that it can read from has registered. Before that, the
    cluster is still starting, or its workers do not fit together.
    """

    facts: Register
    may_serve_alone: bool = False
    heartbeat: Heartbeat | None = None  # the latest
    heartbeat_at: float = 0.0  # router time
    num_moved: int = 0  # prompts that this router has moved away since then

    def note_load(self, heartbeat: Heartbeat, now: float, interval_s: float = 0.0) -> None:
        """See ``Member``."""
        Member.note_load(self, heartbeat, now, interval_s)
        self.heartbeat, self.heartbeat_at, self.num_moved = heartbeat, now, 0

    @property
    def num_of_former_role(self) -> int:
        """Requests that it took in another role than the present one, by its latest heartbeat."""
        return self.heartbeat.num_of_former_role if self.heartbeat is not None else 0

    @property
    def is_switching(self) -> bool:
        """True while requests or leases of a former role are left, by its latest heartbeat."""
        has_leases = self.num_leased_blocks > 0 and self.role != "prefill"
        return self.facts.num_switches > 0 and (self.num_of_former_role > 0 or has_leases)

    @property
    def role(self) -> Role:
        """The registered role."""
        return self.facts.role

    @property
    def num_slots(self) -> int:
        """The most choices in one batch."""
        return self.facts.max_num_seqs

    @property
    def transports(self) -> tuple[str, ...]:
        """How decode workers read its KV blocks."""
        return self.facts.transports

    @property
    def version(self) -> str:
        """As it has said."""
        return self.facts.version

    @property
    def load(self) -> float:
        """Choices per slot."""
        return self.num_held / self.num_slots

    @property
    def kv_load(self) -> float:
        """The tokens that this router's requests may come to hold there, per token of KV cache."""
        return self.num_inflight_tokens / max(1, self.facts.num_blocks * self.facts.layout.block_size)

    def has_free_tokens(self, num_tokens: int) -> bool:
        """Return True if so many tokens fit beside what it holds by its heartbeat, and what this router's requests may hold."""
        capacity = self.facts.num_blocks * self.facts.layout.block_size
        return num_tokens + max(self.num_inflight_tokens, self.kv_cache_usage * capacity) <= capacity

    def may_hold(self, num_choices: int) -> bool:
        """Return True if this many choices would fit in an idle worker."""
        limit = self.facts.max_num_choices
        return not limit or num_choices <= limit

    def has_unleased_blocks(self, num_tokens: int) -> bool:
        """Return True if the blocks of so many tokens fit beside those that are leased to readers."""
        layout = self.facts.layout
        num_needed = -(-num_tokens // layout.block_size) * layout.num_groups
        return num_needed <= self.facts.num_blocks - self.num_leased_blocks

    def has_blocks_for(self, num_tokens: int) -> bool:
        """Return True if a prompt's blocks fit beside those of readers, and at an aggregated worker of running requests."""
        capacity = self.facts.num_blocks * self.facts.layout.block_size
        has_unused = self.role == "prefill" or num_tokens + self.kv_cache_usage * capacity <= capacity
        return has_unused and self.has_unleased_blocks(num_tokens)

    def has_room(self, count: int) -> bool:
        """Return True if it would admit this many more choices, as far as this router knows."""
        limit = self.facts.max_num_choices
        return not self.is_refusing and (not limit or self.num_held + count <= limit)


@dataclass(slots=True, kw_only=True)
class EncodeWorker(Member):
    """An encode worker; it holds images."""

    facts: RegisterEncoder

    @property
    def role(self) -> Role:
        """Always encode."""
        return "encode"

    @property
    def num_slots(self) -> int:
        """The most images it may hold."""
        return self.facts.max_num_images

    @property
    def transports(self) -> tuple[str, ...]:
        """The connector through which embeddings are read."""
        return (self.facts.ec_connector,)

    @property
    def version(self) -> str:
        """As it has said."""
        return self.facts.version

    def has_room(self, count: int) -> bool:
        """Return True if it would admit this many more images, as far as this router knows."""
        return not self.is_refusing and self.num_held + count <= self.num_slots
