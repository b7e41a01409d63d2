"""The calls of engines' own APIs: which worker has each, and how it ends. A synchronous state machine without I/O.

A call is not a request: it is sent once, and its caller decides what a failure means. ``router.dispatch.engine_api`` has the
parts of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import DeadlineExceeded, KVFerryError, PeerUnreachable, ProtocolError, WorkerStalled
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.messages import Abort, ErrorInfo, RequestFailed
from router.dispatch.attempts import EndedNames
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.membership import Left, Membership
from router.dispatch.request_state import SendToWorker


@dataclass(frozen=True, slots=True)
class Answered:
    """A part of the answer to a call, or its failure, which is the last."""

    request_id: str
    reply: EngineReply | ErrorInfo


@dataclass(slots=True)
class _Open:
    worker: GenerationWorker
    deadline: float
    needs_steps: bool
    position: int = 0  # of the next part


class EngineCalls:
    """The open calls. Each counts as one choice in its worker's ``num_inflight``. Times are seconds of the router's clock."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._open: dict[str, _Open] = {}
        self._ended = EndedNames()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def begin(self, call: EngineCall, worker: GenerationWorker, now: float) -> Sequence[SendToWorker | Answered]:
        """Send a call, which has a deadline, to a worker; one that has left since it was chosen fails the call at once."""
        member = self._membership.get(worker.key)  # another object if it has left and registered again since
        if member is None:
            return [Answered(call.request_id, _lost(worker.key))]
        self._open[call.request_id] = _Open(member, now + call.deadline_ms / 1e3, call.needs_steps)
        member.num_inflight += 1
        return [SendToWorker(member.key, call)]

    def on_reply(self, sender: WorkerKey, reply: EngineReply, now: float) -> Sequence[SendToWorker | Answered]:
        """Pass on a part. Those of other workers are ignored; a lost part fails the call; calls that have ended are aborted."""
        found = self._open.get(reply.request_id)
        if found is None:
            return [] if reply.is_last else self._ended.stop(reply.request_id, sender, now)
        if found.worker.key != sender:
            return []
        if reply.position != found.position:
            lost = ProtocolError(f"part {found.position} of an answer of {sender.engine_id} was lost on the way")
            return self.give_up(reply.request_id, lost, now)
        found.position += 1
        if reply.is_last:
            self._close(reply.request_id, now)
        return [Answered(reply.request_id, reply)]

    def on_failed(self, sender: WorkerKey, failed: RequestFailed, now: float) -> list[Answered]:
        """End a call that its worker has failed."""
        found = self._open.get(failed.request_id)
        return self.fail(failed.request_id, failed.error, now) if found is not None and found.worker.key == sender else []

    def on_rejected(self, sender: WorkerKey, error: ErrorInfo, now: float) -> list[SendToWorker | Answered]:
        """Fail the calls that the rejected message may have been: those without an answer from this worker."""
        names = [name for name, found in self._open.items() if found.worker.key == sender and not found.position]
        return [action for name in names for action in self._stop(name, error, now)]

    def on_left(self, left: Left, now: float) -> list[SendToWorker | Answered]:
        """Fail the calls of a lost worker. One that is back has them still: parts of their answers are lost, so they end."""
        worker = left.worker.key
        lost = _lost(worker)
        names = [name for name, found in self._open.items() if found.worker.key == worker]
        aborts = [SendToWorker(worker, Abort(request_ids=tuple(names), reason=lost.code))] if names and left.is_back else []
        return [*aborts, *(action for name in names for action in self.fail(name, lost, now))]

    def on_timer(self, now: float) -> list[SendToWorker | Answered]:
        """End calls at their deadline, and those that another worker can answer sooner."""
        actions: list[SendToWorker | Answered] = []
        for name, found in list(self._open.items()):
            if (error := self._why_end(found, now)) is not None:
                actions += self.give_up(name, error, now)
        return actions

    def _why_end(self, found: _Open, now: float) -> DeadlineExceeded | WorkerStalled | None:
        """Return why a call ends now: it is late, or its worker has stalled before an answer and another one works."""
        if now >= found.deadline:
            return DeadlineExceeded("the engine did not answer in the time of the request")
        worker = self._membership.get(found.worker.key)
        if not found.needs_steps or found.position or worker is None or not worker.why_unresponsive:
            return None
        same = (worker.role, worker.facts.model_fingerprint)
        others = [each for each in self._membership.workers if each.key != worker.key and each.facts.takes_calls]
        has_other = any((other.role, other.facts.model_fingerprint) == same and not other.is_closed for other in others)
        return WorkerStalled(worker.why_unresponsive) if has_other else None

    def fail(self, request_id: str, error: ErrorInfo, now: float) -> list[Answered]:
        """End a call that its worker does not have, with an error."""
        self._close(request_id, now)
        return [Answered(request_id, error)]

    def give_up(self, request_id: str, error: KVFerryError, now: float) -> list[SendToWorker | Answered]:
        """End a call with an error, at its worker as well."""
        return self._stop(request_id, ErrorInfo.of(error), now)

    def _stop(self, request_id: str, error: ErrorInfo, now: float) -> list[SendToWorker | Answered]:
        return [*self.abort(request_id, error.code, now), Answered(request_id, error)]

    def abort(self, request_id: str, reason: str, now: float) -> list[SendToWorker]:
        """End a call that its caller has given up; unknown ids are ignored."""
        found = self._open.get(request_id)
        if found is None:
            return []
        self._close(request_id, now)
        return [SendToWorker(found.worker.key, Abort(request_ids=(request_id,), reason=reason))]

    def _close(self, request_id: str, now: float) -> None:
        found = self._open.pop(request_id)
        self._ended.add(request_id, now)
        found.worker.num_inflight -= 1


def _lost(worker: WorkerKey) -> ErrorInfo:
    return ErrorInfo.of(PeerUnreachable(f"worker {worker.engine_id} was lost"))
