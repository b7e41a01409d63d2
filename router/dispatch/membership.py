"""Which workers are alive, and which of them make progress: a synchronous state machine without I/O.

Owns registration, heartbeats, timeouts, restarts and duplicates. No worker is judged silent, stalled or unreachable shortly
after a pause of the router itself (``router.dispatch.pauses``).

A worker is identified by (engine_id, incarnation). A new incarnation of a name replaces the old one at once, and the old
process's requests are lost. If the old process is still alive, two processes share a name; the older one is refused until the
newer one has left (``router.dispatch.namesakes``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from core.wire.messages import (
    ErrorInfo,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Registered,
    RegisterEncoder,
    Role,
    RouterMessage,
)
from router.dispatch.members import EncodeWorker, GenerationWorker, Member, WorkerKey
from router.dispatch.namesakes import Namesakes
from router.dispatch.pauses import OwnPauses
from router.dispatch.policy import can_hand_over
from router.dispatch.progress import Standing

NOT_REGISTERED = "not_registered"
DUPLICATE_ENGINE_ID = "duplicate_engine_id"
MODEL_MISMATCH = "model_mismatch"

# Connections per worker: the current one, the last one, which may still deliver messages, and those of a worker to which this
# router has several addresses: it registers by all of them at once.
_MAX_PEERS = 4
_MAX_MET_PREFILLS = 64


@dataclass(frozen=True, slots=True)
class ReplyToPeer:
    """Send a message to a connection, registered or not."""

    peer: bytes
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker takes requests from now on."""

    worker: Member


@dataclass(frozen=True, slots=True)
class Left:
    """The worker has left, and its requests are lost. ``is_orderly`` after a goodbye.

    With ``is_back`` only its requests are lost: it is still a member, by a new connection.
    """

    worker: Member
    reason: str
    is_orderly: bool = False
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """The worker's engine makes no progress; it gets no requests until it resumes."""

    worker: Member


@dataclass(frozen=True, slots=True)
class Resumed:
    """A stalled worker makes progress again; it is on probation."""

    worker: Member


@dataclass(frozen=True, slots=True)
class Switched:
    """The worker has another role than ``before``; what it had in that role runs to its end."""

    worker: GenerationWorker
    before: Role


MembershipAction = ReplyToPeer | Joined | Left | Stalled | Resumed | Switched


class Membership:
    """The workers that this router may use.

    ``model`` is the name that clients use; workers with another model are refused. ``welcome`` answers registrations and
    heartbeats; with ``takes_contents`` it asks for reports of contents, and with ``plans_roles`` for the right to change roles.
    Times are seconds of one monotonic clock.
    """

    def __init__(
        self,
        model: str,
        router_id: str,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        *,
        takes_contents: bool = False,
        plans_roles: bool = False,
    ) -> None:
        self._model = model
        self._timeout_s = heartbeat_timeout_s
        self.pauses = OwnPauses(heartbeat_interval_s, settle_s=heartbeat_timeout_s)
        self.welcome = Registered(
            router_id=router_id,
            heartbeat_interval_ms=round(heartbeat_interval_s * 1000),
            heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
            takes_contents=takes_contents,
            takes_parts=takes_contents,
            plans_roles=plans_roles,
        )
        self._members: dict[str, Member] = {}  # by engine_id
        # One prefill worker per combination of facts that handoffs depend on.
        self._met_prefills: dict[tuple[object, ...], Register] = {}
        self._by_peer: dict[bytes, Member] = {}
        self._namesakes = Namesakes(heartbeat_timeout_s)

    @property
    def members(self) -> Iterable[Member]:
        """All live processes in the order of their first registration, including draining ones."""
        return self._members.values()

    @property
    def workers(self) -> list[GenerationWorker]:
        """The members that serve requests."""
        return [member for member in self._members.values() if isinstance(member, GenerationWorker)]

    @property
    def encoders(self) -> list[EncodeWorker]:
        """The members that embed images."""
        return [member for member in self._members.values() if isinstance(member, EncodeWorker)]

    @property
    def has_cut_off(self) -> bool:
        """True while a member's connection is known to be lost, after a pause of the router."""
        return any(member.cut_peer is not None for member in self._members.values())

    def member(self, key: WorkerKey | None) -> Member | None:
        """Return the member with this key; None if the process has left or was replaced."""
        member = self._members.get(key.engine_id) if key else None
        return member if member is not None and member.key == key else None

    def get(self, key: WorkerKey | None) -> GenerationWorker | None:
        """Return the prefill, decode or aggregated worker with this key; None if the process has left or was replaced."""
        member = self.member(key)
        return member if isinstance(member, GenerationWorker) else None

    def by_peer(self, peer: bytes) -> Member | None:
        """Return the member to which a connection belongs."""
        return self._by_peer.get(peer)

    def on_register(self, peer: bytes, facts: Register | RegisterEncoder, now: float) -> list[MembershipAction]:
        """Register a worker, or refresh or refuse its registration. Always answers."""
        key = WorkerKey(facts.engine_id, facts.incarnation)
        if facts.model != self._model:
            message = f"this router serves {self._model!r}, the worker {facts.engine_id} has {facts.model!r}"
            return [_refuse(peer, MODEL_MISMATCH, message)]
        if self._must_wait(key, now):
            return [_refuse_duplicate(peer, key)]
        actions: list[MembershipAction] = []
        before = self._by_peer.get(peer)
        if before is not None and before.key != key:
            actions.append(self._remove(before, f"its connection registered as {facts.engine_id}"))
        known = self.member(key)
        role_before = known.role if known is not None else None
        if known is not None and facts.is_spare:
            self._note_spare(known, peer)
        elif known is not None and _take_facts(known, facts):
            actions += self._heard_from(known, peer, now, takeover=facts.takeover)
            _use(known, peer)
            known.peers.remove(peer)
            known.peers.append(peer)  # the newest is last, also if it was known
            if isinstance(known, GenerationWorker) and role_before not in (None, known.role):
                self._note_role(known)
                actions.append(Switched(known, role_before))
        else:
            namesake = self._members.get(facts.engine_id)
            if namesake is not None:
                actions.append(self._remove(namesake, "a new process registered under its name"))
            self._namesakes.join(key)
            member = _new_member(key, peer, facts, now)
            self._members[facts.engine_id] = member
            self._by_peer[peer] = member
            self._note_role(member)
            actions.append(Joined(member))
        return [*actions, ReplyToPeer(peer, self.welcome_of(self._members[facts.engine_id]))]

    def welcome_of(self, member: Member) -> Registered:
        """Return the answer to a member's registration or heartbeat; it shows which registration this router has."""
        if not isinstance(member, GenerationWorker) or not member.facts.num_switches:
            return self.welcome
        return msgspec.structs.replace(self.welcome, num_switches=member.facts.num_switches)

    def on_heartbeat(self, peer: bytes, heartbeat: Heartbeat, now: float) -> list[MembershipAction]:
        """Record the worker's load, and answer to show that this router is alive. An unknown worker is asked to register."""
        key = WorkerKey(heartbeat.engine_id, heartbeat.incarnation)
        worker = self.member(key)
        if worker is None:
            if self._must_wait(key, now):
                return [_refuse_duplicate(peer, key)]
            return [_refuse(peer, NOT_REGISTERED, f"{key.engine_id} is not registered here: register first", retryable=True)]
        actions = self._heard_from(worker, peer, now)
        worker.note_load(heartbeat, now, self.welcome.heartbeat_interval_ms / 1e3)
        return [*actions, ReplyToPeer(peer, self.welcome_of(worker))]

    def on_goodbye(self, goodbye: Goodbye) -> list[MembershipAction]:
        """Remove a worker that leaves in order. Of one that was lost already, its name need not be kept any longer."""
        key = WorkerKey(goodbye.engine_id, goodbye.incarnation)
        worker = self.member(key)
        if worker is None:
            self._namesakes.will_not_return(key)
            return []
        return [self._remove(worker, "it said goodbye", is_orderly=True)]

    def on_broken(self, worker: Member, reason: str) -> list[MembershipAction]:
        """Drop a worker that is unreachable or violates the protocol; it may register again."""
        return [self._remove(worker, reason)] if self.member(worker.key) is worker else []

    def on_unreachable(self, peer: bytes, now: float) -> list[MembershipAction]:
        """Drop the worker whose connection is lost, unless it has a newer one: late messages of the old one may still come.

        After a pause of the router, the worker may have closed the connection itself; it gets time to open another one.
        """
        worker = self.by_peer(peer)
        if worker is None or peer != worker.peer:
            return []
        if not self.pauses.is_settling(now):
            return self.on_broken(worker, "its connection is gone")
        worker.cut_peer = peer
        return []

    def on_timer(self, now: float) -> list[MembershipAction]:
        """Drop workers that were silent for too long, and find those that stalled or resumed.

        A tick counts as at most one heartbeat interval of silence. After a longer gap this router was paused, and messages of
        the workers may still be unread.
        """
        lateness = self.pauses.on_tick(now)
        for worker in self._members.values() if lateness else ():
            worker.last_seen = min(now, worker.last_seen + lateness)
        silent = [worker for worker in self._members.values() if now - worker.last_seen > self._timeout_s]
        actions: list[MembershipAction] = []
        for worker in silent:
            actions.append(self._remove(worker, f"no heartbeat for {now - worker.last_seen:.1f} s"))
        return actions if self.pauses.is_settling(now) else actions + self._judge(now)

    def _judge(self, now: float) -> list[MembershipAction]:
        """Drop workers that lost their connection and have not returned; find those that stalled or resumed."""
        actions: list[MembershipAction] = []
        for worker in list(self._members.values()):
            if worker.cut_peer is not None:
                actions.append(self._remove(worker, "its connection is gone"))
            elif worker.progress.judge(now):
                has_stalled = worker.progress.standing is Standing.STALLED
                actions.append(Stalled(worker) if has_stalled else Resumed(worker))
        return actions

    def touch(self, worker: Member, now: float) -> None:
        """Record that a message of the worker arrived."""
        worker.last_seen = now

    def _heard_from(self, worker: Member, peer: bytes, now: float, *, takeover: int = 0) -> list[MembershipAction]:
        """Record a message of the worker. On a new connection, messages of the old one may be lost, and so its requests.

        A known connection that has taken over from a lost one is as a new one.
        """
        worker.last_seen = now
        is_known = peer in worker.peers
        if is_known and takeover <= worker.takeover:
            return []
        worker.takeover = max(worker.takeover, takeover)
        actions: list[MembershipAction] = []
        if worker.num_inflight:
            actions = [Left(worker, "its connection broke and was made again", is_back=True)]
        if not is_known:
            self._note_peer(worker, peer, len(worker.peers))
        _use(worker, peer)
        return actions

    def _note_spare(self, worker: Member, peer: bytes) -> None:
        """Remember a connection that the worker does not use: nothing is lost if it is new."""
        if peer not in worker.peers:
            self._note_peer(worker, peer, len(worker.peers) - 1)

    def _note_peer(self, worker: Member, peer: bytes, place: int) -> None:
        worker.peers.insert(place, peer)
        self._by_peer[peer] = worker
        while len(worker.peers) > _MAX_PEERS:
            self._forget_peer(worker, worker.peers.pop(0))

    def _note_role(self, member: Member) -> None:
        if isinstance(member, GenerationWorker) and member.role == "prefill":
            facts = member.facts
            kind = (facts.connector, facts.transports, facts.host_id, facts.model_fingerprint, facts.layout, facts.has_digests)
            is_new = kind not in self._met_prefills
            self._met_prefills[kind] = self._met_prefills.pop(kind, facts)
            while len(self._met_prefills) > _MAX_MET_PREFILLS:
                del self._met_prefills[next(iter(self._met_prefills))]
            for worker in self.workers if is_new else ():
                self._note_met(worker, (facts,))
        elif isinstance(member, GenerationWorker):
            self._note_met(member, self._met_prefills.values())

    @staticmethod
    def _note_met(worker: GenerationWorker, prefills: Iterable[Register]) -> None:
        """Let a decode worker serve alone if one of these prefill workers could hand over to it."""
        if worker.role == "decode" and not worker.may_serve_alone:
            worker.may_serve_alone = any(can_hand_over(prefill, worker.facts) for prefill in prefills)

    def _forget_peer(self, worker: Member, peer: bytes) -> None:
        if self._by_peer.get(peer) is worker:  # another worker may use the connection by now
            del self._by_peer[peer]

    def _must_wait(self, key: WorkerKey, now: float) -> bool:
        return self._namesakes.must_wait(key, now, is_settling=self.pauses.is_settling(now))

    def _remove(self, worker: Member, reason: str, *, is_orderly: bool = False) -> Left:
        del self._members[worker.key.engine_id]
        self._namesakes.leave(worker.key, worker.last_seen, is_orderly=is_orderly)
        for peer in worker.peers:
            self._forget_peer(worker, peer)
        return Left(worker, reason, is_orderly)


def _new_member(key: WorkerKey, peer: bytes, facts: Register | RegisterEncoder, now: float) -> Member:
    if isinstance(facts, Register):
        return GenerationWorker(key=key, peer=peer, facts=facts, last_seen=now, peers=[peer], takeover=facts.takeover)
    return EncodeWorker(key=key, peer=peer, facts=facts, last_seen=now, peers=[peer], takeover=facts.takeover)


def _use(worker: Member, peer: bytes) -> None:
    """Send to a connection from now on. The worker is cut off no more, unless that is the one that was found lost."""
    worker.peer = peer
    if peer != worker.cut_peer:
        worker.cut_peer = None


def _take_facts(member: Member, facts: Register | RegisterEncoder) -> bool:
    """Update a member's registration, unless it is older than the known one; return False if its kind of role has changed."""
    if isinstance(member, GenerationWorker) and isinstance(facts, Register):
        if facts.num_switches >= member.facts.num_switches:
            member.facts = facts
        return True
    if isinstance(member, EncodeWorker) and isinstance(facts, RegisterEncoder):
        member.facts = facts
        return True
    return False


def _refuse(peer: bytes, code: str, message: str, *, retryable: bool = False) -> ReplyToPeer:
    return ReplyToPeer(peer, Refused(error=ErrorInfo(code=code, message=message, http_status=400, retryable=retryable)))


def _refuse_duplicate(peer: bytes, key: WorkerKey) -> ReplyToPeer:
    message = (
        f"another process has registered as {key.engine_id} since: give each worker an engine_id of its own, or stop this one, "
        "which gets no requests here; it is taken in again once the other has left, and while that one drains, new requests "
        "that no other worker can serve are refused"
    )
    return _refuse(peer, DUPLICATE_ENGINE_ID, message)
