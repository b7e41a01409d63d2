"""Early pulls: pass a prompt's sealed prefix on from its prefill worker to the decode worker that is reserved for it.

Owns which decode worker reads early. Its early pull ends when the attempt gets another decode worker, is over, or has failed.
Nothing waits for these messages.
"""

from __future__ import annotations

from core.wire.early import PrefillProgress, PullEarly
from core.wire.messages import Abort
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.policy import why_not_read
from router.dispatch.request_state import RequestPhase, RequestState, SendToWorker


class EarlyPullRelay:
    """The early pulls of all requests; ``Attempt.early_decode`` is the reader."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def is_wanted(self, decode: GenerationWorker, prefill: GenerationWorker | None) -> bool:
        """Return True if the prefill worker should report the progress of a prompt for this decode worker."""
        return prefill is not None and decode.facts.reads_early and why_not_read(prefill, decode) is None

    def pass_on(self, sender: GenerationWorker, request: RequestState | None, message: PrefillProgress) -> list[SendToWorker]:
        """Return the message to the decode worker; none if the report is late, or there is no such worker any more."""
        handoff = message.kv_handoff
        if request is None or request.phase is not RequestPhase.PREFILL or request.attempt.prefill != sender.key:
            return []
        decode, reader = self._membership.get(request.attempt.decode), request.attempt.early_decode
        is_other = reader is not None and (decode is None or reader != decode.key)
        if decode is None or decode.is_closed or is_other or not self.is_wanted(decode, sender):
            return self.stop(request)
        if (handoff.engine_id, handoff.incarnation) != sender.key or (reader is None and message.first_token):
            return []
        request.attempt.early_decode = decode.key
        wanted, is_first = request.submission, reader is None
        pull = PullEarly(
            request_id=request.wire_id,
            kv_handoff=handoff,
            first_token=message.first_token,
            ready_ms=message.ready_ms,
            prompt_token_ids=wanted.prompt_token_ids if is_first else (),
            cache_salt=wanted.cache_salt if is_first else "",
            mm_features=wanted.mm_features if is_first else (),
        )
        return [SendToWorker(decode.key, pull)]

    def stop(self, request: RequestState, successor: WorkerKey | None = None) -> list[SendToWorker]:
        """Return the end of the attempt's early pull, if it has one. For ``successor`` the request itself is the end."""
        reader, request.attempt.early_decode = request.attempt.early_decode, None
        if reader is None or reader == successor:
            return []
        return [SendToWorker(reader, Abort(request_ids=(request.wire_id,), reason="early"))]
